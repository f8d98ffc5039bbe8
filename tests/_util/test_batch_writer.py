"""Writers in the background: acknowledged and unacknowledged records, failures and shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from bottega._util.batch_writer import BatchWriter, LoopWriter, WriterThread
from bottega.errors import StoreError, StoreFullError


class Gate:
    """`write_batch` that waits until `open` is set, and records its batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.started, self.open = threading.Event(), threading.Event()

    def __call__(self, records: list[int]) -> list[int]:
        self.started.set()
        assert self.open.wait(10)
        self.batches.append(records)
        return [number * number for number in records]


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def threads_named(name: str) -> int:
    return sum(one.name == name for one in threading.enumerate())


async def test_each_caller_gets_its_own_result() -> None:
    gate = Gate()
    gate.open.set()
    writer = BatchWriter(gate, name="squares")
    assert await asyncio.gather(*(writer.write(i) for i in range(50))) == [i * i for i in range(50)]
    assert sorted(number for batch in gate.batches for number in batch) == list(range(50))


async def test_records_that_wait_share_batches_of_limited_size() -> None:
    gate = Gate()
    writer = BatchWriter(gate, name="squares", max_batch=4)
    tasks = [asyncio.create_task(writer.write(0))]
    await asyncio.sleep(0)
    assert await asyncio.to_thread(gate.started.wait, 10)
    tasks += [asyncio.create_task(writer.write(i)) for i in range(1, 10)]
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.gather(*tasks)
    assert [len(batch) for batch in gate.batches] == [1, 4, 4, 1]


async def test_an_error_reaches_every_caller_of_the_batch_and_the_next_write_succeeds() -> None:
    fails = True

    def write_batch(records: list[str]) -> list[str]:
        if fails:
            raise StoreFullError("full")
        return records

    writer = BatchWriter(write_batch, name="failing")
    found = await asyncio.gather(*(writer.write("a") for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in found] == [StoreFullError] * 3
    fails = False
    assert await asyncio.wait_for(writer.write("b"), 5) == "b"
    assert writer.lost == 0


async def test_a_cancelled_caller_does_not_cancel_its_write() -> None:
    gate = Gate()
    writer = BatchWriter(gate, name="squares")
    first = asyncio.create_task(writer.write(1))
    await asyncio.sleep(0)
    assert await asyncio.to_thread(gate.started.wait, 10)
    waiting = [asyncio.create_task(writer.write(number)) for number in (2, 3)]
    await asyncio.sleep(0)
    first.cancel()
    waiting[0].cancel()
    gate.open.set()
    assert await asyncio.wait_for(waiting[1], 5) == 9
    assert gate.batches == [[1], [2, 3]]


async def test_close_waits_for_records_that_were_added_during_a_write() -> None:
    gate = Gate()
    writer = BatchWriter(gate, name="squares")
    tasks = [asyncio.create_task(writer.write(1))]
    await asyncio.sleep(0)
    assert await asyncio.to_thread(gate.started.wait, 10)
    tasks.append(asyncio.create_task(writer.write(2)))
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(writer.close))
    await asyncio.sleep(0.02)
    assert not closing.done()
    gate.open.set()
    await asyncio.wait_for(closing, 5)
    assert gate.batches == [[1], [2]]
    assert await asyncio.gather(*tasks) == [1, 4]
    with pytest.raises(StoreError, match="closed"):
        await writer.write(3)


def test_close_gives_up_after_the_timeout() -> None:
    gate = Gate()
    writer = BatchWriter(gate, name="squares", daemon=True)
    writer.put(1)
    clock = time.monotonic()
    writer.close(timeout=0.05)
    assert time.monotonic() - clock < 5
    assert gate.batches == []
    gate.open.set()


def test_a_full_queue_loses_the_new_records() -> None:
    gate = Gate()
    writer = BatchWriter(gate, name="squares", max_waiting=3, daemon=True)
    writer.put(0)
    assert gate.started.wait(10)
    for number in range(1, 6):
        writer.put(number)
    assert writer.lost == 2
    gate.open.set()
    writer.close()
    assert gate.batches == [[0], [1, 2, 3]]


def test_a_failed_batch_of_unacknowledged_records_is_lost_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stored: list[int] = []

    def write_batch(records: list[int]) -> list[None]:
        if 13 in records:
            raise ValueError("unlucky")
        stored.extend(records)
        return [None] * len(records)

    writer = BatchWriter(write_batch, name="unlucky", seconds=60.0, daemon=True)
    with caplog.at_level(logging.ERROR):
        for number in (12, 13):
            writer.put(number)
        writer.close()
    assert (writer.lost, stored) == (2, [])
    assert [record.getMessage() for record in caplog.records] == ["lost 2 records"]


