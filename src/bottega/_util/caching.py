"""LRU caches, work that concurrent callers share, and semaphores whose clients take turns."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Hashable
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
# Client (account id) whose request the current task serves.
CLIENT: ContextVar[str] = ContextVar("client", default="")
RESERVED_SECONDS = 3600.0


class LRUCache(Generic[K, V]):
    """Cache that drops the least recently used values beyond `max_size`, and values older than
    `seconds` when they are looked up. Threads may share it. `size` measures a value, e.g. in bytes;
    by default each value counts 1."""

    def __init__(
        self,
        max_size: int,
        size: Callable[[V], int] = lambda value: 1,
        *,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = 0
        self._max_size, self._measure = max_size, size
        self._seconds, self._clock = seconds, clock
        self._values: OrderedDict[K, tuple[V, float]] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """Return the value, None if there is none or it has expired."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            if self._seconds is not None and self._clock() - found[1] >= self._seconds:
                self._drop(key)
                return None
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: K, value: V, age: float = 0.0) -> None:
        """Store a value that is `age` seconds old in place of an older one. A value larger than
        `max_size` is not stored."""
        size = self._measure(value)
        stored = 0.0 if self._seconds is None else self._clock() - age
        with self._lock:
            self._drop(key)
            if size > self._max_size:
                return
            self._values[key] = value, stored
            self.size += size
            while self.size > self._max_size:
                self._drop(next(iter(self._values)))

    def pop(self, key: K) -> V | None:
        """Remove and return the value, None if there is none."""
        with self._lock:
            return self._drop(key)

    def values(self) -> list[V]:
        """Return all values, the least recently used first."""
        with self._lock:
            return [value for value, _ in self._values.values()]

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self.size = 0

    def _drop(self, key: K) -> V | None:
        found = self._values.pop(key, None)
        if found is None:
            return None
        self.size -= self._measure(found[0])  # a value must not change its size while cached
        return found[0]


class SharedTask(Generic[V]):
    """Task that several callers await. A caller that is cancelled does not cancel the others. When
    the last caller leaves before the end, `on_abandon` is called and the task is cancelled."""

    def __init__(
        self, work: Coroutine[Any, Any, V], on_abandon: Callable[[], object] = lambda: None
    ) -> None:
        self.task = asyncio.create_task(work)
        self._on_abandon = on_abandon
        self._waiting = 0

    async def wait(self) -> V:
        """Return the task's result, or raise its error."""
        if self.task.done():  # its event loop may be closed
            return self.task.result()
        self._waiting += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self._waiting -= 1
            if not self._waiting and not self.task.done():
                self._on_abandon()  # before the cancellation: a new caller must not join this task
                self.task.cancel()


