"""Accounts, ledger and savings: the same behaviour in a file and in PostgreSQL."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from bottega._util.postgres import PostgresPool
from bottega.errors import NotFoundError, StoreError
from bottega.gateway.accounting.accounts import POLL_SECONDS, Accounts
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_database import AccountMonth, month_of
from bottega.gateway.accounting.ledger_schema import GATEWAY_TABLES, Entry, ShadowSample, State
from bottega.gateway.accounting.savings import savings
from tests.gateway.ledgers import entry
from tests.postgres import running_postgres

NOW = 1_790_000_000.0
DAY = 86_400.0


@pytest.fixture
def database(gateway_database: str) -> str:
    return gateway_database


@pytest.fixture(params=["file", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        url: str = request.getfixturevalue("database")
        return url
    return str(tmp_path / "gateway.db")


@pytest.fixture
def ledger(location: str) -> Iterator[Ledger]:
    with closing(Ledger(location, clock=lambda: NOW)) as opened:
        yield opened


@pytest.fixture
def accounts(location: str) -> Iterator[Accounts]:
    with closing(Accounts(location)) as opened:
        yield opened


def entries(number: int, seed: int = 0) -> list[Entry]:
    rng = random.Random(seed)
    return [
        Entry(
            NOW - rng.uniform(0, 40) * DAY,
            str(i),
            rng.choice(("x", "y")),
            rng.choice(("a", "b/c", "b-c", "")),
            rng.choice(("master", "small")),
            "model\0é",
            rng.choice(get_args(State)),
            rng.choice((0, 2)),
            rng.choice((None, rng.random())),
            prompt_tokens=rng.randrange(100),
            completion_tokens=rng.randrange(100),
            cost_usd=rng.choice((None, rng.random(), -1.0, float("inf"))),
            dismissed_usd=rng.random() / 10,
            seconds=rng.random(),
            status=rng.choice((200, 404, 500)),
        )
        for i in range(number)
    ]


def fill(ledger: Ledger, number: int = 300) -> None:
    for one in entries(number):
        ledger.record(one)
    for i in range(40):
        ledger.record_shadow(
            ShadowSample(NOW - i * DAY, str(i), "ab"[i % 2], 0.5, i % 2, i % 3 / 2)
        )
    ledger.flush()


def test_key_returns_its_account(accounts: Accounts, location: str) -> None:
    account, key = accounts.add("team", namespace="a", tiers=["small"], usd_per_month=2.5)
    assert accounts.authenticate(key) == account == accounts.list()[0]
    assert accounts.authenticate(key[:-1] + ("0" if key[-1] != "0" else "1")) is None
    revoked = accounts.revoke(account.id)
    assert revoked.revoked is not None and accounts.authenticate(key) is None
    assert accounts.revoke(account.id) == revoked
    with pytest.raises(NotFoundError):
        accounts.revoke("0" * 12)


def test_other_process_sees_changes_within_a_second(
    accounts: Accounts, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert POLL_SECONDS < 1
    monkeypatch.setattr("bottega.gateway.accounting.accounts.POLL_SECONDS", 0.05)
    with closing(Accounts(location)) as other:
        account, key = accounts.add("team")
        until(lambda: other.authenticate(key) == account)
        other.revoke(account.id)
        until(lambda: accounts.authenticate(key) is None)


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_concurrent_claims_respect_the_limit(accounts: Accounts, location: str) -> None:
    account, _ = accounts.add("team")
    with closing(Accounts(location)) as other, ThreadPoolExecutor(8) as pool:
        claims = [
            pool.submit((accounts, other)[i % 2].claim_namespace, account.id, f"n{i}", 5)
            for i in range(20)
        ]
        assert sum(claim.result() for claim in claims) == 5
    held = next(f"n{i}" for i, claim in enumerate(claims) if claim.result())
    assert accounts.claim_namespace(account.id, held, 5)


def test_rows_are_stored(ledger: Ledger) -> None:
    whole = replace(entries(1)[0], cost_usd=0.25, similarity=0.5)
    whole = replace(whole, variant="more-shots:b", reason="cold start")
    ledger.record(whole)
    ledger.record_shadow(ShadowSample(6.0, "r", "ns", 0.9, 1.0, 0.0))
    ledger.set_gate("ns", "nearest", "{}")
    ledger.set_repeat("key", "example")
    ledger.flush()
    columns = "time, account, namespace, tier, model, state, shots, similarity, cost_usd, status,"
    columns += " variant, reason"
    stored = ledger.read(f"SELECT {columns} FROM gateway_entries")
    assert stored == [
        (
            *(
                whole.time,
                whole.account,
                whole.namespace,
                whole.tier,
                "model\N{REPLACEMENT CHARACTER}é",
            ),
            *(whole.state, whole.shots, 0.5, 0.25, whole.status, "more-shots:b", "cold start"),
        )
    ]
    assert ledger.gate("ns", "nearest") == "{}" and ledger.gate("other", "nearest") is None
    assert ledger.repeat("key") is None  # without repeat_seconds
    ledger._repeat_seconds = 60.0
    assert ledger.repeat("key") == (NOW, "example")
    ledger._clock = lambda: NOW + 61
    assert ledger.delete_old_repeats() == 1


def test_daily_sums_equal_the_sums_of_entries(ledger: Ledger) -> None:
    fill(ledger)
    figures = "sum(requests), sum(prompt_tokens), sum(priced), sum(compared)"
    assert ledger.read(f"SELECT {figures} FROM gateway_daily_sums") == [
        (
            *(300, sum(one.prompt_tokens for one in entries(300))),
            sum(one.cost_usd is not None and 0 <= one.cost_usd < 1e9 for one in entries(300)),
            sum(one.similarity is not None for one in entries(300)),
        )
    ]
    ledger.prune(20)
    recent = [one for one in entries(300) if one.time >= NOW - 20 * DAY]
    assert ledger.read("SELECT count(*) FROM gateway_entries") == [(len(recent),)]
    assert ledger.read("SELECT sum(requests) FROM gateway_daily_sums") == [(len(recent),)]
    assert ledger.read("SELECT count(*) FROM gateway_shadows") == [(21,)]
    ledger.prune(0)
    assert ledger.read("SELECT count(*) FROM gateway_daily_sums") == [(0,)]


def test_spending_includes_other_processes(ledger: Ledger, location: str) -> None:
    with closing(Ledger(location, clock=lambda: NOW)) as other:
        other.record(replace(entry(1, 0.25, "x"), time=NOW))
        other.flush()
        ledger.record(replace(entry(2, 0.5, "x"), time=NOW))
        assert ledger.spent_this_month("x") == 0.5
        ledger.with_budgets.add("x")
        ledger.flush()
        assert ledger.spent_this_month("x") == 0.75 == ledger.committed_this_month("x")
        other.refresh_spending()
        assert other.spent_this_month("x") == 0.75
    assert ledger.read("SELECT count(*) FROM gateway_entries") == [(2,)]


async def test_flushed_entry_is_durable(ledger: Ledger, location: str) -> None:
    ledger.record(entry(1))
    await ledger.flushed()
    with closing(Ledger(location)) as other:
        assert other.read("SELECT request_id FROM gateway_entries") == [("r1",)]


@pytest.fixture
async def pool(database: str) -> AsyncGenerator[PostgresPool]:
    opened = PostgresPool(database, GATEWAY_TABLES)
    yield opened
    await opened.close()


async def test_event_loop_writes_instead_of_the_thread(database: str, pool: PostgresPool) -> None:
    with closing(await asyncio.to_thread(Ledger, database, clock=lambda: NOW)) as ledger:
        ledger.record(entry(0))
        await ledger.enter_loop(pool)
        ledger.with_budgets.add("x")
        for number in range(1, 20):
            ledger.record(replace(entry(number, 0.5, "x"), time=NOW))
            await asyncio.sleep(0)
        await asyncio.to_thread(ledger.record, entry(20))
        ledger.set_gate("a", "nearest", "{}")
        assert await asyncio.to_thread(ledger.gate, "a", "nearest") == "{}"
        await ledger.flushed()
        assert ledger.committed_this_month("x") == ledger.spent_this_month("x") == 9.5
        rows = "SELECT count(*) FROM gateway_entries"
        assert await asyncio.to_thread(ledger.read, rows) == [(21,)]
        assert await asyncio.to_thread(ledger.gate, "a", "nearest") == "{}"
        ledger.record(entry(21))
        await asyncio.to_thread(ledger.flush)  # waits for the loop
        assert await asyncio.to_thread(ledger.read, rows) == [(22,)]
        ledger.record(entry(22))
        await ledger.leave_loop()
        ledger.record(entry(23))
        await ledger.flushed()
        assert await asyncio.to_thread(ledger.read, rows) == [(24,)]


async def test_rows_of_a_failed_write_wait_for_the_next_one(
    database: str,
    pool: PostgresPool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(await asyncio.to_thread(Ledger, database, clock=lambda: NOW)) as ledger:
        assert ledger.shared is not None
        write, failures = ledger.shared.write_in, [True, True]

        async def write_and_fail(*values: Any) -> dict[AccountMonth, float]:
            written = await write(*values)
            if failures:
                failures.pop()
                raise StoreError("the connection is lost")
            return written

        monkeypatch.setattr(ledger.shared, "write_in", write_and_fail)
        await ledger.enter_loop(pool)
        assert ledger._in_loop is not None
        ledger._in_loop.retry_seconds = 0.01
        ledger.record(replace(entry(1, 0.5, "x"), time=NOW))
        with pytest.raises(StoreError):
            await ledger.flushed()
        assert ledger.is_failing and ledger.spent_this_month("x") == 0.5
        ledger.record(replace(entry(2, 0.25, "x"), time=NOW))
        while await ledger.durable() is not None:
            pass
        assert not ledger.is_failing and ledger.committed_this_month("x") == 0.75
        assert await asyncio.to_thread(ledger.read, "SELECT count(*) FROM gateway_entries") == [
            (2,)
        ]
        await ledger.leave_loop()
    assert [one.levelname for one in caplog.records] == ["ERROR", "WARNING"]  # of one outage


def test_account_that_no_database_stores_as_it_is_can_be_charged(ledger: Ledger) -> None:
    ledger.with_budgets.add("a\ud800\0")
    ledger.record(replace(entry(1, 0.5, "a\ud800\0"), time=NOW))
    ledger.flush()
    assert ledger._store.spent_since("", ["a\ud800\0"]) == {
        ("2026-09", "a?\N{REPLACEMENT CHARACTER}"): 0.5
    }


def test_lost_rows_add_up(ledger: Ledger) -> None:
    for _ in range(2):
        ledger._rows.unsaved_lost = 3
        ledger.flush()
    assert ledger.total_lost() == 6


def test_savings_equal_those_of_a_file(database: str, tmp_path: Path) -> None:
    with (
        closing(Ledger(tmp_path / "gateway.db", clock=lambda: NOW)) as file,
        closing(Ledger(database, clock=lambda: NOW)) as tables,
    ):
        for ledger in (file, tables):
            ledger.set_master("master")
            fill(ledger)
        for namespace, since in product((None, "a", "none"), (None, NOW - 10.3 * DAY)):
            first, second = (
                savings(one, namespace=namespace, since=since) for one in (file, tables)
            )
            assert repr(second.routes).count("Route(") == repr(first.routes).count("Route(")
            assert _rounded(second) == _rounded(first)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, tuple):
        return [_rounded(one) for one in value]
    return _rounded(tuple(vars(value).items())) if hasattr(value, "__dict__") else value


def test_batch_that_is_sent_twice_counts_once(database: str) -> None:
    """A commit may succeed although its connection is lost before the reply."""
    with closing(Ledger(database, clock=lambda: NOW)) as ledger:
        write = ledger._store.write

        def write_and_fail(batch: object) -> None:
            write(batch)  # type: ignore[arg-type]
            ledger._store.write = write  # type: ignore[method-assign]
            raise StoreError("the connection is lost")

        ledger._store.write = write_and_fail  # type: ignore[method-assign]
        ledger.record(replace(entry(1, 0.5, "x"), time=NOW))
        ledger.record_shadow(ShadowSample(6.0, "r", "ns", 0.9, 1.0, 0.0))
        with pytest.raises(StoreError):
            ledger.flush()
        ledger.record(replace(entry(2, 0.25, "x"), time=NOW))
        ledger.flush()
        assert ledger.spent_this_month("x") == 0.75
        assert ledger.read("SELECT sum(requests) FROM gateway_daily_sums") == [(2,)]
        assert ledger.read("SELECT count(*) FROM gateway_shadows") == [(1,)]


@pytest.mark.slow
def test_crash_of_the_server_loses_no_flushed_entry() -> None:
    flushed = 0
    with (
        running_postgres(fsync="on") as server,
        closing(Ledger(server.create_database())) as ledger,
    ):
        for number in range(300):
            if number == 150:
                server.stop(signal.SIGQUIT)
            if number == 155:
                server.start()
            ledger.record(entry(number, 0.01, "x"))
            with suppress(StoreError):
                asyncio.run(ledger.flushed())
                flushed += 1
        _flush(ledger)
        assert flushed >= 290
        assert ledger.read("SELECT count(*) FROM gateway_entries") == [(300,)]
        assert ledger._store.spent_since("") == {
            (month_of(time.time()), "x"): pytest.approx(3.0),
        }


def _flush(ledger: Ledger) -> None:
    end = time.monotonic() + 10
    while True:
        try:
            ledger.flush()
            return
        except StoreError:
            assert time.monotonic() < end
            time.sleep(0.1)
