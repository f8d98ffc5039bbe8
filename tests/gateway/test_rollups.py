"""Daily sums equal the sums of the entries, and reports read the daily sums."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from bottega.gateway.accounting import database
from bottega.gateway.accounting.ledger import Entry, Ledger, State
from bottega.gateway.accounting.savings import ANSWER_COSTS, Savings, savings
from bottega.gateway.accounting.schema import COLUMNS, GATEWAY_DB, KEYS, VALUES

DAY = 86_400.0
NOW = 30 * DAY + 1234.5


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(tmp_path / "gateway.db", clock=lambda: NOW)
    yield opened
    opened.close()


def fill(ledger: Ledger, number: int, seed: int = 0) -> list[Entry]:
    rng = random.Random(seed)
    made = [
        Entry(
            rng.uniform(0, NOW),
            str(i),
            "account",
            rng.choice("ab"),
            rng.choice(("master", "small")),
            "model",
            rng.choice(get_args(State)),
            rng.choice((0, 2)),
            rng.choice((None, rng.random())),
            prompt_tokens=rng.randrange(100),
            completion_tokens=rng.randrange(100),
            cost_usd=rng.choice((None, rng.random())),
            dismissed_usd=rng.random() / 10,
            seconds=rng.random(),
            status=rng.choice((200, 404, 500)),
        )
        for i in range(number)
    ]
    for entry in made:
        ledger.record(entry)
    ledger.flush()
    return made


def sums(ledger: Ledger, source: str) -> dict[tuple[object, ...], list[float]]:
    rows = ledger.read(f"SELECT * FROM ({source})")
    return {row[: len(KEYS)]: list(row[len(KEYS) :]) for row in rows}


def by_hand() -> str:
    each = f"SELECT {VALUES.format('')} FROM entries"
    keys = ", ".join(KEYS)
    totals = ", ".join(f"sum({name})" for name in COLUMNS.split(", ")[len(KEYS) :])
    return f"WITH each ({COLUMNS}) AS ({each}) SELECT {keys}, {totals} FROM each GROUP BY {keys}"


def assert_exact(ledger: Ledger) -> None:
    kept, report = sums(ledger, "SELECT * FROM rollups"), sums(ledger, by_hand())
    assert kept.keys() == report.keys() and kept
    for key, values in kept.items():
        assert values == pytest.approx(report[key], abs=1e-9)


def test_sums_match_written_and_pruned_entries(ledger: Ledger) -> None:
    fill(ledger, 400)
    assert_exact(ledger)
    assert ledger.prune(12.5) > 100
    assert_exact(ledger)


@pytest.mark.parametrize("since", [None, 10 * DAY, 10.4 * DAY, 29.9 * DAY])
@pytest.mark.parametrize("namespace", [None, "a"])
def test_report_equals_the_sums_of_entries(
    ledger: Ledger, since: float | None, namespace: str | None
) -> None:
    made = fill(ledger, 400)
    chosen = [
        one for one in made if one.time >= (since or 0) and namespace in (None, one.namespace)
    ]
    report = savings(ledger, namespace=namespace, since=since)
    assert sum(route.requests for route in report.routes) == len(chosen)
    assert report.spent_usd == pytest.approx(sum(one.cost_usd or 0 for one in chosen))
    assert report.first == min(one.time for one in chosen)
    assert report.last == max(one.time for one in chosen)
    answered = [one for one in chosen if one.state == "answered" and one.shots]
    shown = [route for route in report.routes if route.state == "answered" and route.shots]
    assert sum(route.requests for route in shown) == len(answered)
    assert sum(route.seconds * route.requests for route in shown) == pytest.approx(
        sum(one.seconds for one in answered)
    )
    assert sum(route.compared for route in shown) == sum(
        one.similarity is not None for one in answered
    )


def test_a_report_does_not_read_every_entry(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many answers of the master, above the number that is resampled one by one."""
    monkeypatch.setattr("bottega.gateway.accounting.savings.MAX_EXACT_COSTS", 50)
    steps = [0]

    opened = database.connect

    def connect(path: Path, *, create: bool = True) -> sqlite3.Connection:
        connection = opened(path, create=create)
        connection.set_progress_handler(lambda: steps.__setitem__(0, steps[0] + 1), 100)
        return connection

    def work() -> int:
        steps[0] = 0
        for namespace in (None, "a"):
            savings(ledger, namespace=namespace)
        return steps[0]

    monkeypatch.setattr(database, "connect", connect)
    fill(ledger, 3000)
    few = work()
    fill(ledger, 9000, seed=1)
    assert work() < 1.5 * few


def test_older_file_gets_its_sums(tmp_path: Path) -> None:
    path = tmp_path / "gateway.db"
    older = replace(GATEWAY_DB, migrations=GATEWAY_DB.migrations[:2])
    connection = sqlite3.connect(path, isolation_level=None)
    older.migrate(connection, str(path))
    rows = [(float(i * DAY), "r", "k", "a", "master", "m", "answered", 0, None, 5, 1, 0, 0.5, 0.0,
             0.1, 200) for i in range(20)]  # fmt: skip
    connection.executemany(f"INSERT INTO entries VALUES ({', '.join('?' * 16)})", rows)
    connection.close()
    ledger = Ledger(path)
    report: Savings = savings(ledger)
    assert (report.requests, report.spent_usd) == (20, 10.0)
    assert report.master_only is not None and report.master_only.usd.n == 20
    assert_exact(ledger)
    ledger.close()


def test_single_costs_are_read_by_an_index(ledger: Ledger) -> None:
    plan = ledger.read(f"EXPLAIN QUERY PLAN {ANSWER_COSTS}", '["a"]', "master", 0.0)
    assert any("USING INDEX entries_by_tier" in str(row[3]) for row in plan)
