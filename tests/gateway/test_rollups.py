"""Daily sums equal the sums of the entries, and reports read the daily sums."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import pytest

from bottega._util.sql_tables import SQLITE, FileTables
from bottega._util.sqlite import FileKind
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import (
    DAILY_SUMS,
    GROUP_COLUMNS,
    SUM_COLUMNS,
    Entry,
    State,
    daily_values,
)
from bottega.gateway.accounting.savings import ANSWER_COSTS, savings

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
    return {row[: len(GROUP_COLUMNS)]: list(row[len(GROUP_COLUMNS) :]) for row in rows}


def by_hand() -> str:
    each = f"SELECT {daily_values(SQLITE)} FROM gateway_entries"
    keys, columns = ", ".join(GROUP_COLUMNS), DAILY_SUMS.column_list
    totals = ", ".join(f"sum({name})" for name in SUM_COLUMNS)
    return f"WITH each ({columns}) AS ({each}) SELECT {keys}, {totals} FROM each GROUP BY {keys}"


def assert_exact(ledger: Ledger) -> None:
    kept, report = sums(ledger, "SELECT * FROM gateway_daily_sums"), sums(ledger, by_hand())
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

    opened = FileKind.open

    def connect(kind: FileKind, path: Path, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = opened(kind, path, **options)
        connection.set_progress_handler(lambda: steps.__setitem__(0, steps[0] + 1), 100)
        return connection

    def work() -> int:
        steps[0] = 0
        for namespace in (None, "a"):
            savings(ledger, namespace=namespace)
        return steps[0]

    monkeypatch.setattr(FileKind, "open", connect)
    fill(ledger, 3000)
    few = work()
    fill(ledger, 9000, seed=1)
    assert work() < 1.5 * few


def test_single_costs_are_read_by_an_index(ledger: Ledger) -> None:
    statement = ANSWER_COSTS.format(namespaces=SQLITE.json_texts.format("?1"))
    plan = ledger.read(f"EXPLAIN QUERY PLAN {statement}", '["a"]', "master", 0.0)
    index = "USING INDEX gateway_entries_by_tier (tier=? AND namespace=?"
    assert any(index in str(row[3]) for row in plan)


def test_pruning_an_entry_does_not_read_all_sums(tmp_path: Path) -> None:
    def steps(groups: int) -> int:
        """Return the steps of SQLite's machine, in hundreds, to prune entries of many groups."""
        count = [0]
        with closing(Ledger(tmp_path / f"{groups}.db", clock=lambda: NOW)) as ledger:
            for i in range(400):
                ledger.record(Entry(5.0, str(i), "a", str(i % groups), "m", "m", "answered"))
            ledger.flush()
            tables = ledger._store.tables
            assert isinstance(tables, FileTables)
            tables._connection.set_progress_handler(lambda: count.append(0), 100)
            assert ledger.prune(0.0) == 400
        return len(count)

    assert steps(200) < 2 * steps(1)
