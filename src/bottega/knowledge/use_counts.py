"""Use counters of examples, and pruning of the change log."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection, Mapping
from threading import Lock

from bottega._util.sqlite import may_only_be_read
from bottega.errors import SettingError
from bottega.knowledge.records import UsageRecord, is_text

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
        # One unwritable entry would block all the others.
        """Count one use of each example and share the savings among them."""
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
        """Write the counts. A read-only file discards them; it evicts nothing either."""
        with self._lock:
            uses, self._uses = self._uses, {}
        if not uses:
            return
        try:
            self._write(uses)
        except BaseException as error:
            if may_only_be_read(error):
                return
            self._put_back(uses)
            raise

    def _put_back(self, uses: dict[str, UsageRecord]) -> None:
        with self._lock:
            for id, use in uses.items():
                later = self._uses.get(id, UsageRecord(0, use.last_used, 0.0))
                self._uses[id] = UsageRecord(
                    use.count + later.count, later.last_used, use.saved_usd + later.saved_usd
                )


def is_amount(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= MAX_USD


KEPT_CHANGES = 10_000
# An index file that lacks a tenth of its rows must remain usable.
KEPT_SHARE = 5
CHECK_EVERY = 1000
# Last change examined by pruning. `meta` also has the last change lost, by namespace.
HORIZON = "SELECT coalesce((SELECT CAST(value AS INTEGER) FROM meta WHERE name = 'pruned'), 0)"
LOST_PREFIX = "pruned of "
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
