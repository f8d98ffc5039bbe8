"""Blocking access to PostgreSQL: connections, threads, event loops and interrupts."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

import pytest

from bottega._util import postgres_database
from bottega._util.postgres import POOL_SIZE, PostgresKind, PostgresPool
from bottega._util.postgres_database import PostgresDatabase
from bottega._util.sql_tables import DatabaseTables
from bottega.errors import StoreBusyError
from tests.postgres import PostgresServer

NUMBERS = PostgresKind("numbers", ("CREATE TABLE numbers (n integer)",))
STEP = 3  # interrupt every third line: all take three times as long
PID = "SELECT pg_backend_pid() AS pid"


@pytest.fixture
def numbers(database: str) -> Iterator[PostgresDatabase]:
    with closing(PostgresDatabase(database, NUMBERS)) as opened:
        yield opened


def pid(database: PostgresDatabase) -> int:
    return int(database.read(PID)[0]["pid"])


def test_handles_share_a_connection(database: str, numbers: PostgresDatabase) -> None:
    first = pid(numbers)
    with closing(PostgresDatabase(database, NUMBERS)) as other:
        assert pid(other) == first
    assert pid(numbers) == first  # connections are closed with the last handle


def test_concurrent_threads_use_separate_connections(numbers: PostgresDatabase) -> None:
    def busy_pid(_: int) -> int:
        return int(numbers.read(f"{PID}, pg_sleep(0.05)")[0]["pid"])

    with ThreadPoolExecutor(2 * POOL_SIZE) as threads:
        used = set(threads.map(busy_pid, range(3 * POOL_SIZE)))
    assert 1 < len(used) <= POOL_SIZE


async def test_thread_with_a_running_loop_may_call(numbers: PostgresDatabase) -> None:
    assert pid(numbers) == pid(numbers)
    with numbers.lock(7) as is_held:
        assert is_held and numbers.read("SELECT 1 AS one")[0]["one"] == 1


def test_lock_is_exclusive(database: str, numbers: PostgresDatabase) -> None:
    with closing(PostgresDatabase(database, NUMBERS)) as other:
        with numbers.lock(3, 4) as first, other.lock(3, 4) as second, other.lock(3, 5) as third:
            assert (first, second, third) == (True, False, True)
        with other.lock(3, 4) as again:
            assert again


def test_interrupted_connection_is_replaced(numbers: PostgresDatabase) -> None:
    first = pid(numbers)

    async def interrupted(pool: PostgresPool) -> None:
        asyncio.get_running_loop().call_later(0.05, interrupt)
        await pool.execute("INSERT INTO numbers SELECT 1 FROM pg_sleep(30)")

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        numbers.run(interrupted)
    assert pid(numbers) != first
    assert numbers.read("SELECT * FROM numbers") == []


def test_connection_closed_by_the_server_while_idle_is_not_used(
    postgres: PostgresServer, numbers: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a write would fail, because writes are not repeated."""
    first = pid(numbers)
    monkeypatch.setattr(postgres_database, "IDLE_SECONDS", 0.0)
    postgres.execute(postgres.url(), f"SELECT pg_terminate_backend({first}, 5000)")
    numbers.run(lambda pool: pool.execute("INSERT INTO numbers VALUES (1)"))
    assert [row["n"] for row in numbers.read("SELECT n FROM numbers")] == [1]


