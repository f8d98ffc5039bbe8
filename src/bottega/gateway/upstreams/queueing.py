"""State of upstream calls that wait for a connection: they can be dropped at no cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter


@dataclass
class Queue:
    """State of one upstream call; `idle` is set while it waits for a connection or for its next
    attempt, and `started` is the `perf_counter` time at which that wait ended."""

    idle: asyncio.Event = field(default_factory=asyncio.Event)
    started: float = field(default_factory=perf_counter)

    @property
    def waiting(self) -> bool:
        return self.idle.is_set()


_queue: ContextVar[Queue | None] = ContextVar("queue", default=None)


@contextmanager
def queue_state() -> Iterator[Queue]:
    """Track the upstream call made inside the block, including calls from tasks started there."""
    queue = Queue()
    token = _queue.set(queue)
    try:
        yield queue
    finally:
        _queue.reset(token)


@asynccontextmanager
async def slot(slots: asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold one of the slots, and mark the call as waiting until it is free and after a failure."""
    queue = _queue.get() or Queue()
    queue.idle.set()
    async with slots:
        queue.idle.clear()
        queue.started = perf_counter()
        try:
            yield
        except Exception:
            # The attempt failed, and the next one starts after a pause. A cancellation is not an
            # `Exception`: it ends a running call.
            queue.idle.set()
            raise
