"""Upgrades of the gateway's tables in PostgreSQL, and two versions beside each other."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import aiohttp
import pytest

from bottega._util.postgres import PostgresKind, PostgresPool
from bottega.gateway.accounting.accounts import Account, Accounts
from bottega.gateway.accounting.database import dollars, entry_row, month_of
from bottega.gateway.accounting.ledger import Entry, Ledger
from bottega.gateway.accounting.migrations import (
    ENTRY_COLUMNS,
    FIRST_COLUMNS,
    GATEWAY_TABLES,
    VARIANT_COLUMNS,
)
from bottega.gateway.response_cache import CachedReply
from bottega.gateway.state.limits import LimitRequest
from bottega.gateway.state.postgres_limits import PostgresLimits
from bottega.gateway.state.postgres_repeats import PostgresRepeats
from tests.gateway.metered_gateway import PRICE
from tests.gateway.test_shared_gateways import gateways
from tests.gateway.test_shared_ledger import NOW, entries
from tests.postgres import PostgresServer
from tests.server import Server

MIGRATIONS = GATEWAY_TABLES.migrations
# First versions with gateway_write, the column variant and the column reason.
WRITE_FUNCTION, VARIANTS, REASONS = 4, 8, 10
COLUMNS = {REASONS: ENTRY_COLUMNS, VARIANTS: VARIANT_COLUMNS, 0: FIRST_COLUMNS}
TABLES = re.findall(r"CREATE (?:UNLOGGED )?TABLE (\w+)", "".join(MIGRATIONS))
SECRET = "ab" * 32
# The columns of the first version.
ACCOUNTS = f"""
INSERT INTO gateway_accounts VALUES
    ('0123456789ab', 'team', 'a', false, true, 60, 2.5, 1, NULL, 4, 'small,large', NULL, '{{0}}'),
    ('ba9876543210', 'gone', '', true, false, NULL, NULL, 2, 3, NULL, NULL, 7, '{{0}}');
INSERT INTO gateway_namespaces VALUES ('0123456789ab', 'a/b');
INSERT INTO gateway_notes VALUES ('gate:a', '{{{{}}}}'), ('master', 'large'), ('lost', '5');
INSERT INTO gateway_shadows (time, request_id, namespace, similarity, with_score, without_score, id)
    VALUES ({NOW}, 'r', 'a', 0.5, 1, 0, 's');
