from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bottega._util.batch_writer import WriterThread
from bottega._util.sql_tables import MAX_SHORT
from bottega.errors import StoreError
from bottega.gateway.accounting import ledger as ledger_module
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_database import FileLedger, LedgerBatch, open_tables
from bottega.gateway.accounting.ledger_schema import Entry, ShadowSample
from tests.gateway.ledgers import count, entry, file, ledger, limit_pages, until

__all__ = ["file", "ledger"]  # fixtures

NOVEMBER = datetime(2026, 11, 21, tzinfo=UTC).timestamp()
DECEMBER = datetime(2026, 12, 1, tzinfo=UTC).timestamp()


def test_all_columns_are_stored(ledger: Ledger, file: Path) -> None:
    whole = Entry(
        5.0,
        "r",
        "a",
        "ns",
        "apprentice",
        "m",
        "passed_through",
        2,
        0.5,
        10,
        3,
        1,
        0.25,
        0.75,
        200,
        0.05,
        variant="more-shots:b",
        reason="cold start\0" + "x" * 400,
    )
    ledger.record(whole)
    shadow = ShadowSample(6.0, "r", "ns", 0.9, 1.0, None, sampled=False, judge=3)
    ledger.record_shadow(shadow)
    ledger.flush()
    [row] = ledger.read("SELECT * FROM gateway_entries")
    reason = f"cold start\N{REPLACEMENT CHARACTER}{'x' * (MAX_SHORT - 11)}"
    assert Entry(*row) == replace(whole, reason=reason)
    [found] = ledger.read("SELECT * FROM gateway_shadows")
    assert ShadowSample(*found) == shadow


def test_entries_are_written_within_half_a_second(ledger: Ledger, file: Path) -> None:
    for number in range(100):
        ledger.record(entry(number))
    assert isinstance(ledger._writer, WriterThread) and ledger._writer.seconds <= 0.5
    assert until(20, file, 100)


def test_adding_is_fast_and_closing_loses_nothing(file: Path) -> None:
    ledger = Ledger(file)
    rounds = []
    for _ in range(20):
        begun = time.thread_time()
        for number in range(500):
            ledger.record(entry(number))
        rounds.append((time.thread_time() - begun) / 500)
    assert min(rounds) < 50e-6
    ledger.close()
    assert count(file) == 10_000
    assert ledger.lost == 0


def test_many_threads_can_add_entries(ledger: Ledger, file: Path) -> None:
    def work() -> None:
        for number in range(500):
            ledger.record(entry(number))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.spent_this_month("a") == pytest.approx(40.0)
    ledger.flush()
    assert count(file) == 4000
    assert ledger.spent_this_month("a") == pytest.approx(40.0)


def test_spending_counts_at_once_and_after_a_restart(file: Path) -> None:
    ledger = Ledger(file)
    for cost in (0.5, None, float("nan"), float("inf"), -1.0, 0.25):
        ledger.record(entry(cost=cost))
    ledger.record(entry(cost=9.0, account="b"))
    for _ in range(2):
        assert ledger.spent_this_month("a") == 0.75
        ledger.flush()
    assert ledger.spent_this_month("unused") == 0.0
    ledger.close()
    again = Ledger(file)
    assert (again.spent_this_month("a"), again.spent_this_month("b")) == (0.75, 9.0)
    again.close()


