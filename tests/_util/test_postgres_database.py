"""Blocking access to PostgreSQL: connections, threads, event loops and interrupts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from bottega._util import postgres_database
from bottega._util.postgres import POOL_SIZE, PostgresKind, PostgresPool
from bottega._util.postgres_database import PostgresDatabase
from tests.postgres import PostgresServer

NUMBERS = PostgresKind("numbers", ("CREATE TABLE numbers (n integer)",))
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
    assert pid(numbers) == first  # until the last handle is closed


def test_threads_use_connections_of_their_own(numbers: PostgresDatabase) -> None:
    def busy_pid(_: int) -> int:
        return int(numbers.read(f"{PID}, pg_sleep(0.05)")[0]["pid"])

    with ThreadPoolExecutor(2 * POOL_SIZE) as threads:
        used = set(threads.map(busy_pid, range(3 * POOL_SIZE)))
    assert 1 < len(used) <= POOL_SIZE


async def test_thread_with_a_running_loop_may_call(numbers: PostgresDatabase) -> None:
    assert pid(numbers) == pid(numbers)
    with numbers.lock(7) as free:
        assert free and numbers.read("SELECT 1 AS one")[0]["one"] == 1


def test_lock_is_held_once(database: str, numbers: PostgresDatabase) -> None:
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


def test_idle_connection_that_the_server_closed_is_not_used(
    postgres: PostgresServer, numbers: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a write would fail, since it must not be repeated."""
    first = pid(numbers)
    monkeypatch.setattr(postgres_database, "IDLE_SECONDS", 0.0)
    postgres.execute(postgres.url(), f"SELECT pg_terminate_backend({first}, 5000)")
    numbers.run(lambda pool: pool.execute("INSERT INTO numbers VALUES (1)"))
    assert [row["n"] for row in numbers.read("SELECT n FROM numbers")] == [1]
