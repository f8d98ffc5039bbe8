"""Concurrent work that ends at the first error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from bottega.errors import BottegaError

Item = TypeVar("Item")
Value = TypeVar("Value")


async def gather_or_cancel(work: Iterable[Awaitable[Value]]) -> list[Value]:
    """Return all results in order.

    The first error cancels the rest. It is raised itself, not in an exception group; of several
    errors a `BottegaError` comes first.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_awaited(one)) for one in work]
    except ExceptionGroup as errors:
        expected = (one for one in errors.exceptions if isinstance(one, BottegaError))
        raise next(expected, errors.exceptions[0]) from errors
    return [task.result() for task in tasks]


async def for_each(
    items: Iterable[Item],
    work: Callable[[Item], Awaitable[object]],
    *,
    limit: int,
    starts: Callable[[], bool] = lambda: True,
) -> None:
    """Await `work` for each item, `limit` items at a time.

    A worker ends when `starts` returns False for its next item. Errors as of `gather_or_cancel`.
    """
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            if not starts():
                return
            await work(item)

    await gather_or_cancel(worker() for _ in range(limit))


async def _awaited(work: Awaitable[Value]) -> Value:
    return await work