def test_records_of_many_threads_are_all_written() -> None:
    stored: list[int] = []

    def write_batch(records: list[int]) -> list[None]:
        stored.extend(records)
        return [None] * len(records)

    writer = BatchWriter(write_batch, name="many", max_waiting=100_000, daemon=True)

    def put_all(start: int) -> None:
        for number in range(start, start + 2_000):
            writer.put(number)

    threads = [threading.Thread(target=put_all, args=(i * 2_000,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert (sorted(stored), writer.lost) == (list(range(8_000)), 0)


def test_an_idle_writer_has_no_thread_and_can_be_collected() -> None:
    writer = BatchWriter[int, int](list, name="bottega-test-idle", daemon=True)
    assert threads_named("bottega-test-idle") == 0
    writer.put(1)
    assert until(lambda: threads_named("bottega-test-idle") == 0)
    gone = weakref.ref(writer)
    del writer
    gc.collect()
    assert until(lambda: gone() is None)


def test_a_failed_write_is_repeated_until_it_succeeds() -> None:
    results = [False, False, True]
    calls: list[float] = []

    def write() -> bool:
        calls.append(time.monotonic())
        return results[len(calls) - 1]

    thread = WriterThread(write, name="retry", retry_seconds=0.03)
    thread.wake()
    assert until(lambda: len(calls) == 3)
    assert calls[2] - calls[0] >= 0.05
    thread.close()
    assert len(calls) == 3


def test_close_ends_the_retries() -> None:
    calls: list[int] = []

    def write() -> bool:
        calls.append(1)
        return False

    thread = WriterThread(write, name="retry", retry_seconds=60.0)
    thread.wake()
    assert until(lambda: len(calls) == 1)
    thread.close(timeout=5)
    assert len(calls) <= 2
    assert threads_named("retry") == 0
    assert not thread.wake()


def test_a_thread_that_crashed_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    crashes: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", crashes.append)
    calls: list[int] = []

    def write() -> bool:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("unexpected")
        return True

    thread = WriterThread(write, name="bottega-test-crash")
    thread.wake()
    assert until(lambda: len(crashes) == 1 and threads_named("bottega-test-crash") == 0)
    thread.wake()
    thread.close()
    assert len(calls) == 2


async def test_a_thread_that_could_not_start_is_started_by_the_next_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()
    gate.open.set()
    writer = BatchWriter(gate, name="squares")

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            await writer.write(2)
        writer.close()  # nothing to join
    writer = BatchWriter(gate, name="squares")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            await writer.write(2)
    assert await asyncio.wait_for(writer.write(3), 5) == 9


def test_a_wake_during_a_write_causes_another_one() -> None:
    started, go = threading.Event(), threading.Event()
    calls: list[int] = []

    def write() -> bool:
        calls.append(1)
        started.set()
        return go.wait(10)

    thread = WriterThread(write, name="again")
    thread.wake()
    assert started.wait(10)
    thread.wake()
    go.set()
    thread.close()
    assert len(calls) == 2


def test_a_wake_while_the_thread_is_created_does_not_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    created: list[int] = []

    class LoggingThread(threading.Thread):
        """Thread whose creation runs a finalizer that logs."""

        def __init__(self, **options: Any) -> None:
            created.append(1)
            assert thread.wake()
            super().__init__(**options)

    calls: list[int] = []

    def write() -> bool:
        calls.append(1)
        return True

    thread = WriterThread(write, name="reentrant", daemon=True)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", LoggingThread)
        thread.wake()
    thread.close(timeout=5)
    assert (len(created), len(calls)) == (1, 1)


EXIT = """
import asyncio, time
from bottega._util.batch_writer import BatchWriter

def write_batch(records):
    time.sleep(0.3)
    print("written", records, flush=True)
    return records

writer = BatchWriter(write_batch, name="exit", daemon={daemon})

async def main():
    task = asyncio.ensure_future(writer.write(1))
    await asyncio.sleep(0.05)
    task.cancel()

asyncio.run(main())
"""


@pytest.mark.parametrize(("daemon", "expected"), [(False, "written [1]\n"), (True, "")])
def test_exit_waits_only_for_a_thread_that_is_no_daemon(daemon: bool, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT.format(daemon=daemon)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr


async def test_loop_writer_writes_once_at_a_time() -> None:
    """Records that are added during a write are in the next one."""
    waiting, writes, gate = list[int](), list[list[int]](), asyncio.Event()

    async def write() -> bool:
        writes.append(waiting[:])
        waiting.clear()
        await gate.wait()
        return True

    writer = LoopWriter(write)

    def add(number: int) -> None:
        waiting.append(number)
        assert writer.wake()

    for number in range(50):
        add(number)
        await asyncio.sleep(0)
    await asyncio.to_thread(add, 50)
    await asyncio.sleep(0)  # the wake-up from the thread
    gate.set()
    await writer.aclose()
    assert writes == [[0], list(range(1, 51))]
    assert not writer.wake()


async def test_loop_writer_repeats_a_failed_write() -> None:
    results, done = [False, False, True], asyncio.Event()

    async def write() -> bool:
        result = results.pop(0)
        if not results:
            done.set()
        return result

    writer = LoopWriter(write, retry_seconds=0.01)
    writer.wake()
    await asyncio.wait_for(done.wait(), 5)
    await writer.aclose()
    results = [False]
    waits = LoopWriter(write, retry_seconds=60.0)
    waits.wake()
    await asyncio.sleep(0)
    await asyncio.wait_for(waits.aclose(), 5)  # without a further attempt
    assert results == []


def test_repeated_losses_are_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()

    def fail(batch: list[int]) -> list[None]:
        written.set()
        raise StoreError("the disk is full")

    writer: BatchWriter[int, None] = BatchWriter(fail, name="test")

    def put(count: int) -> None:
        for number in range(count):
            written.clear()
            lost = writer.lost
            writer.put(number)
            assert written.wait(60)
            while writer.lost == lost:
                time.sleep(0.001)

    def logged() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    put(20)
    assert logged() == ["lost 1 record"]
    assert caplog.records[0].exc_info is not None
    monkeypatch.setattr("bottega._util.batch_writer.LOG_SECONDS", 0.0)
    put(1)
    assert logged()[1:] == ["lost 20 records"]
    monkeypatch.setattr("bottega._util.batch_writer.LOG_SECONDS", 1e9)
    put(3)
    writer.close()
    assert logged()[2:] == ["lost 3 more records"]
    assert writer.lost == 24