INSERT INTO gateway_cold_starts VALUES ('a', 19);
""".format("\\x" + sha256(SECRET.encode()).hexdigest())


def version(number: int) -> PostgresKind:
    return PostgresKind("gateway", MIGRATIONS[:number])


async def write(pool: PostgresPool, number: int, rows: Sequence[Entry]) -> None:
    """Write entries as the version with this number of migrations did."""
    columns = COLUMNS[next(first for first in COLUMNS if number >= first)]
    values = [*zip(*(stored(one)[: len(columns)] for one in rows), strict=True)]
    marks = ", ".join(f"${n}::{kind}[]" for n, kind in enumerate(columns.values(), 1))
    if number < WRITE_FUNCTION:
        insert = f"INSERT INTO gateway_entries SELECT * FROM unnest({marks})"
        await pool.execute(insert, *values)
    else:
        await pool.fetch(f"SELECT * FROM gateway_write({marks}, '', '{{}}')", *values)


def stored(entry: Entry) -> tuple[object, ...]:
    """Return the columns of an entry in the order of the tables."""
    *row, variant, reason = entry_row(entry)
    return (*row, f"id-{entry.request_id}", variant, reason)


def spending(rows: Sequence[Entry]) -> dict[tuple[str, str], float]:
    total = defaultdict[tuple[str, str], float](float)
    for one in rows:
        if (usd := dollars(one.cost_usd) or 0.0) > 0:
            total[month_of(one.time), one.account] += usd
    return total


@pytest.mark.parametrize("number", [1, WRITE_FUNCTION, VARIANTS, REASONS])
async def test_older_tables_are_upgraded_with_their_rows(
    postgres: PostgresServer, database: str, number: int
) -> None:
    rows = entries(60)
    pool = await PostgresPool.open(database, version(number))
    await write(pool, number, rows)
    await pool.close()
    postgres.execute(database, ACCOUNTS)
    await asyncio.to_thread(check_rows, database, rows)


def check_rows(database: str, rows: Sequence[Entry]) -> None:
    with closing(Accounts(database)) as accounts, closing(Ledger(database)) as ledger:
        team, gone = accounts.list()
        assert team == Account(
            *("0123456789ab", "team", "a", False, True, 60, 2.5, 1.0),
            max_concurrent=4,
            tiers=("small", "large"),
        )
        assert gone == Account(
            *("ba9876543210", "gone", "", True, False, None, None, 2.0, 3.0), max_namespaces=7
        )
        assert accounts.authenticate(f"sk-bottega-{team.id}-{SECRET}") == team
        assert accounts.authenticate(f"sk-bottega-{gone.id}-{SECRET}") is None
        assert accounts.claim_namespace(team.id, "a/b", 1)
        assert not accounts.claim_namespace(team.id, "a/c", 1)
        found = ledger.read(f"SELECT {', '.join(ENTRY_COLUMNS)} FROM entries ORDER BY id")
        assert found == sorted(map(stored, rows), key=lambda row: str(row[-3]))
        assert ledger.read("SELECT sum(requests), sum(prompt_tokens) FROM rollups") == [
            (len(rows), sum(one.prompt_tokens for one in rows))
        ]
        assert ledger._file.spent_since("") == pytest.approx(spending(rows))
        assert (ledger.master(), ledger.total_lost()) == ("large", 5)
        assert ledger.tables is not None
        assert [len(ledger.tables.shadows_after(one, (0, 0), 9, "")) for one in "ab"] == [1, 0]
        assert [ledger.tables.claim_cold_start("a", 0, 20) for _ in "12"] == [True, False]
        ledger.record(replace(rows[0], cost_usd=0.5, account="new", variant="v:b"))
        ledger.flush()
        assert ledger.read("SELECT account FROM entries WHERE variant = 'v:b'") == [("new",)]
        assert ledger._file.spent_since("")[month_of(rows[0].time), "new"] == 0.5


async def test_running_gateway_of_an_older_version_continues(database: str) -> None:
    """Gateways are replaced one after the other, so two versions write at the same time."""
    account, rows = Account("x", "x", requests_per_minute=3, usd_per_month=1e6), entries(40)
    month = month_of(NOW)
    # One connection, so statements that were prepared before the migration are used after it.
    old = await PostgresPool.open(database, version(VARIANTS - 1), size=1)
    limits, repeats = PostgresLimits(old), PostgresRepeats(old)

    async def use(number: int) -> None:
        await write(old, VARIANTS - 1, rows[10 * number : 10 * number + 10])
        assert (await limits.decide(LimitRequest(account, month))).kind == "ok"
        assert (await limits.decide(LimitRequest(account, month, "r", 0.0, 0.5))).kind == "ok"
        await limits.settle(account.id, month, "r", 0.0)
        begun = await repeats.begin(f"k{number}", "one")
        reply = CachedReply(b"%d" % number, "large", "gpt")
        await repeats.land(f"k{number}", "one", begun.epoch, reply, 60.0)
        await repeats.replace(f"k{number}", reply)

    await use(0)
    ledger = await asyncio.to_thread(Ledger, database)
    await use(1)
    for one in rows[20:30]:
        ledger.record(replace(one, variant="v:a"))
    await asyncio.to_thread(ledger.flush)
    await use(3)
    assert (await limits.decide(LimitRequest(account, month))).kind == "wait"
    variants = "SELECT variant, count(*) FROM entries GROUP BY variant ORDER BY variant"
    assert await asyncio.to_thread(ledger.read, variants) == [("", 30), ("v:a", 10)]
    assert await asyncio.to_thread(ledger._file.spent_since, "") == pytest.approx(spending(rows))
    await asyncio.to_thread(ledger.close)
    new = await PostgresPool.open(database, GATEWAY_TABLES)
    for number in (0, 1, 3):
        found = await PostgresRepeats(new).begin(f"k{number}", "two")
        assert found.reply == CachedReply(b"%d" % number, "large", "gpt")
    await new.close()
    await old.close()


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
        count = "SELECT count(*) FROM entries"
        assert await asyncio.to_thread(one.servers[0].ledger.read, count) == [(24,)]


async def migrate(database: str, *more: str) -> None:
    newer = PostgresKind("gateway", (*MIGRATIONS, *more))
    await (await PostgresPool.open(database, newer)).close()
