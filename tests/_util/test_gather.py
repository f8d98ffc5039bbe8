from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega._util.event_loops import for_each, gather_or_cancel
from bottega.errors import BottegaError, SettingError


async def test_results_are_in_the_order_of_the_work() -> None:
    delays = [0.02, 0.0, 0.01]
    assert await gather_or_cancel(asyncio.sleep(one, one) for one in delays) == delays


async def test_the_first_error_cancels_the_rest_and_is_raised_itself() -> None:
    cancelled = asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async def failing(error: Exception) -> None:
        await asyncio.sleep(0)
        raise error

    with pytest.raises(BottegaError, match="expected"):
        await gather_or_cancel(
            [slow(), failing(ValueError("other")), failing(SettingError("expected", hint="-"))]
        )
    assert cancelled.is_set()


@given(st.integers(0, 12), st.integers(1, 5))
async def test_each_item_is_worked_on_once_within_the_limit(count: int, limit: int) -> None:
    running, peak, done = 0, 0, []

    async def work(item: int) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0)
        running -= 1
        done.append(item)

    await for_each(range(count), work, limit=limit)
    assert sorted(done) == list(range(count))
    assert peak == min(count, limit)


async def test_no_item_starts_after_a_refusal() -> None:
    left, done = 3, []

    def starts() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    async def work(item: int) -> None:
        done.append(item)

    await for_each(range(10), work, limit=2, starts=starts)
    assert done == [0, 1, 2]
