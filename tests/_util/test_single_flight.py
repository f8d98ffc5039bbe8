from __future__ import annotations

import asyncio
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega._util.caching import SharedTask, SingleFlight


async def test_concurrent_callers_of_a_key_share_its_work() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    calls: list[str] = []

    async def work(key: str) -> int:
        calls.append(key)
        await asyncio.sleep(0)
        return len(calls)

    found = await asyncio.gather(*(flights.run(key, partial(work, key)) for key in "aab"))
    assert (calls, found) == (["a", "b"], [2, 2, 2])
    assert await flights.run("a", lambda: work("a")) == 3


async def test_all_callers_get_the_error_and_the_next_one_starts_again() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    errors: list[Exception] = [OSError("full"), ValueError("bad")]

    async def work() -> int:
        await asyncio.sleep(0)
        raise errors.pop(0)

    both = await asyncio.gather(*(flights.run("a", work) for _ in range(2)), return_exceptions=True)
    assert [type(one) for one in both] == [OSError, OSError]
    with pytest.raises(ValueError, match="bad"):
        await flights.run("a", work)


@given(st.lists(st.booleans(), min_size=1, max_size=6))
async def test_the_work_is_cancelled_only_when_all_callers_leave(leave: list[bool]) -> None:
    flights: SingleFlight[str, str] = SingleFlight()
    go, ended = asyncio.Event(), []

    async def work() -> str:
        try:
            await go.wait()
            return "done"
        finally:
            ended.append(go.is_set())

    callers = [asyncio.create_task(flights.run("a", work)) for _ in leave]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for caller, leaves in zip(callers, leave, strict=True):
        if leaves:
            caller.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert ended == ([False] if all(leave) else [])
    go.set()
    found = await asyncio.gather(*callers, return_exceptions=True)
    assert [one == "done" for one in found] == [not leaves for leaves in leave]


async def test_a_new_caller_does_not_join_an_abandoned_task() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    started: list[asyncio.Event] = []

    async def work() -> int:
        number = len(started)
        started.append(asyncio.Event())
        try:
            await started[number].wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # cleaning up
            raise
        return number

    first = asyncio.create_task(flights.run("a", work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    second = asyncio.create_task(flights.run("a", work))
    await asyncio.sleep(0.05)
    third = asyncio.create_task(flights.run("a", work))
    await asyncio.sleep(0)
    started[1].set()
    assert (await second, await third) == (1, 1)


def test_a_finished_task_outlives_its_event_loop() -> None:
    async def start() -> SharedTask[int]:
        shared = SharedTask(asyncio.sleep(0, 7))
        await shared.wait()
        return shared

    shared = asyncio.run(start())
    assert asyncio.run(shared.wait()) == 7
    assert not shared.has_failed
