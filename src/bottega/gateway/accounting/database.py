"""Rows of the ledger, and gateway.db, which stores them."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from bottega.errors import StoreError
from bottega.gateway.accounting.schema import GATEWAY_DB
from bottega.image import path_text

FILE = "gateway.db"
BUSY_SECONDS = 3.0


def connect(path: Path, *, create: bool) -> sqlite3.Connection:
    """Open a connection that any thread may use. Commits survive a crash of the process. A crash
    of the machine may lose the last commits but does not damage the file. Raises `StoreError`."""
    name = path_text(path)
    if not create and not path.exists():
        raise StoreError(
            f"gateway database {name} does not exist",
            hint="check --data; bottega serve --data FOLDER and bottega keys add NAME create it;"
            " bottega serve --demo keeps its ledger only with --data FOLDER",
        )
    if not path.parent.is_dir():
        raise StoreError(f"folder {path_text(path.parent)} does not exist", hint="create it first")
    with GATEWAY_DB.translated(name):
        return GATEWAY_DB.open(path, busy_seconds=BUSY_SECONDS)


# A shadow is an extra call after an answer, made to measure the demonstrations. It has a cost but
# is not a client's request.
State = Literal["answered", "replayed", "passed_through", "failed", "shadow"]
Value = str | int | float | None
Row = tuple[Any, ...]  # as returned by SQLite
AccountMonth = tuple[str, str]

MAX_USD = 1e12
MAX_COUNT = 2**40  # so daily sums stay below 2**63
MAX_REASON = 300  # characters
PRUNE_BATCH = 5_000
FLUSH_SECONDS = 0.3
INSERT_BATCH = 256


@dataclass(slots=True)  # not frozen: a frozen instance takes three times as long to create
class Entry:
    """Ledger entry of one request. `cost_usd` is None if the price is unknown; it includes
    `dismissed_usd`, the cost of tiers whose answers were escalated. `similarity` is that of the
    nearest example found, shown or not, None without a retrieval or a candidate. `variant` is that
    of an experiment, such as "more-shots:b". `reason` states why this tier was selected, and why
    the request failed or passed through. `time` is in unix seconds."""

    time: float
    request_id: str
    account: str
    namespace: str
    tier: str
    model: str
    state: State
    shots: int = 0
    similarity: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float | None = None
    seconds: float = 0.0
    status: int = 200
    dismissed_usd: float = 0.0
    id: str = ""  # set by stores that several gateways share
    variant: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ShadowSample:
    """Shadow sample: the agreement of an answer with the master's, from 0 to 1, with and without
    demonstrations. `retrieve` is the retrieval method, "none" if the question had no
    demonstrations, "" in files of earlier versions. A `sampled` answer was served, and its
    question was drawn at random; the others were measured for the gate alone."""

    time: float
    request_id: str
    namespace: str
    similarity: float
    with_score: float
    without_score: float
    id: str = ""  # as of an entry
    retrieve: str = ""
    sampled: bool = True


@dataclass(frozen=True)
class LedgerBatch:
    """Rows for one transaction. `spent` is the cost of the entries in US dollars, by month and
    account."""

    entries: Sequence[Entry] = ()
    shadows: Sequence[ShadowSample] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    spent: Mapping[AccountMonth, float] = field(default_factory=dict)
    lost: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.entries or self.shadows or self.notes or self.spent or self.lost)


class EntryFile:
    """Tables of the ledger in gateway.db. Not thread-safe."""

    flush_seconds = FLUSH_SECONDS

    def __init__(self, path: Path, *, create: bool) -> None:
        self.name = path_text(path)
        self._path = path
        self._connection = connect(path, create=create)

    def new_id(self) -> str:
        return ""

    def write(self, batch: LedgerBatch) -> None:
        """Write the batch in one transaction."""
        entries = [entry_row(entry) for entry in batch.entries]
        shadows = [shadow_row(shadow) for shadow in batch.shadows]
        spent = [(month, text_of(account), usd) for (month, account), usd in batch.spent.items()]
        notes = [(text_of(name), text_of(value)) for name, value in batch.notes.items()]
        with GATEWAY_DB.translated(self.name):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._insert("entries", entries)
                self._insert("shadows", shadows)
                self._connection.executemany("REPLACE INTO notes VALUES (?, ?)", notes)
                self._connection.executemany(
                    "INSERT INTO spending VALUES (?, ?, ?)"
                    " ON CONFLICT DO UPDATE SET usd = usd + excluded.usd",
                    spent,
                )
                if batch.lost:
                    self._connection.execute(
                        "INSERT INTO notes VALUES ('lost', ?) ON CONFLICT DO UPDATE"
                        " SET value = value + excluded.value",
                        (str(batch.lost),),
                    )
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # a full disk has rolled back already
                    self._connection.execute("ROLLBACK")
                raise

    def _insert(self, table: str, rows: Sequence[tuple[Value, ...]]) -> None:
        """Insert many rows per statement: between two statements this thread releases the GIL and
        waits for the event loop to give it back. The number of rows per statement is a power of
        two, because sqlite3 caches the last 128 different statements, 0.3 MB each."""
        start = 0
        while start < len(rows):
            most = 1 << (len(rows) - start).bit_length() - 1
            some = rows[start : start + min(INSERT_BATCH, most)]
            start += len(some)
            marks = f"({', '.join('?' * len(some[0]))})"
            self._connection.execute(
                f"INSERT INTO {table} VALUES {', '.join([marks] * len(some))}",
                list(chain.from_iterable(some)),
            )

    def read(self, sql: str, *values: Value) -> list[Row]:
        with GATEWAY_DB.translated(self.name):
            return self._connection.execute(sql, values).fetchall()

    def execute(self, sql: str, *values: Value) -> None:
        """Run one statement that writes, in its own transaction."""
        self.read(sql, *values)

    def read_report(self, sql: str, *values: Value) -> list[Row]:
        """Run a report's query on a separate connection, without delaying the writer."""
        file = EntryFile(self._path, create=False)
        try:
            return file.read(sql, *values)
        finally:
            file.close()

    def spent_since(
        self, month: str, accounts: Collection[str] | None = None
    ) -> dict[AccountMonth, float]:
        """Return the spending in US dollars by month and account, from this month on."""
        rows = self.read("SELECT month, account, usd FROM spending WHERE month >= ?", month)
        with GATEWAY_DB.reading(self.name):
            return {(str(month), str(account)): float(usd) for month, account, usd in rows}

    def prune(self, before: float) -> int:
        """Delete up to `PRUNE_BATCH` older rows of each table. Return their number; 0 means that
        none are left. Monthly spending is kept."""
        with GATEWAY_DB.translated(self.name):
            return sum(
                self._connection.execute(
                    f"DELETE FROM {table} WHERE rowid IN"
                    f" (SELECT rowid FROM {table} WHERE time < ? LIMIT {PRUNE_BATCH})",
                    (before,),
                ).rowcount
                for table in ("entries", "shadows", "feedback")
            )

    def delete_notes(self, prefix: str, before: float) -> int:
        """Delete notes whose name has this prefix and whose value starts with an earlier time than
        `before`. Return their number."""
        with GATEWAY_DB.translated(self.name):
            return self._connection.execute(
                "DELETE FROM notes WHERE substr(name, 1, ?) = ? AND CAST(value AS REAL) < ?",
                (len(prefix), prefix, before),
            ).rowcount

    def close(self) -> None:
        self._connection.close()


