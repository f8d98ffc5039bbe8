"""Ledgers of tests: fixtures, entries and counts of rows."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bottega._util.sql_tables import FileTables
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import Entry

__all__ = ["count", "entry", "file", "ledger", "limit_pages", "until"]


def entry(number: int = 0, cost: float | None = 0.01, account: str = "a") -> Entry:
    return Entry(
        time.time(), f"r{number}", account, "ns", "master", "gpt", "answered", cost_usd=cost
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "gateway.db"


@pytest.fixture
def ledger(file: Path) -> Iterator[Ledger]:
    opened = Ledger(file)
    yield opened
    opened.close()


def count(file: Path, table: str = "gateway_entries") -> int:
    connection = sqlite3.connect(file)
    (number,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    connection.close()
    return int(number)


def until(seconds: float, file: Path, wanted: int) -> bool:
    end = time.monotonic() + seconds
    while count(file) != wanted and time.monotonic() < end:
        time.sleep(0.02)
    return count(file) == wanted


def limit_pages(ledger: Ledger, pages: int) -> None:
    """Let the ledger's file grow to this number of pages at most, as on a full disk."""
    assert isinstance(ledger._store.tables, FileTables)
    ledger._store.tables._connection.execute(f"PRAGMA max_page_count = {pages}")
