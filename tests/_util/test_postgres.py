from __future__ import annotations

import asyncio
import signal
import socket
from dataclasses import replace

import pytest

from bottega._util.postgres import PostgresKind, PostgresPool, display_url, is_postgres_url
from bottega.errors import SettingError, StoreBusyError, StoreError, StoreUnavailableError
from tests.postgres import READY, PostgresServer, hanging_server

NUMBERS = PostgresKind("numbers", ("CREATE TABLE numbers (n integer PRIMARY KEY)",))
NEWER = replace(NUMBERS, migrations=(*NUMBERS.migrations, "ALTER TABLE numbers ADD note text"))


@pytest.fixture
def database(whole_database: str) -> str:
    """Return the URL of an empty database, whose settings a test may change."""
    return whole_database


async def opened(url: str, kind: PostgresKind = NUMBERS, size: int = 2) -> PostgresPool:
    return await PostgresPool.open(url, kind, size=size)


def test_urls_are_shown_without_secrets() -> None:
    url = "postgresql://me:p%40ss@db.example:6000/bottega?sslmode=require&sslpassword=x"
    assert display_url(url) == "postgresql://db.example:6000/bottega"
    assert is_postgres_url(url) and is_postgres_url("postgres://h/d")
    assert not is_postgres_url("kb.db") and not is_postgres_url(None)
    with pytest.raises(SettingError, match="port of a PostgreSQL URL"):
        display_url("postgresql://h:port/d")


async def test_migrations_run_once_and_in_order(database: str) -> None:
    pools = await asyncio.gather(*(opened(database) for _ in range(4)))
    await pools[0].execute("INSERT INTO numbers VALUES (1)")
    for pool in pools:
        assert [row["n"] for row in await pool.fetch("SELECT n FROM numbers")] == [1]
        await pool.close()
    newer = await opened(database, NEWER)
    assert [row["note"] for row in await newer.fetch("SELECT note FROM numbers")] == [None]
    await newer.close()
    with pytest.raises(StoreError, match=r"has format 2 of the numbers; .* reads up to 1"):
        await opened(database)


async def test_failed_migration_leaves_no_trace(database: str) -> None:
    broken = replace(NUMBERS, migrations=(*NUMBERS.migrations, "ALTER TABLE nothing ADD n integer"))
    with pytest.raises(StoreError, match="nothing"):
        await opened(database, broken)
    pool = await opened(database)
    assert await pool.fetch("SELECT n FROM numbers") == []
    await pool.close()


async def test_errors_name_no_values_of_rows(database: str) -> None:
    pool = await opened(database)
    await pool.execute("ALTER TABLE numbers ADD name text CHECK (name != 'a secret')")
    with pytest.raises(StoreError, match="check constraint") as caught:
        await pool.execute("INSERT INTO numbers VALUES (1, 'a secret')")
    assert "secret" not in str(caught.value)
    await pool.close()


async def test_transaction_is_rolled_back_after_an_error(database: str) -> None:
    pool = await opened(database)
    with pytest.raises(StoreError, match="duplicate key"):
        async with pool.transaction() as connection:
            await connection.execute("INSERT INTO numbers VALUES (1)")
            await connection.execute("INSERT INTO numbers VALUES (1)")
    assert await pool.fetch("SELECT n FROM numbers") == []
    await pool.close()


async def test_exhausted_pool(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = await opened(database, size=1)
    async with pool.connection():
        with monkeypatch.context() as patch:
            patch.setattr("bottega._util.postgres.WAIT_SECONDS", 0.05)
            with pytest.raises(StoreBusyError, match="no free connection"):
                await pool.fetch("SELECT 1")
    assert len(await pool.fetch("SELECT 1")) == 1
    await pool.close()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("secret", "wrong", "rejects the user or the password"),
        ("postgres:", "nobody:", "rejects the user or the password"),
        ("/test_", "/none_", "does not exist"),
    ],
)
async def test_wrong_urls(database: str, before: str, after: str, message: str) -> None:
    with pytest.raises(StoreError, match=message) as caught:
        await opened(database.replace(before, after))
    assert "secret" not in str(caught.value) and "wrong" not in str(caught.value)


