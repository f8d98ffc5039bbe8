"""Upstream calls that wait for a connection: dropping them costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Queue:
    """`waiting` while the call has not been sent."""

    waiting: bool = False


_queue: ContextVar[Queue | None] = ContextVar("queue", default=None)


@contextmanager
def queue_state() -> Iterator[Queue]:
    """Follow the upstream call that is made inside the block, also by a task that it starts."""
    queue = Queue()
    token = _queue.set(queue)
    try:
        yield queue
    finally:
        _queue.reset(token)


@asynccontextmanager
async def slot(slots: asyncio.Semaphore) -> AsyncIterator[None]:
    queue = _queue.get() or Queue()
    queue.waiting = True
    async with slots:
        queue.waiting = False
        yield
