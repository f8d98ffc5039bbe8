"""What the ledger keeps, and how it lies in the file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from bottega.gateway.accounting.database import GATEWAY_DB, connect
from bottega.image import path_text

# A shadow is a call behind an answer, to measure: it costs, and is no request.
State = Literal["answered", "replayed", "passed", "failed", "shadow"]
Value = str | int | float | None
Row = tuple[Any, ...]  # as SQLite gives it
AccountMonth = tuple[str, str]

MAX_USD = 1e12
MAX_COUNT = 2**62
PRUNE_BATCH = 5_000
INSERT_BATCH = 250


@dataclass(slots=True)  # not frozen: that takes three times as long to make
class Entry:
    """One request. `route` is the tier's name; `cost_usd` is None where a price is not known, and
    includes `dismissed_usd`, what tiers cost whose answers were not good enough. `similarity` is
    the best example's, shown or not, None if none was looked for or found."""

    time: float
    request_id: str
    account: str
    namespace: str
    route: str
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


@dataclass(frozen=True, slots=True)
class Shadow:
    """One question that was answered with demonstrations and without, and how far each answer
    agrees with the master's, from 0 to 1."""

    time: float
    request_id: str
    namespace: str
    similarity: float
    with_score: float
    without_score: float


@dataclass(frozen=True, slots=True)
class Spent:
    """US dollars in all, and of the dearest request."""

    usd: float = 0.0
    dearest: float = 0.0

    def plus(self, more: Spent) -> Spent:
        return Spent(self.usd + more.usd, max(self.dearest, more.dearest))


@dataclass(frozen=True)
class Batch:
    """What is written together. `spent` is what the entries cost, by month and account."""

    entries: Sequence[Entry] = ()
    shadows: Sequence[Shadow] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    spent: Mapping[AccountMonth, Spent] = field(default_factory=dict)
    lost: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.entries or self.shadows or self.notes or self.spent or self.lost)


class EntryFile:
    """The ledger's tables. One thread at a time."""

    def __init__(self, path: Path, *, create: bool) -> None:
        self.name = path_text(path)
        self._connection = connect(path, create=create)

    def write(self, batch: Batch) -> None:
        """All of it, or nothing of it."""
        entries = [_entry_row(entry) for entry in batch.entries]
        shadows = [_shadow_row(shadow) for shadow in batch.shadows]
        spent = [
            (month, _text(account), one.usd, one.dearest)
            for (month, account), one in batch.spent.items()
        ]
        notes = [(_text(name), _text(value)) for name, value in batch.notes.items()]
        with GATEWAY_DB.translated(self.name):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._insert("entries", entries)
                self._insert("shadows", shadows)
                self._connection.executemany("REPLACE INTO notes VALUES (?, ?)", notes)
                self._connection.executemany(
                    "INSERT INTO spending VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE"
                    " SET usd = usd + excluded.usd, dearest = max(dearest, excluded.dearest)",
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
        """Many with one statement: between two the event loop gets to run, and must be waited
        for."""
        for start in range(0, len(rows), INSERT_BATCH):
            some = rows[start : start + INSERT_BATCH]
            marks = f"({', '.join('?' * len(some[0]))})"
            self._connection.execute(
                f"INSERT INTO {table} VALUES {', '.join([marks] * len(some))}",
                list(chain.from_iterable(some)),
            )

    def read(self, sql: str, *values: Value) -> list[Row]:
        with GATEWAY_DB.translated(self.name):
            return self._connection.execute(sql, values).fetchall()

    def spent_since(self, month: str) -> dict[AccountMonth, Spent]:
        rows = self.read("SELECT * FROM spending WHERE month >= ?", month)
        with GATEWAY_DB.reading(self.name):
            return {
                (str(month), str(account)): Spent(float(usd), float(dearest))
                for month, account, usd, dearest in rows
            }

    def prune(self, before: float) -> int:
        """Forgets some of the older rows, none only if there are none. What was spent in each month
        stays."""
        with GATEWAY_DB.translated(self.name):
            return sum(
                self._connection.execute(
                    f"DELETE FROM {table} WHERE rowid IN"
                    f" (SELECT rowid FROM {table} WHERE time < ? LIMIT {PRUNE_BATCH})",
                    (before,),
                ).rowcount
                for table in ("entries", "shadows")
            )

    def forget_notes(self, prefix: str, before: float) -> int:
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
    """The calendar month, UTC, such as 2026-11."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m")


def month_bounds(moment: float) -> tuple[float, float]:
    """When the moment's month begins and ends."""
    begins = datetime.fromtimestamp(moment, UTC).replace(
        day=1, hour=0, minute=0, second=0, microsecond=0
    )
    ends = (begins + timedelta(days=32)).replace(day=1)
    return begins.timestamp(), ends.timestamp()


def dollars(cost: float | None) -> float | None:
    """None for what is no amount of money: one infinite cost would spend every budget."""
    return cost if cost is not None and 0 <= cost < MAX_USD else None


def _entry_row(entry: Entry) -> tuple[Value, ...]:
    """What upstreams tell may be anything: whatever it is, it keeps no other row from the file."""
    return (
        entry.time,
        _text(entry.request_id),
        _text(entry.account),
        _text(entry.namespace),
        _text(entry.route),
        _text(entry.model),
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
    )


def _shadow_row(shadow: Shadow) -> tuple[Value, ...]:
    return (
        shadow.time,
        _text(shadow.request_id),
        _text(shadow.namespace),
        _finite(shadow.similarity) or 0.0,
        _finite(shadow.with_score) or 0.0,
        _finite(shadow.without_score) or 0.0,
    )


def _text(text: str) -> str:
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def _count(number: int) -> int:
    return min(max(number, 0), MAX_COUNT)


def _finite(number: float | None) -> float | None:
    return float(number) if number is not None and math.isfinite(number) else None
