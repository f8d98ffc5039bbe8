"""Background thread of the ledger: writing, losses and deletions."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bottega._util.sql_tables import FileTables
from bottega.errors import StoreError
from bottega.gateway.accounting import ledger as ledger_module
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_database import FileLedger, LedgerBatch, open_tables
from bottega.gateway.accounting.ledger_schema import ShadowSample
from tests.gateway.ledgers import count, entry, file, ledger, limit_pages, until

__all__ = ["file", "ledger"]  # fixtures

NOVEMBER = datetime(2026, 11, 21, tzinfo=UTC).timestamp()
DECEMBER = datetime(2026, 12, 1, tzinfo=UTC).timestamp()


def attempts_of(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the times at which the ledger flushes."""
    times: list[float] = []
    flush = ledger._flush_in_thread

    def counted() -> None:
        times.append(time.monotonic())
        flush()

    monkeypatch.setattr(ledger, "_flush_in_thread", counted)
    return times


def test_an_idle_ledger_does_not_poll(
    ledger: Ledger, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger._writer, "seconds", 0.001)
    attempts = attempts_of(ledger, monkeypatch)
    ledger.record(entry())
    assert until(20, file, 1)
    time.sleep(0.05)
    assert len(attempts) <= 2  # a second one if the entry came during the first


def test_a_failing_ledger_waits_before_it_tries_again(
    ledger: Ledger, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger._writer, "seconds", 0.001)
    limit_pages(ledger, 1)
    attempts = attempts_of(ledger, monkeypatch)
    for number in range(2000):
        ledger.record(entry(number))
    time.sleep(0.1)
    assert 1 <= len(attempts) <= 2
    limit_pages(ledger, 100000)


def test_a_file_that_cannot_be_read_fails_opening(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(self: FileLedger, month: str) -> None:
        raise StoreError("gateway.db is damaged", hint="restore it")

    closed: list[FileLedger] = []
    close = FileLedger.close

    def recorded(self: FileLedger) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(FileLedger, "spent_since", damaged)
    monkeypatch.setattr(FileLedger, "close", recorded)
    with pytest.raises(StoreError, match="damaged"):
        Ledger(file)
    assert len(closed) == 1


@pytest.mark.parametrize("sql", ["SELECT 1", "SELECT nothing FROM nowhere"])
def test_each_report_closes_its_connection(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    files: list[FileTables] = []
    close = FileTables.close

    def recorded(self: FileTables) -> None:
        files.append(self)
        close(self)

    with monkeypatch.context() as patch:
        patch.setattr(FileTables, "close", recorded)
        with suppress(StoreError):
            ledger.read(sql)
    assert len(files) == 1 and files[0] is not ledger._store.tables


def test_old_repeats_are_deleted_in_the_background(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection:
        Ledger(file).close()
        connection.execute("INSERT INTO gateway_notes VALUES ('replay:old', '5.0 e1')")
        connection.commit()
    ledger = Ledger(file, repeat_seconds=60.0)
    ledger.set_repeat("new", "e2")
    ledger.flush()
    end = time.monotonic() + 20
    while count(file, "gateway_notes") != 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert ledger.read("SELECT name FROM gateway_notes") == [("replay:new",)]
    assert ledger.delete_old_repeats() == 0
    ledger.close()


def test_delete_old_repeats_returns_their_number(file: Path) -> None:
    now = NOVEMBER
    ledger = Ledger(file, repeat_seconds=60.0, clock=lambda: now)
    for key in "ab":
        ledger.set_repeat(key, "e")
    ledger.flush()
    assert ledger.repeat("a") == (NOVEMBER, "e")
    now += 59.0
    ledger.set_repeat("c", "e")
    ledger.flush()
    assert ledger.repeat("a") == (NOVEMBER, "e")
    now += 1.0
    assert ledger.repeat("a") is None
    now += 0.5
    assert ledger.delete_old_repeats() == 2
    assert ledger.repeat("c") is not None
    ledger.close()


def test_shadows_that_cannot_be_written_count_as_lost(ledger: Ledger, file: Path) -> None:
    limit_pages(ledger, 1)
    for number in range(500):
        ledger.record(entry(number))
        ledger.record_shadow(ShadowSample(6.0, "r", "ns", 0.9, 1.0, 0.0))
    ledger.close()
    assert ledger.lost == 1000
    ledger._store = Ledger(file)._store  # closed again by the fixture


def test_overflow_drops_the_oldest_rows_of_each_kind(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "MAX_PENDING", 3)
    monkeypatch.setattr(ledger._writer, "seconds", 60.0)
    with monkeypatch.context() as patch:

        def fail(self: FileLedger, batch: LedgerBatch) -> None:
            raise StoreError("no room", hint="free some")

        patch.setattr(FileLedger, "write", fail)
        for number in range(5):
            ledger.record(entry(number))
        for number in range(4):
            ledger.record_shadow(ShadowSample(float(number), "r", "ns", 0.9, 1.0, 0.0))
        with pytest.raises(StoreError):
            ledger.flush()
    assert ledger.lost == 3
    ledger.flush()
    assert ledger.total_lost() == 3
    assert ledger.read("SELECT request_id FROM gateway_entries") == [("r2",), ("r3",), ("r4",)]
    assert ledger.read("SELECT time FROM gateway_shadows") == [(1.0,), (2.0,), (3.0,)]


def test_batches_of_all_sizes_need_few_statements(tmp_path: Path) -> None:
    with closing(FileLedger(open_tables(tmp_path / "ledger.db"))) as entries:
        sizes: set[int] = set()

        def note(sql: str) -> None:
            if sql.startswith("INSERT INTO gateway_entries"):
                sizes.add(sql.count("), (") + 1)

        assert isinstance(entries.tables, FileTables)
        entries.tables._connection.set_trace_callback(note)
        written = 0
        for size in (1, 2, 3, 7, 100, 255, 300):
            entries.write(LedgerBatch([entry(written + i) for i in range(size)]))
            written += size
        assert sizes <= {1 << power for power in range(9)}
        assert entries.tables.execute("SELECT count(*) FROM gateway_entries") == [(written,)]