@contextmanager
def interrupt_at(number: int) -> Iterator[None]:
    """Interrupt this thread before the line with this number, in the order of execution. The moment
    of a timer would depend on the machine and its load."""
    left, before = number, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        nonlocal left
        left -= event == "line"
        if left == 0:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_interrupts_at_any_moment_lose_nothing(numbers: PostgresDatabase) -> None:
    """Python raises KeyboardInterrupt between any two instructions, also in callbacks of asyncpg,
    which then hung or crashed the process."""
    numbers.read(PID)
    number, is_interrupted = 0, True
    while is_interrupted:
        number += STEP
        insert = partial(PostgresPool.execute, statement=f"INSERT INTO numbers VALUES ({number})")
        with suppress(KeyboardInterrupt), interrupt_at(number):
            numbers.run(insert)
            is_interrupted = False
        if is_interrupted:
            numbers.run(insert)
    stored = [row["n"] for row in numbers.read("SELECT DISTINCT n FROM numbers ORDER BY n")]
    assert stored == [*range(STEP, number + 1, STEP)]
    assert number > 300
    with ThreadPoolExecutor(POOL_SIZE) as threads:  # no connection was lost
        busy = threads.map(lambda _: numbers.read("SELECT pg_sleep(0.05)"), range(POOL_SIZE))
        assert len(list(busy)) == POOL_SIZE


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="requires pthread_kill")
def test_interrupt_of_a_helper_thread_ends_its_statement(numbers: PostgresDatabase) -> None:
    async def interrupted() -> None:
        main = threading.main_thread().ident
        threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGINT]).start()
        numbers.read("SELECT pg_sleep(30)")

    runner = asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt):
            runner.run_until_complete(interrupted())
    finally:
        runner.close()
    assert numbers.read("SELECT 1 AS one")[0]["one"] == 1


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="requires setitimer")
def test_second_interrupt_does_not_delay_the_first(numbers: PostgresDatabase) -> None:
    numbers.read(PID)
    before, begun, left = signal.getsignal(signal.SIGALRM), time.monotonic(), [1, 2]

    def interrupt(*_: object) -> None:
        if left and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            left.pop()
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.0005)
        with pytest.raises(KeyboardInterrupt):
            numbers.read("SELECT pg_sleep(60)")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begun < 60


@pytest.mark.skipif(not hasattr(os, "fork"), reason="requires fork")
def test_forked_process_has_connections_of_its_own(numbers: PostgresDatabase) -> None:
    first = pid(numbers)
    receiving, sending = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=lambda: sending.send((pid(numbers), len(numbers.read("SELECT 1"))))
    )
    child.start()
    child.join(20)
    assert receiving.poll()
    other, rows = receiving.recv()
    assert (other != first, rows) == (True, 1)
    assert pid(numbers) == first


@pytest.fixture
def tables(database: str) -> Iterator[DatabaseTables]:
    with closing(DatabaseTables(database, NUMBERS, answer_seconds=5.0)) as opened:
        yield opened


def test_reports_leave_connections_to_other_calls(tables: DatabaseTables) -> None:
    """As many slow reports as a process has connections do not delay other calls."""
    wait_for_lock = "SELECT 1 FROM pg_advisory_lock_shared(7)"
    with ThreadPoolExecutor(POOL_SIZE) as threads:
        with tables.database.lock(7) as is_held:
            assert is_held
            reports = [threads.submit(tables.report, wait_for_lock) for _ in range(POOL_SIZE)]
            assert tables.execute("SELECT 2") == [(2,)]
        assert [one.result() for one in reports] == [[(1,)]] * POOL_SIZE


def test_a_report_of_a_server_that_hangs_ends_in_time(
    database: str, postgres: PostgresServer
) -> None:
    """A report may take minutes, but not because the server hangs."""
    with closing(DatabaseTables(database, NUMBERS, answer_seconds=0.5)) as tables:
        assert tables.report("SELECT 2") == [(2,)]
        postgres.suspend()
        try:
            with ThreadPoolExecutor(1) as thread:
                report = thread.submit(tables.report, "SELECT 2")
                with pytest.raises(StoreBusyError, match=r"does not answer in 0.5 s"):
                    report.result(timeout=60)
        finally:
            postgres.resume()


@pytest.mark.parametrize("name", ["execute", "report", "write"])
def test_calls_after_a_lost_connection_connect_again(
    tables: DatabaseTables, postgres: PostgresServer, name: str
) -> None:
    calls: dict[str, Callable[[], object]] = {
        "execute": lambda: tables.execute("SELECT 1"),
        "report": lambda: tables.report("SELECT 1"),
        "write": lambda: tables.write([("SELECT 1", ())]),
    }
    assert calls[name]() == [(1,)]
    postgres.end_connections(tables.name)
    time.sleep(2 * postgres_database.IDLE_SECONDS)
    assert calls[name]() == [(1,)]
