"""A gateway that serves while a newer version migrates its tables in PostgreSQL."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest

from bottega._util.postgres import PostgresKind, PostgresPool
from bottega.gateway.accounting.ledger_schema import GATEWAY_TABLES
from tests.gateway.metered_gateway import PRICE
from tests.gateway.test_shared_gateways import gateways
from tests.server import Server

TABLES = re.findall(r"CREATE (?:UNLOGGED )?TABLE (\w+)", GATEWAY_TABLES.migrations[0])


async def test_gateway_serves_while_a_newer_version_migrates(
    endpoint: Server, tmp_path: Path, database: str
) -> None:
    entries_only = "ALTER TABLE gateway_entries ADD COLUMN later text NOT NULL DEFAULT 'x'"
    every_table = "".join(f"ALTER TABLE {name} ADD COLUMN next text;" for name in TABLES)
    state = f"[state]\ndatabase_env = 'DATABASE'\n#{database}"
    with gateways(
        endpoint, tmp_path, state, count=1, requests_per_minute=6000, usd_per_month=100.0
    ) as one:
        async with aiohttp.ClientSession() as session:

            async def post(name: str) -> None:
                posts = (one.post(session, 0, f"{name} {n}") for n in range(6))
                assert {status for status, _ in await asyncio.gather(*posts)} == {200}

            await post("before")
            await asyncio.gather(post("meanwhile"), migrate(database, entries_only))
            await migrate(database, entries_only, every_table)
            await post("after")
            await post("before")
        assert one.meter.calls == 18  # the last six are repeats
        assert await asyncio.to_thread(one.spent) == pytest.approx(one.meter.tokens * PRICE)
        count = "SELECT count(*) FROM gateway_entries"
        assert await asyncio.to_thread(one.servers[0].ledger.read, count) == [(24,)]


async def migrate(database: str, *more: str) -> None:
    newer = PostgresKind(GATEWAY_TABLES.name, (*GATEWAY_TABLES.migrations, *more))
    await (await PostgresPool.open(database, newer)).close()
