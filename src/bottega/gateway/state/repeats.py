"""Exact repeats and single flight across all gateways, and the feed of changed replies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Literal, NamedTuple, Protocol

from bottega._util.batch_writer import OutageLog
from bottega.errors import StoreError
from bottega.gateway.state.response_cache import CachedReply, ReplyCache

log = logging.getLogger(__name__)

FLIGHT_SECONDS = 5.0  # lease of a flight, which its gateway renews
WAIT_SECONDS = 0.05  # between two polls of the flights that this gateway waits for
CURRENT_SECONDS = 0.9  # replay from memory only if the feed was read within this time
START_SECONDS = 2.0
MAX_CHANGES = 10_000


class BeginResult(NamedTuple):
    """Start of a request: a stored `reply` and its `age` in seconds, or a new flight ("lead"), or
    another gateway's flight ("wait"). `epoch` changes when all replies become invalid."""

    kind: Literal["reply", "lead", "wait"]
    epoch: int
    reply: CachedReply | None = None
    age: float = 0.0


class Changes(NamedTuple):
    """Keys whose replies have changed up to `position`. None means all keys."""

    position: tuple[int, int]
    keys: Collection[str] | None


class RepeatStore(Protocol):
    """Replies and flights of all gateways. All methods raise `StoreError`."""

    async def begin(self, key: str, flight: str, /) -> BeginResult:
        """Return a stored reply, or begin a flight unless another one of this key is running."""
        ...

    async def land(
        self, key: str, flight: str, epoch: int, reply: CachedReply | None, seconds: float, /
    ) -> None:
        """End a flight. Store its reply for `seconds`; it is found only in its epoch."""
        ...

    async def running(self, keys: Sequence[str], /) -> set[str]:
        """Return the keys that have a running flight."""
        ...

    async def renew(self, flights: Mapping[str, str], /) -> None:
        """Renew the leases of flights, by key."""
        ...

    async def replace(self, key: str, reply: CachedReply, /) -> None:
        """Replace the stored reply, if there is one, and add the change to the feed: gateways may
        have a reply in memory that the store has lost."""
        ...

    async def invalidate_all(self) -> None:
        """Begin a new epoch."""
        ...

    async def changes(self, position: tuple[int, int] | None, /) -> Changes:
        """Return the changes since a position; None returns the current one."""
        ...


@dataclass(eq=False)
class Flight:
    """Running request that identical requests of all gateways wait for. `reply` is set once it
    exists."""

    key: str
    epoch: int
    repeats: SharedRepeats
    id: str = field(default_factory=lambda: token_hex(8))
    reply: CachedReply | None = None

    async def end(self) -> None:
        """Share the reply and let waiting requests continue. Never raises: the client has its
        reply."""
        await self.repeats.land(self)


class SharedRepeats:
    """Replies of all gateways. Replies in memory are replayed only while the change feed can be
    read, so no gateway replays a deleted answer for longer than a second."""

    def __init__(self, store: RepeatStore, memory: ReplyCache, seconds: float) -> None:
        self._store, self._memory, self._seconds = store, memory, seconds
        self._position: tuple[int, int] | None = None
        self._read_at = float("-inf")
        self._started = asyncio.Event()
        self._outage = OutageLog(log)
        self._flights: dict[str, Flight] = {}
        self._waiting: dict[str, asyncio.Event] = {}
        self._poller: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        memory.is_current, memory.on_replace = self.is_current, self._start_replace

    def is_current(self) -> bool:
        """Return whether the changes of other gateways were read recently."""
        return asyncio.get_running_loop().time() - self._read_at < CURRENT_SECONDS

    async def begin(self, key: str) -> Flight | tuple[CachedReply, float] | None:
        """Return the reply of a request and its age if any gateway has it. Otherwise return a new
        flight, or None to continue without one: the store does not answer, or the flight waited
        for has failed and another gateway has begun a new one."""
        if not self._started.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._started.wait(), START_SECONDS)
        if not self.is_current():
            return None
        flight = Flight(key, 0, self)
        try:
            begun = await self._store.begin(key, flight.id)
            if begun.kind == "wait":
                await self._wait(key)
                begun = await self._store.begin(key, flight.id)
        except StoreError as error:
            self._outage.failed("exact repeats are not shared between gateways: %s", error)
            return None
        except asyncio.CancelledError:
            self._start_task(self.land(flight))  # the store may have begun the flight
            raise
        if begun.reply is not None:
            return begun.reply, begun.age
        if begun.kind == "wait":
            return None
        flight.epoch = begun.epoch
        self._flights[flight.id] = flight
        return flight

    async def land(self, flight: Flight) -> None:
        self._flights.pop(flight.id, None)
        try:
            await self._store.land(flight.key, flight.id, flight.epoch, flight.reply, self._seconds)
        except StoreError as error:
            self._outage.failed("exact repeats are not shared between gateways: %s", error)

    async def invalidate_all(self) -> None:
        """Invalidate the replies of all gateways. Raises `StoreError`."""
        self._memory.clear()
        await self._store.invalidate_all()

    async def refresh(self) -> None:
        """Renew the flights of this process, and drop changed replies from memory. Raises
        `StoreError`."""
        started = asyncio.get_running_loop().time()
        try:
            if self._flights:
                await self._store.renew({one.key: one.id for one in self._flights.values()})
            changes = await self._store.changes(self._position)
        finally:
            self._started.set()
        if changes.keys is None:
            self._memory.clear()
        for key in changes.keys or ():
            self._memory.pop(key)
        self._position, self._read_at = changes.position, started
        self._outage.ended("exact repeats are shared between gateways again")

    async def aclose(self) -> None:
        tasks = [*self._tasks, *([self._poller] if self._poller else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, key: str) -> None:
        """Wait until another gateway's flight has ended. At most one request of this process waits
        for a key: identical requests wait for that one."""
        done = self._waiting.setdefault(key, asyncio.Event())
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll())
        await done.wait()

    async def _poll(self) -> None:
        """Poll all flights that requests wait for, in one call."""
        while self._waiting:
            await asyncio.sleep(WAIT_SECONDS)
            keys = list(self._waiting)
            running: set[str] = set()
            with suppress(StoreError):  # then all waiting requests continue
                running = await self._store.running(keys)
            for key in keys:
                if key not in running:
                    self._waiting.pop(key).set()
        self._poller = None

    def _start_replace(self, key: str, reply: CachedReply) -> None:
        self._start_task(self._replace(key, reply))

    async def _replace(self, key: str, reply: CachedReply) -> None:
        try:
            await self._store.replace(key, reply)
        except StoreError as error:
            log.warning("other gateways do not get a corrected reply: %s", error)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