def test_spending_that_is_being_written_counts(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an account could spend its budget twice while the disk is slow."""
    written = ledger._store.write
    during: list[float] = []

    def write(batch: LedgerBatch) -> None:
        during.append(ledger.spent_this_month("a"))
        written(batch)
        during.append(ledger.spent_this_month("a"))

    monkeypatch.setattr(ledger._writer, "seconds", 60.0)  # only this test writes
    monkeypatch.setattr(ledger._store, "write", write)
    for cost in (0.5, 0.25):
        ledger.record(entry(cost=cost))
        ledger.flush()
    assert during == [0.5] * 2 + [0.75] * 2


def test_spending_during_a_failed_write_is_kept(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(file)
    written = ledger._store.write
    failures = [StoreError("no space left")]

    def write(batch: LedgerBatch) -> None:
        if failures:
            ledger.record(entry(cost=0.25))  # another request ends meanwhile
            raise failures.pop()
        written(batch)

    monkeypatch.setattr(ledger._writer, "seconds", 60.0)  # only this test writes
    monkeypatch.setattr(ledger._store, "write", write)
    ledger.record(entry(cost=0.5))
    ledger._set_note("gate", "closed")
    with pytest.raises(StoreError):
        ledger.flush()
    assert (ledger.spent_this_month("a"), ledger._note("gate")) == (0.75, "closed")
    ledger.flush()
    assert ledger.spent_this_month("a") == 0.75
    ledger.close()
    again = Ledger(file)
    assert again.spent_this_month("a") == 0.75
    assert again._note("gate") == "closed"
    again.close()


def test_a_month_ends_at_midnight_utc(file: Path) -> None:
    now = [DECEMBER - 1]
    ledger = Ledger(file, clock=lambda: now[0])
    ledger.record(replace(entry(cost=0.5), time=DECEMBER - 2))
    assert ledger.spent_this_month("a") == 0.5
    ledger.flush()
    now[0] = DECEMBER
    assert ledger.spent_this_month("a") == 0.0
    ledger.record(replace(entry(cost=0.1), time=DECEMBER))
    ledger.record(replace(entry(cost=0.2), time=DECEMBER - 1))  # it began last month
    assert ledger.spent_this_month("a") == 0.1
    ledger.flush()
    assert ledger.spent_this_month("a") == 0.1
    ledger.close()


def test_two_gateways_count_together(ledger: Ledger, file: Path) -> None:
    other = Ledger(file)
    ledger.record(entry(cost=0.5))
    ledger.flush()
    other.record(entry(cost=0.25))
    other.flush()
    assert other.spent_this_month("a") == 0.75
    other.close()


def test_invalid_upstream_values_do_not_block_rows(ledger: Ledger, file: Path) -> None:
    odd = replace(
        entry(cost=float("nan")),
        model="\ud800\0",
        prompt_tokens=10**30,
        completion_tokens=-5,
        similarity=float("nan"),
        seconds=float("inf"),
    )
    ledger.record(odd)
    ledger.record(entry())
    ledger.flush()
    rows = ledger.read(
        "SELECT model, prompt_tokens, completion_tokens, similarity FROM gateway_entries"
    )
    assert rows[0] == ("?\N{REPLACEMENT CHARACTER}", 2**40, 0, None)
    assert len(rows) == 2


def test_locked_file_is_logged_and_fails_no_request(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bottega.gateway.accounting.ledger_database.BUSY_SECONDS", 0.05)
    monkeypatch.setattr(ledger_module, "MAX_PENDING", 10)
    ledger = Ledger(file)
    monkeypatch.setattr(ledger._writer, "retry_seconds", 0.05)
    blocker = sqlite3.connect(file, isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    with caplog.at_level(logging.WARNING):
        for number in range(25):
            ledger.record(entry(number, cost=0.5))
        time.sleep(0.8)
        assert ledger.spent_this_month("a") == 12.5
        blocker.execute("ROLLBACK")
        blocker.close()
        assert until(20, file, 10)
    ledger.close()
    assert (ledger.lost, ledger.spent_this_month("a")) == (15, 12.5)
    messages = [record.message for record in caplog.records]
    assert [("requests continue" in each) for each in messages] == [True, False]
    assert messages[1] == "the ledger can be written again; rows lost: 15"
    again = Ledger(file)
    assert again.total_lost() == 15
    assert again.read("SELECT request_id FROM gateway_entries")[0] == ("r15",)  # the oldest went
    again.close()


def test_each_failure_and_each_recovery_is_logged_once(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise StoreError("no room", hint="free some")

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert ledger._attempt(fail) is False
            assert [record.levelname for record in caplog.records] == ["ERROR"]
            assert ledger._attempt(fail) is False
            assert ledger._attempt(lambda: None) is True
            assert ledger._attempt(lambda: None) is True
            assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
            caplog.clear()


def test_commits_do_not_wait_for_the_disk(file: Path) -> None:
    writer = FileLedger(open_tables(file))
    assert writer.tables.execute("PRAGMA synchronous") == [(1,)]  # NORMAL
    assert writer.tables.execute("PRAGMA journal_mode") == [("wal",)]
    writer.close()


# After some errors (a full disk) SQLite itself ends the transaction, after others it does not.
@pytest.mark.parametrize("failure", ["ABORT", "ROLLBACK"])
def test_failed_write_keeps_nothing_and_can_be_repeated(file: Path, failure: str) -> None:
    batch = LedgerBatch([entry()], [ShadowSample(0.0, "r", "ns", 0.5, 1.0, 0.0)])
    writer = FileLedger(open_tables(file))
    other = sqlite3.connect(file, isolation_level=None)
    other.execute(
        "CREATE TRIGGER failing BEFORE INSERT ON gateway_shadows"
        f" BEGIN SELECT RAISE({failure}, 'no room for shadows'); END"
    )
    with pytest.raises(StoreError, match="no room for shadows"):
        writer.write(batch)
    assert count(file) == 0
    other.execute("DROP TRIGGER failing")
    other.close()
    writer.write(batch)
    writer.close()
    assert (count(file), count(file, "gateway_shadows")) == (1, 1)


def test_full_disk_fails_no_request_and_lost_rows_are_logged(
    ledger: Ledger, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit_pages(ledger, 1)
    for number in range(2000):
        ledger.record(entry(number))
    with caplog.at_level(logging.ERROR):
        ledger.close()
    assert ledger.lost == 2000
    assert "no space left" in caplog.text
    assert "lost 2000 rows that could not be written" in caplog.text
    ledger._store = Ledger(file)._store  # closed again by the fixture
    assert ledger._store.tables.execute("PRAGMA integrity_check") == [("ok",)]


def test_pruning_keeps_monthly_spending(file: Path) -> None:
    ledger = Ledger(file, clock=lambda: NOVEMBER)
    for day in range(12):
        ledger.record(replace(entry(cost=1.0), time=NOVEMBER - day * 86_400.0))
        ledger.record_shadow(ShadowSample(NOVEMBER - day * 86_400.0, "r", "ns", 0.5, 1.0, 1.0))
    ledger.flush()
    assert ledger.prune(5.5) == 12
    assert (count(file), count(file, "gateway_shadows")) == (6, 6)
    assert ledger.spent_this_month("a") == 12.0
    ledger.close()
    kept = Ledger(file, keep_days=2.5, clock=lambda: NOVEMBER)
    assert kept.spent_this_month("a") == 12.0
    kept.record(replace(entry(), time=NOVEMBER))
    assert until(20, file, 4)
    kept.close()


def test_gates_keep_their_state(file: Path) -> None:
    ledger = Ledger(file)
    assert ledger.gate("ns", "nearest") is None
    ledger.set_gate("ns", "nearest", '{"n": 1}')
    ledger.set_gate("other", "nearest", "{}")
    ledger.set_gate("ns", "text", "[]")
    assert ledger.gate("ns", "nearest") == '{"n": 1}'
    ledger.set_gate("ns", "nearest", '{"n": 2}')
    ledger.set_master("master")
    ledger.close()
    again = Ledger(file)
    states = [again.gate("ns", "nearest"), again.gate("ns", "text"), again.gate("other", "nearest")]
    assert (*states, again.master()) == ('{"n": 2}', "[]", "{}", "master")
    again.close()


WRITER = """
import sys, time
from bottega.gateway.accounting.ledger_database import LedgerBatch
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import Entry, ShadowSample
ledger = Ledger(sys.argv[1])
number = 0
while True:
    ledger.record(Entry(time.time(), str(number), "a", "", "m", "m", "answered", cost_usd=1.0))
    print(number, time.time(), flush=True)
    number += 1
    time.sleep(0.001)
"""


def test_killed_process_loses_at_most_half_a_second(file: Path) -> None:
    kept = 0
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(file)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline()
        time.sleep(0.9)
        killed = time.time()
        process.kill()
        output, _ = process.communicate()
        # The kill may cut off the last line.
        noted = [line.split() for line in output.splitlines()[:-1]]
        owed = {number for number, moment in noted if float(moment) < killed - 0.5}
        ledger = Ledger(file)
        rows = ledger.read(
            "SELECT request_id FROM gateway_entries ORDER BY rowid LIMIT -1 OFFSET ?", kept
        )
        assert owed <= {str(row[0]) for row in rows}
        assert owed
        kept += len(rows)
        assert ledger.spent_this_month("a") == kept
        assert ledger.read("PRAGMA integrity_check") == [("ok",)]
        ledger.close()


def test_reading_does_not_wait_for_writers(
    ledger: Ledger, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.gateway.accounting.ledger_database.BUSY_SECONDS", 60.0)
    ledger.record(entry())
    ledger.flush()
    blocker = sqlite3.connect(file, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    begun = time.monotonic()
    other = Ledger(file, create=False)
    assert len(other.read("SELECT * FROM gateway_entries")) == 1
    other.close()
    accounts = Accounts(file)
    assert accounts.list() == []
    accounts.close()
    assert time.monotonic() - begun < 60
    blocker.close()
