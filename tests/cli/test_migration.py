"""Gateway files and runs written by commit fd291dc are migrated when they are opened."""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger import Entry, Ledger
from bottega.knowledge import KnowledgeBase
from tests.cli.conftest import Run
from tests.paths import ROOT

# Names in the output of `bottega savings --json`.
RENAMED = {
    "alone": "master_only",
    "quality": "agreement",
    "lost": "lost_rows",
    "borrowed": "pooled",
}
STORED = ROOT / "tests" / "data" / "fd291dc"


def unpacked(name: str, target: Path) -> Path:
    shutil.copytree(STORED / name, target)
    for packed in target.glob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    return target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return unpacked("gateway", tmp_path / "stored")


def test_savings_of_an_old_ledger_are_unchanged(run: Run, folder: Path) -> None:
    done = run("savings", "--data", str(folder), "--json")
    before = (folder / "savings.json").read_text()
    for old, new in RENAMED.items():
        before = before.replace(f'"{old}":', f'"{new}":')
    assert json.loads(done.out) == json.loads(before)


def test_old_states_and_columns_get_their_current_names(run: Run, folder: Path) -> None:
    with closing(sqlite3.connect(folder / "gateway.db")) as old, old:
        for state, status in (("passed", 200), ("failed", 404), ("failed", 502)):
            old.execute(
                "INSERT INTO entries SELECT time, request_id, account, namespace, route, model, ?,"
                " shots, similarity, prompt_tokens, completion_tokens, cached_tokens, 0.5, 0.0,"
                " seconds, ? FROM entries WHERE route = 'master' LIMIT 1",
                (state, status),
            )
        old.execute("INSERT INTO notes VALUES ('repeat:key', '1795380300.0 example')")
    done = json.loads(run("savings", "--data", str(folder), "--json").out)
    states = [row["state"] for row in done["routes"]]
    assert states == ["replayed", "answered", "answered", "passed_through", "failed", "rejected"]
    assert (done["requests"], done["answered"]) == (22, 20)
    assert done["spent_usd"] == pytest.approx(1.501213)
    ledger = Ledger(folder / "gateway.db", repeat_seconds=100.0, clock=lambda: 1795380350.0)
    assert ledger.repeat("key") == (1795380300.0, "example")
    assert ledger.spent_this_month("anonymous") == 0.0
    ledger.close()
    with closing(sqlite3.connect(folder / "gateway.db")) as new:
        columns = {table: columns_of(new, table) for table in ("accounts", "entries", "spending")}
    assert {"can_store"} <= columns["accounts"] and not {"may_store"} & columns["accounts"]
    assert {"tier"} <= columns["entries"] and not {"route"} & columns["entries"]
    assert columns["spending"] == {"month", "account", "usd"}


def columns_of(connection: sqlite3.Connection, table: str) -> set[str]:
    return {str(row[1]) for row in connection.execute(f"PRAGMA table_info({table})")}


def test_an_old_ledger_accepts_new_entries(run: Run, folder: Path) -> None:
    ledger = Ledger(folder / "gateway.db")
    ledger.record(Entry(1795380300.0, "r", "k", "", "master", "m", "answered", cost_usd=0.5))
    ledger.close()
    done = json.loads(run("savings", "--data", str(folder), "--json").out)
    before = json.loads((folder / "savings.json").read_text())
    assert done["requests"] == before["requests"] + 1
    assert done["spent_usd"] == pytest.approx(before["spent_usd"] + 0.5)


def test_old_keys_keep_their_limits_and_revocation(folder: Path) -> None:
    keys = json.loads((folder / "keys.json").read_text())
    accounts = Accounts(folder / "gateway.db")
    try:
        team, operator = (
            accounts.authenticate(keys["team-a"]),
            accounts.authenticate(keys["operator"]),
        )
        assert team is not None and operator is not None
        assert (team.namespace, team.requests_per_minute, team.usd_per_month) == ("team", 60, 5.0)
        assert operator.admin and not team.admin
        assert accounts.authenticate(keys["gone"]) is None
    finally:
        accounts.close()


def test_an_old_cache_keeps_the_masters_answers(folder: Path) -> None:
    with KnowledgeBase.open(folder / "cache.db", None) as cache:
        words = [example.answer.split()[-1] for example in cache]
        assert len(words) == 8 and set(words) <= {"one", "seven", "four", "six", "three"}
        assert all(example.source == "master:bundled:master" for example in cache)


@pytest.mark.slow
def test_an_old_run_is_reported_and_continued(run: Run, tmp_path: Path) -> None:
    folder = unpacked("run", tmp_path / "run")
    figures = json.loads((folder / "results.json").read_text())["results"]
    run("report", str(folder), "--out", str(tmp_path / "report"))
    table = (tmp_path / "report" / "results.md").read_text()
    assert all(row["method"] in table for row in figures)
    command = [
        "eval",
        "digits",
        "--methods",
        "zero-shot,top-k,vote",
        "--shots",
        "2",
        "--limit",
        "6",
    ]
    run(*command, "--json", str(tmp_path / "again.json"), "--out", str(folder))
    again = json.loads((tmp_path / "again.json").read_text())["results"]
    for row, old in zip(again, figures, strict=True):
        shown = {name: row[name] for name in old}
        # Intervals are computed anew, so their last digits may differ.
        for end in ("low", "high"):
            assert shown.pop(end) == pytest.approx(old.pop(end), abs=1e-9)
        assert shown == old
    assert [row["seconds"] for row in again if row["method"] != "vote"]
