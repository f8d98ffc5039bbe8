"""Weighted semaphore whose waiting clients take turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from contextvars import ContextVar
from dataclasses import dataclass, field

# Client (account id) whose request the current task serves.
CLIENT: ContextVar[str] = ContextVar("client", default="")


@dataclass(eq=False)
class _Waiter:
    need: int
    admitted: asyncio.Future[None]


@dataclass
class FairSemaphore:
    """Weighted semaphore. Waiting clients are admitted in turn, the work of each client in order.
    No work overtakes the next in turn, so large work is not starved."""

    room: int
    at_once: int
    free: int = field(init=False)
    running: int = 0
    waiting: OrderedDict[str, deque[_Waiter]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.free = self.room

    async def acquire(self, need: int, seconds: float | None = None) -> None:
        """Wait for `need` units. Raises `TimeoutError` after `seconds`."""
        if not self.waiting and self._fits(need):
            self._take(need)
            return
        client, waiter = CLIENT.get(), _Waiter(need, asyncio.get_running_loop().create_future())
        self.waiting.setdefault(client, deque()).append(waiter)
        try:
            async with asyncio.timeout(seconds):
                await waiter.admitted
        except BaseException:
            if waiter.admitted.done() and not waiter.admitted.cancelled():
                self.release(need)  # admitted at the moment it gave up
            else:
                self._forget(client, waiter)
                self._admit()  # the next waiter may need less
            raise

    def release(self, need: int) -> None:
        self.free += need
        self.running -= 1
        self._admit()

    def _fits(self, need: int) -> bool:
        return need <= self.free and self.running < self.at_once

    def _take(self, need: int) -> None:
        self.free -= need
        self.running += 1

    def _admit(self) -> None:
        while self.waiting:
            client, queue = next(iter(self.waiting.items()))
            if not self._fits(queue[0].need):
                return
            waiter = queue.popleft()
            self.waiting.move_to_end(client)
            if not queue:
                del self.waiting[client]
            if not waiter.admitted.done():  # else it has given up, and `acquire` will clean up
                self._take(waiter.need)
                waiter.admitted.set_result(None)

    def _forget(self, client: str, waiter: _Waiter) -> None:
        queue = self.waiting.get(client, deque())
        if waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self.waiting[client]
