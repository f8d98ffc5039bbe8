"""Gateways whose PostgreSQL refuses them, or fails while they run."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from bottega.errors import StoreError
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.config.config_file import parse_config
from bottega.gateway.running.build import build
from tests.gateway.gateways import ENVIRONMENT
from tests.gateway.metered_gateway import PRICE
from tests.gateway.test_shared_gateways import CONFIG, TIER, Gateways, _session, gateways
from tests.postgres import READY, PostgresServer, hanging_server
from tests.server import Server

STATE = "[state]\ndatabase_env = 'DATABASE'\n#"


@pytest.fixture
def database(whole_database: str) -> str:
    """Return the URL of an empty database, whose settings a test may change."""
    return whole_database


def refused(database: str, folder: Path) -> StoreError:
    config = parse_config((CONFIG + TIER + STATE).format(data=folder, url="http://127.0.0.1:1/v1"))
    with pytest.raises(StoreError) as caught:
        build(config, {**ENVIRONMENT, "DATABASE": database})
    assert "state.database_env, the environment variable DATABASE" in caught.value.hint
    for secret in ("secret", "wrong"):
        assert secret not in f"{caught.value}{caught.value.hint}"
    return caught.value


def test_database_that_refuses_is_named_at_the_start(
    postgres: PostgresServer, database: str, tmp_path: Path
) -> None:
    assert "PGPASSWORD" in refused(database.replace("secret", "wrong"), tmp_path).hint
    read_only = f"{database}?default_transaction_read_only=on"
    assert "primary server" in refused(read_only, tmp_path).hint
    postgres.execute(database, "CREATE ROLE reader LOGIN PASSWORD 'secret'")
    error = refused(database.replace("postgres:secret", "reader:secret"), tmp_path)
    assert "permission denied for schema public" in str(error) and "CREATE" in error.hint
    postgres.execute(database, "DROP ROLE reader")


@pytest.mark.parametrize("answers", [(), (b"N", READY)], ids=["accepts", "ready"])
def test_database_that_hangs_is_named_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: tuple[bytes, ...]
) -> None:
    monkeypatch.setattr("bottega._util.postgres.CONNECT_SECONDS", 1.0)
    monkeypatch.setattr("bottega.gateway.accounting.ledger_database.ANSWER_SECONDS", 0.2)
    with hanging_server(*answers) as url, ThreadPoolExecutor(1) as thread:
        error = thread.submit(refused, url, tmp_path).result(timeout=60)
    assert re.search(r"no answer in 1 s|does not answer in 0.2 s", str(error))


def test_setting_of_each_database_is_named(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = database.replace(":secret", "")
    monkeypatch.setenv("PGPASSWORD", "wrong")
    monkeypatch.setenv("CACHE", url)
    places = {
        "cache.database_env, the environment variable CACHE": "database_env = 'CACHE'\n",
        "cache.database": f"database = '{url}'\n",
        "state.database": f"[state]\ndatabase = '{url}'\n",
    }
    for place, lines in places.items():
        text = (CONFIG + lines + TIER).format(data=tmp_path, url="http://127.0.0.1:1/v1")
        with pytest.raises(StoreError, match="rejects the user or the password") as caught:
            build(parse_config(text), ENVIRONMENT)
        assert caught.value.hint.endswith(f"; the URL is that of {place}")
        assert caught.value.__notes__[-1] == f"hint: the URL is that of {place}"


def test_newer_format_is_refused(postgres: PostgresServer, database: str, tmp_path: Path) -> None:
    with closing(Accounts(database)):
        pass
    postgres.execute(database, "UPDATE bottega_schemas SET version = 99")
    error = refused(database, tmp_path)
    assert "has format 99" in str(error) and "pip install --upgrade" in error.hint


# Two statements each: the failure, and its end.
FAILURES = {
    "full disk": (
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$;"
        " CREATE TRIGGER full_disk BEFORE INSERT ON gateway_entries EXECUTE FUNCTION fail()",
        "DROP FUNCTION fail CASCADE",
    ),
    "read-only": (
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = on',"
        " current_database()); END $$",
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I"
        " RESET default_transaction_read_only', current_database()); END $$",
    ),
}
END_CONNECTIONS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid != pg_backend_pid()"
)


@pytest.mark.slow
@pytest.mark.parametrize("failure", FAILURES)
async def test_entries_wait_until_the_database_takes_them(
    endpoint: Server, tmp_path: Path, postgres: PostgresServer, database: str, failure: str
) -> None:
    begin, end = FAILURES[failure]
    with closing(Accounts(database)) as accounts:
        _, limited = accounts.add("limited", usd_per_month=1.0)
    with gateways(endpoint, tmp_path, STATE + database, count=1) as one:
        free = one.key
        async with _session() as session:
            assert (await one.post(session, 0, "before"))[0] == 200
            await execute(postgres, database, begin, END_CONNECTIONS)
            assert (await one.post(session, 0, "free"))[0] == 200
            one.key = limited
            status, reply = await one.post(session, 0, "limited")
            assert status == 200 or reply["error"]["code"] == "limits_unavailable"
            await execute(postgres, database, end, END_CONNECTIONS)
            async with asyncio.timeout(20):
                while (await one.post(session, 0, "again"))[0] != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            one.key = free
            assert (await one.post(session, 0, "after"))[0] == 200
            await assert_complete(one)


@pytest.mark.slow
async def test_ended_connections_lose_no_entry(
    endpoint: Server, tmp_path: Path, postgres: PostgresServer, database: str
) -> None:
    with gateways(endpoint, tmp_path, STATE + database, count=2) as two:
        async with _session() as session:
            for _ in range(4):
                cut = asyncio.create_task(execute(postgres, database, END_CONNECTIONS))
                posts = [two.post(session, n, f"question {n}") for n in range(6)]
                replies = await asyncio.gather(*posts)
                await cut
                assert {status for status, _ in replies} == {200}
            await assert_complete(two)


async def execute(postgres: PostgresServer, database: str, *statements: str) -> None:
    writable = f"{database}?default_transaction_read_only=off"
    await asyncio.to_thread(postgres.execute, writable, *statements)


async def assert_complete(running: Gateways) -> None:
    """Compare the ledger with the tokens that the upstream has sent."""
    ledger, spent = running.servers[0].ledger, -1.0
    async with asyncio.timeout(20):
        while spent != pytest.approx(running.meter.tokens * PRICE):
            rows = await asyncio.to_thread(ledger.read, "SELECT sum(cost_usd) FROM gateway_entries")
            spent = rows[0][0]
            await asyncio.sleep(0.05)
