from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega._util.event_loops import BackgroundLoop, for_each, gather_or_cancel
from bottega.errors import BottegaError, SettingError

NAME: ContextVar[str] = ContextVar("NAME", default="unset")


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    background = BackgroundLoop()
    yield background
    background.close()


async def running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


async def test_inside_a_running_loop(loop: BackgroundLoop) -> None:
    assert loop.run(running_loop()) is not asyncio.get_running_loop()


def test_inside_asyncio_run(loop: BackgroundLoop) -> None:
    async def notebook_cell() -> list[asyncio.AbstractEventLoop]:
        return [loop.run(running_loop()) for _ in range(3)]

    assert len(set(asyncio.run(notebook_cell()) + asyncio.run(notebook_cell()))) == 1


def test_many_threads_share_the_loop(loop: BackgroundLoop) -> None:
    async def square(number: int) -> int:
        await asyncio.sleep(0.001)
        return number * number

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda number: loop.run(square(number)), range(100)))
    assert results == [number * number for number in range(100)]
    with ThreadPoolExecutor(8) as threads:
        loops = set(threads.map(lambda _: loop.run(running_loop()), range(20)))
    assert len(loops) == 1


def test_a_call_from_the_loop_itself_is_an_error(loop: BackgroundLoop) -> None:
    async def nested() -> object:
        return loop.run(running_loop())

    with pytest.raises(SettingError, match="inside its own event loop") as caught:
        loop.run(nested())
    assert "await" in caught.value.hint


def test_a_call_from_a_worker_thread_of_the_loop(loop: BackgroundLoop) -> None:
    async def nested() -> object:
        return await asyncio.to_thread(lambda: loop.run(running_loop()))

    assert loop.run(nested()) is loop.run(running_loop())


def test_errors_reach_the_caller(loop: BackgroundLoop) -> None:
    async def fail() -> None:
        raise LookupError("not found")

    with pytest.raises(LookupError, match="not found"):
        loop.run(fail())
    loop.run(running_loop())


def test_an_interrupt_cancels_the_work(
    loop: BackgroundLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    started = asyncio.run_coroutine_threadsafe

    def interrupted(work, loop):  # type: ignore[no-untyped-def]
        future = started(work, loop)

        def result() -> None:
            started(asyncio.sleep(0.05), loop).result()
            raise KeyboardInterrupt

        monkeypatch.setattr(future, "result", result)
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.run(endless())
    assert cancelled.wait(10)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_exit_reaches_its_caller_only(loop: BackgroundLoop, error: type[BaseException]) -> None:
    async def leave() -> None:
        raise error

    async def leave_in_a_task() -> None:
        await asyncio.create_task(leave())

    async def wait() -> str:
        await asyncio.sleep(0.1)
        return "done"

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: loop.run(wait()))
        for work in (leave, leave_in_a_task):
            with pytest.raises(error):
                loop.run(work())
        assert waiting.result() == "done"


def test_work_sees_the_callers_context(loop: BackgroundLoop) -> None:
    async def name() -> str:
        return NAME.get()

    token = NAME.set("caller")
    try:
        assert loop.run(name()) == "caller"
    finally:
        NAME.reset(token)


def test_closing_cancels_work_and_joins_the_thread() -> None:
    background, cancelled = BackgroundLoop(), threading.Event()

    async def endless() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async def begin() -> None:
        background.task = asyncio.ensure_future(endless())  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    others = set(threading.enumerate())
    background.run(begin())
    [thread] = set(threading.enumerate()) - others
    background.close()
    background.close()
    assert cancelled.is_set() and not thread.is_alive()


AT_EXIT = """
import asyncio
from bottega._util.event_loops import BACKGROUND_LOOP

async def stream():
    try:
        yield 1
        await asyncio.sleep(60)
    finally:
        print("closed")

async def begin():
    global open_stream
    open_stream = stream()
    print(await anext(open_stream))

BACKGROUND_LOOP.run(begin())
"""


def test_the_process_exits_cleanly() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", AT_EXIT],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout.split(), done.stderr) == (["1", "closed"], "")


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
