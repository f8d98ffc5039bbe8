"""Clients that leave: what is done for them is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
# Paths for monitoring, which are always answered.
WATCHED = ("/healthz", "/readyz", "/metrics")
LOOK_SECONDS = 0.05


class Watched:
    """A request under way."""

    __slots__ = ("_receive", "_watcher", "_work", "has_left")

    def __init__(self, work: asyncio.Task[Any], receive: Receive) -> None:
        self._work, self._receive = work, receive
        self._watcher: asyncio.Task[None] | None = None
        self.has_left = False

    def listen(self) -> None:
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._cancel_when_gone())

    def end(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()

    async def _cancel_when_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.has_left = True
        self._work.cancel()


class Watch:
    """Listens for the end of clients who have waited for a moment. A task or a timer for every
    request would cost as much as all else that a replay needs: one timer looks after them all."""

    def __init__(self) -> None:
        self._new: dict[Watched, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, one: Watched) -> None:
        self._new[one] = None
        if self._timer is None:
            self._look_again()

    def end(self, one: Watched) -> None:
        self._new.pop(one, None)
        one.end()

    def _look_again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(
            LOOK_SECONDS, self._look, list(self._new)
        )

    def _look(self, seen: list[Watched]) -> None:
        """Those who were here the last time, too."""
        for one in seen:
            if one in self._new:
                del self._new[one]
                one.listen()
        self._timer = None
        if self._new:
            self._look_again()