async def test_no_server() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(StoreUnavailableError, match=f"127.0.0.1:{port}/d cannot be reached"):
        await opened(f"postgresql://u:p@127.0.0.1:{port}/d")


async def test_read_only_server(database: str) -> None:
    pool = await opened(database)
    await pool.close()
    replica = await opened(f"{database}?default_transaction_read_only=on")
    with pytest.raises(StoreError, match="is read-only, for example a replica"):
        await replica.execute("INSERT INTO numbers VALUES (1)")
    await replica.close()


@pytest.mark.slow
async def test_after_a_call_without_an_answer_others_fail_at_once(
    postgres: PostgresServer, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PostgresPool(database, NUMBERS, answer_seconds=0.5)
    await pool.execute("INSERT INTO numbers VALUES (1)")
    postgres.suspend()
    try:
        with pytest.raises(StoreBusyError, match="does not answer in"):
            await pool.fetch("SELECT n FROM numbers")
        for _ in range(100):
            with pytest.raises(StoreUnavailableError, match="did not answer an earlier call"):
                await pool.fetch("SELECT n FROM numbers")
    finally:
        postgres.resume()
    monkeypatch.setattr("bottega._util.postgres.BACKOFF_SECONDS", 0.0)
    pool._backoff.until = 0.001  # long ago
    assert len(await pool.fetch("SELECT n FROM numbers")) == 1
    await pool.close()


@pytest.mark.slow
async def test_restarted_server_loses_nothing_and_reads_continue(
    postgres: PostgresServer, database: str
) -> None:
    with postgres.stopping() as server:
        pool = await opened(database)
        await pool.execute("INSERT INTO numbers VALUES (1)")
        await asyncio.to_thread(server.stop, signal.SIGQUIT)
        with pytest.raises(StoreUnavailableError):
            await pool.execute("INSERT INTO numbers VALUES (2)")
        await asyncio.to_thread(server.start)
        assert [row["n"] for row in await pool.fetch("SELECT n FROM numbers")] == [1]
        await pool.close()


@pytest.mark.slow
async def test_cancelled_call_ends_while_the_server_is_stuck(
    postgres: PostgresServer, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega._util.postgres.CANCEL_SECONDS", 0.2)
    pool = PostgresPool(database, NUMBERS, size=1)
    await pool.execute("INSERT INTO numbers VALUES (1)")
    postgres.suspend()
    try:
        call = asyncio.create_task(pool.fetch("SELECT n FROM numbers"))
        await asyncio.sleep(0.2)
        call.cancel()
        async with asyncio.timeout(10):
            with pytest.raises(asyncio.CancelledError):
                await call
    finally:
        postgres.resume()
    assert len(await pool.fetch("SELECT n FROM numbers")) == 1
    await pool.close()


@pytest.mark.parametrize(
    "answers",
    [(), (b"N",), (b"N", READY)],
    ids=["accepts", "without TLS", "ready"],
)
async def test_a_server_that_hangs_while_a_pool_opens_is_left_in_time(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[bytes, ...]
) -> None:
    monkeypatch.setattr("bottega._util.postgres.CONNECT_SECONDS", 1.0)
    with hanging_server(*answers) as url:
        pool = PostgresPool(url, NUMBERS, answer_seconds=0.2)
        async with asyncio.timeout(20):
            with pytest.raises(StoreError, match=r"no answer in 1 s|does not answer in 0.2 s"):
                await pool.fetch("SELECT 1")
            # Later calls do not wait again.
            with pytest.raises(StoreUnavailableError, match="did not answer an earlier call"):
                await pool.fetch("SELECT 1")
            await pool.close()
