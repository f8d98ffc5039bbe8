"""Completion of upstream calls after their client has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def shield_for(
    work: Coroutine[Any, Any, Result],
    seconds: float,
    may_finish: Callable[[], bool],
    idle: asyncio.Event,
) -> Result:
    """Return the result of `work`. If the caller is cancelled and `may_finish` returns True, the
    work continues for at most `seconds`, and only until `idle` is set; if it ends in time, its
    result or error replaces the cancellation. Otherwise the work is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        # `await task` would pass a cancellation of the caller on to the task.
        await asyncio.wait([task])
    except asyncio.CancelledError:
        if may_finish() and not idle.is_set():
            await _wait_until_idle(task, seconds, idle)  # or cancelled again
        if not task.done():
            raise
        current = asyncio.current_task()
        assert current is not None
        current.uncancel()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    return task.result()


async def _wait_until_idle(task: asyncio.Task[Result], seconds: float, idle: asyncio.Event) -> None:
    """Wait until the task is done or idle, for at most `seconds`."""
    waiting = asyncio.create_task(idle.wait())
    try:
        await asyncio.wait([task, waiting], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