def month_of(moment: float) -> str:
    """Return the calendar month in UTC, such as 2026-11."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m")


def month_bounds(moment: float) -> tuple[float, float]:
    """Return the first moment of the month that contains `moment`, and of the next month."""
    begins = datetime.fromtimestamp(moment, UTC).replace(
        day=1, hour=0, minute=0, second=0, microsecond=0
    )
    ends = (begins + timedelta(days=32)).replace(day=1)
    return begins.timestamp(), ends.timestamp()


def dollars(cost: float | None) -> float | None:
    """Return the cost, None if it is negative, NaN or too large: one infinite cost would use up
    every budget."""
    return cost if cost is not None and 0 <= cost < MAX_USD else None


def entry_row(entry: Entry) -> tuple[Value, ...]:
    """Return the columns of an entry. Values from upstreams are clamped, since one value that
    SQLite rejects would fail the whole batch."""
    return (
        entry.time,
        text_of(entry.request_id),
        text_of(entry.account),
        text_of(entry.namespace),
        text_of(entry.tier),
        text_of(entry.model),
        entry.state,
        _count(entry.shots),
        _finite(entry.similarity),
        _count(entry.prompt_tokens),
        _count(entry.completion_tokens),
        _count(entry.cached_tokens),
        dollars(entry.cost_usd),
        dollars(entry.dismissed_usd) or 0.0,
        max(0.0, _finite(entry.seconds) or 0.0),
        _count(entry.status),
        text_of(entry.variant),
        text_of(entry.reason[:MAX_REASON]),
    )


def shadow_row(shadow: ShadowSample) -> tuple[Value, ...]:
    return (
        shadow.time,
        text_of(shadow.request_id),
        text_of(shadow.namespace),
        _finite(shadow.similarity) or 0.0,
        _finite(shadow.with_score) or 0.0,
        _finite(shadow.without_score) or 0.0,
        text_of(shadow.retrieve),
        shadow.sampled,
    )


def text_of(text: str) -> str:
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def _count(number: int) -> int:
    return min(max(number, 0), MAX_COUNT)


def _finite(number: float | None) -> float | None:
    return float(number) if number is not None and math.isfinite(number) else None