class SingleFlight(Generic[K, V]):
    """Runner that does the work of a key once at a time in each event loop."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[asyncio.AbstractEventLoop, K], SharedTask[V]] = {}

    async def run(self, key: K, work: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """Return the result of the running task of `key`; start it if there is none."""
        loop_key = asyncio.get_running_loop(), key
        shared = self._tasks.get(loop_key)
        if shared is None:
            shared = SharedTask(work(), lambda: self._forget(loop_key, shared))
            self._tasks[loop_key] = shared
            shared.task.add_done_callback(lambda _: self._forget(loop_key, shared))
        return await shared.wait()

    def _forget(
        self, loop_key: tuple[asyncio.AbstractEventLoop, K], shared: SharedTask[V] | None
    ) -> None:
        # An abandoned task ends after the next one has started.
        if self._tasks.get(loop_key) is shared:
            del self._tasks[loop_key]


class LeaderFlight(Generic[K, V]):
    """Work that the first caller of a key does itself, e.g. a streamed reply; others wait for it.
    If the leader ends without a value (it failed, or its client left), those that waited do the
    work themselves: they do not fail with it, and they do not queue again. For one event loop."""

    def __init__(self) -> None:
        self._futures: dict[K, asyncio.Future[V | None]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    async def wait(self, key: K) -> V | None:
        """Return the leader's value. Return None at once if no caller leads: do the work within
        `lead`."""
        future = self._futures.get(key)
        # One of those that wait may be cancelled; the future is shared.
        return None if future is None else await asyncio.shield(future)

    @contextmanager
    def lead(self, key: K) -> Generator[Callable[[V], None]]:
        """Yield a function that passes the value to those that wait; at the end of the block they
        get None. If another caller leads already, none waits for this one."""
        future: asyncio.Future[V | None] = asyncio.get_running_loop().create_future()
        leads = self._futures.setdefault(key, future) is future

        def finish(value: V | None) -> None:
            if leads and self._futures.get(key) is future:
                del self._futures[key]
            if not future.done():
                future.set_result(value)

        try:
            yield finish
        finally:
            finish(None)


@dataclass(eq=False)
class _Waiter:
    need: int
    admitted: asyncio.Future[None]


@dataclass
class FairSemaphore:
    """Weighted semaphore of one event loop. Of the waiting clients the one that holds the least is
    admitted first, equal ones in turn, and the work of each client in order. No work overtakes the
    next in turn, so large work is not starved.

    Units in use are never taken back, so a client that holds some leaves room for others: `share`
    for each other client that holds nothing but did within the last hour, at most `reserved`
    together.
    """

    room: int
    at_once: int = sys.maxsize
    reserved: int = 0
    share: int = 1
    clock: Callable[[], float] = time.monotonic
    free: int = field(init=False)
    running: int = 0
    waiting: OrderedDict[str, deque[_Waiter]] = field(default_factory=OrderedDict)
    _held: dict[str, int] = field(default_factory=dict)
    # When each client that holds nothing released its last, the oldest first.
    _idle: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = self.room

    @classmethod
    def of_slots(cls, count: int) -> Self:
        """Return a semaphore of equal slots, a quarter of which can be reserved."""
        return cls(count, reserved=max(count // 4, min(1, count - 1)))

    @asynccontextmanager
    async def hold(self, need: int = 1) -> AsyncGenerator[None]:
        """Hold `need` units inside the block."""
        client = await self.acquire(need)
        try:
            yield
        finally:
            self.release(need, client)

    async def acquire(self, need: int, seconds: float | None = None) -> str:
        """Wait for `need` units. Return the client, for `release`. Raises `TimeoutError` after
        `seconds`."""
        client = CLIENT.get()
        if not self.waiting and self._fits(client, need):
            self._take(client, need)
            return client
        waiter = _Waiter(need, asyncio.get_running_loop().create_future())
        self.waiting.setdefault(client, deque()).append(waiter)
        self._admit()  # those that wait already may have to leave this room free
        try:
            async with asyncio.timeout(seconds):
                await waiter.admitted
        except BaseException:
            if waiter.admitted.done() and not waiter.admitted.cancelled():
                self.release(need, client)  # admitted at the moment it gave up
            else:
                self._forget(client, waiter)
                self._admit()  # the next waiter may need less
            raise
        return client

    def release(self, need: int, client: str) -> None:
        self.free += need
        self.running -= 1
        left = self._held.pop(client, 0) - need  # work that needs nothing may hold nothing
        if left:
            self._held[client] = left
        else:
            self._idle[client] = self.clock()
        if self.waiting:
            self._admit()

    def _fits(self, client: str, need: int) -> bool:
        return need <= self.free - self._reserved_for_others(client) and (
            self.running < self.at_once
        )

    def _reserved_for_others(self, client: str) -> int:
        if not self.reserved or client not in self._held:
            return 0
        before = self.clock() - RESERVED_SECONDS
        while self._idle and next(iter(self._idle.values())) < before:
            del self._idle[next(iter(self._idle))]
        return min(self.reserved, self.share * len(self._idle))

    def _take(self, client: str, need: int) -> None:
        self.free -= need
        self.running += 1
        self._held[client] = self._held.get(client, 0) + need
        self._idle.pop(client, None)

    def _admit(self) -> None:
        while self.waiting:
            client = min(self.waiting, key=lambda one: self._held.get(one, 0))
            queue = self.waiting[client]
            if not self._fits(client, queue[0].need):
                return
            waiter = queue.popleft()
            self.waiting.move_to_end(client)
            if not queue:
                del self.waiting[client]
            if not waiter.admitted.done():  # else it has given up, and `acquire` will clean up
                self._take(client, waiter.need)
                waiter.admitted.set_result(None)

    def _forget(self, client: str, waiter: _Waiter) -> None:
        queue = self.waiting.get(client, deque())
        if waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self.waiting[client]
