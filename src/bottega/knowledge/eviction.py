"""Use counts, eviction policies, and pruning of the change log.

Each policy is an ORDER BY expression over the columns of `examples` and of `uses` (count,
last_used, saved_usd; NULL for unused examples). The first rows in that order are evicted."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from bottega.errors import SettingError, StoreFullError, StoreReadOnlyError
from bottega.knowledge.records import UsageRecord, is_text
from bottega.knowledge.sqlite.database import LOST_PREFIX, remove_rows

PRIME = 2_147_483_647
HOUR = 3600.0
# Both databases know CASE; only SQLite has max() of two values.
LAST_USE = (
    "CASE WHEN uses.last_used > examples.created THEN uses.last_used ELSE examples.created END"
)


class Eviction(Protocol):
    """Order of eviction. `protect` spares that many newest entries while older ones can go. Pinned
    entries never go."""

    @property
    def protect(self) -> int: ...

    def order(self) -> str: ...


class RandomEviction:
    """Uniformly random eviction that spares the newest entry."""

    protect = 1

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def order(self) -> str:
        # New random order each time: with fixed priorities some entries would never go.
        scale, shift = self._random.randrange(1, PRIME), self._random.randrange(PRIME)
        return f"(examples.key % {PRIME} * {scale} + {shift}) % {PRIME}"


class FirstInFirstOutEviction:
    """Eviction of the entry that was added first."""

    protect = 0

    def order(self) -> str:
        return "examples.key"


class LeastRecentlyUsedEviction:
    """Eviction of the entry used longest ago; adding an entry counts as a use."""

    protect = 0

    def order(self) -> str:
        return LAST_USE


class LeastFrequentlyUsedEviction:
    """Eviction of the least used entry; ties go to the entry used longest ago."""

    def __init__(self, protect: int = 10) -> None:
        self.protect = _check_protect(protect)

    def order(self) -> str:
        return f"coalesce(uses.count, 0), {LAST_USE}"


class LeastSavingsEviction:
    """Eviction of the entry with the least US dollars saved / max(age, one hour); ties go to the
    least used entry."""

    def __init__(self, protect: int = 10) -> None:
        self.protect = _check_protect(protect)

    def order(self) -> str:
        since = f"{time.time()!r} - examples.created"
        age = f"CASE WHEN {since} > {HOUR} THEN {since} ELSE {HOUR} END"
        return f"coalesce(uses.saved_usd, 0) / ({age}), coalesce(uses.count, 0)"


# `lru` and `least-recent`, `lfu` and `least-frequent` are the same.
EVICTIONS: Mapping[str, Callable[[], Eviction]] = {
    "lru": LeastRecentlyUsedEviction,
    "lfu": LeastFrequentlyUsedEviction,
    "least-saving": LeastSavingsEviction,
    "fifo": FirstInFirstOutEviction,
    "random": RandomEviction,
    "least-recent": LeastRecentlyUsedEviction,
    "least-frequent": LeastFrequentlyUsedEviction,
}


def _check_protect(protect: int) -> int:
    if protect < 0:
        raise SettingError(f"protect must be at least 0, got {protect}", hint="use protect=10")
    return protect


@dataclass(frozen=True)
class Capacity:
    """Maximum number of rows in a namespace, and the policy that evicts the excess."""

    rows: int
    evict: Eviction

    def excess(self, total: int, pinned: int) -> int:
        """Return the number of rows to delete. Raises `StoreFullError` if pinned rows fill the
        capacity."""
        if total > self.rows and pinned >= self.rows:
            raise StoreFullError(
                f"the capacity of {self.rows} is full of pinned examples, got {pinned}",
                hint="unpin examples (bottega unpin), or open with a larger capacity",
            )
        return max(0, total - self.rows)


def evict_excess(connection: sqlite3.Connection, namespace: str, capacity: Capacity) -> None:
    """Delete the rows above the capacity. It runs before the commit, so no reader sees more."""
    total, pinned = connection.execute(
        "SELECT count(*), coalesce(sum(pinned), 0) FROM examples LEFT JOIN uses USING (key)"
        " WHERE namespace = ?",
        [namespace],
    ).fetchone()
    excess = capacity.excess(total, pinned)
    if not excess:
        return
    newest = (
        "(SELECT key FROM examples WHERE namespace = ?1"
        f" ORDER BY key DESC LIMIT 1 OFFSET {capacity.evict.protect})"
    )
    found = connection.execute(
        "SELECT examples.key FROM examples LEFT JOIN uses USING (key)"
        " WHERE namespace = ?1 AND coalesce(pinned, 0) = 0"
        f" ORDER BY examples.key > {newest}, {capacity.evict.order()}, examples.key LIMIT ?2",
        (namespace, excess),
    )
    remove_rows(connection, [row[0] for row in found])


FLUSH_COUNT = 256
FLUSH_SECONDS = 30.0
MAX_USD = 1e15  # keeps sums finite


class UsageBuffer:
    """Buffer of use counts, written when it is large, old, or closed.

    A killed process loses the counts of the last half minute, but no example.
    """

    def __init__(self, write: Callable[[Mapping[str, UsageRecord]], None]) -> None:
        self._write = write
        self._uses: dict[str, UsageRecord] = {}
        self._since = time.monotonic()
        self._lock = Lock()

    def record(self, ids: Collection[str], saved_usd: float) -> None:
        """Count one use of each example and share the savings among them."""
        # Rejected here: one unwritable entry would block all others of its batch.
        if not all(map(is_text, ids)) or not is_amount(saved_usd):
            raise SettingError(
                f"used requires ids and a finite amount, got {list(ids)!a} and {saved_usd!a}",
                hint="give ids as texts, and US dollars as a number",
            )
        now = time.time()
        share = saved_usd / max(1, len(ids))
        with self._lock:
            if not self._uses:
                self._since = time.monotonic()
            for id in ids:
                before = self._uses.get(id, UsageRecord(0, now, 0.0))
                self._uses[id] = UsageRecord(before.count + 1, now, before.saved_usd + share)
            old = time.monotonic() - self._since > FLUSH_SECONDS
            due = len(self._uses) >= FLUSH_COUNT or old
        if due:
            self.flush()

    def flush(self) -> None:
        """Write the counts. A read-only store discards them; it evicts nothing either."""
        # Written without the lock: `record` must not wait for the disk.
        with self._lock:
            uses, self._uses = self._uses, {}
        if not uses:
            return
        try:
            self._write(uses)
        except StoreReadOnlyError:
            return
        except BaseException:
            with self._lock:  # put them back, beside the uses recorded meanwhile
                for id, use in uses.items():
                    later = self._uses.get(id, UsageRecord(0, use.last_used, 0.0))
                    self._uses[id] = UsageRecord(
                        use.count + later.count, later.last_used, use.saved_usd + later.saved_usd
                    )
            raise


def is_amount(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= MAX_USD


KEPT_CHANGES = 10_000
# An index file that lacks a tenth of its rows must remain usable.
KEPT_SHARE = 5
CHECK_EVERY = 1000
# Last change examined by pruning. `meta` also has the last change lost, by namespace.
HORIZON = "SELECT coalesce((SELECT CAST(value AS INTEGER) FROM meta WHERE name = 'pruned'), 0)"
DROPPABLE = (
    "FROM changes WHERE seq <= ?"
    " AND NOT EXISTS (SELECT 1 FROM examples WHERE examples.key = changes.key)"
    " AND seq NOT IN (SELECT max(seq) FROM changes GROUP BY namespace)"
)


def prune(connection: sqlite3.Connection, added: int) -> None:
    """Drop old log entries, within the transaction that added that many rows.

    Pruning reads the whole log, so it runs only after the log has grown by a fifth of the rows.
    """
    last, pruned = connection.execute(f"SELECT max(seq), ({HORIZON}) FROM changes").fetchone()
    # Each new row may have evicted another one.
    if last % CHECK_EVERY >= 2 * added or last - pruned <= 2 * KEPT_CHANGES:
        return
    rows = connection.execute("SELECT count(*) FROM examples").fetchone()[0]
    kept = max(KEPT_CHANGES, rows // KEPT_SHARE)
    if last - pruned > 2 * kept:
        _drop(connection, last - kept)


def _drop(connection: sqlite3.Connection, upto: int) -> None:
    connection.execute(
        f"INSERT OR REPLACE INTO meta SELECT '{LOST_PREFIX}' || namespace, max(seq) {DROPPABLE}"
        " GROUP BY namespace",
        [upto],
    )
    connection.execute(f"DELETE {DROPPABLE}", [upto])
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('pruned', ?)", [upto])
