"""The change log kept short: it loses what it says of rows that are gone.

What a row that is there was stored by stays, and the last change of each namespace, so that who
begins at 0 learns everything and ends up to date. Who has read less than was lost of a namespace
may miss a deletion and must begin anew.
"""

from __future__ import annotations

import sqlite3

KEPT = 10_000
# An index file may be behind by a tenth of its rows, and should still be of use.
KEPT_SHARE = 5
LOOKED_EVERY = 1000
# Up to where the log has been looked through, and the last change that each namespace has lost.
HORIZON = "SELECT coalesce((SELECT CAST(value AS INTEGER) FROM meta WHERE name = 'pruned'), 0)"
LOST = "pruned of "
DROPPED = (
    "FROM changes WHERE seq <= ?"
    " AND NOT EXISTS (SELECT 1 FROM examples WHERE examples.key = changes.key)"
    " AND seq NOT IN (SELECT max(seq) FROM changes GROUP BY namespace)"
)


def prune(connection: sqlite3.Connection, added: int) -> None:
    """Within the transaction that has added so many rows. It reads the whole log, so it waits
    until the log has grown by a fifth of the rows."""
    last, pruned = connection.execute(f"SELECT max(seq), ({HORIZON}) FROM changes").fetchone()
    # Each row that came may have driven out another.
    if last % LOOKED_EVERY >= 2 * added or last - pruned <= 2 * KEPT:
        return
    rows = connection.execute("SELECT count(*) FROM examples").fetchone()[0]
    kept = max(KEPT, rows // KEPT_SHARE)
    if last - pruned > 2 * kept:
        _drop(connection, last - kept)


def _drop(connection: sqlite3.Connection, upto: int) -> None:
    connection.execute(
        f"INSERT OR REPLACE INTO meta SELECT '{LOST}' || namespace, max(seq) {DROPPED}"
        " GROUP BY namespace",
        [upto],
    )
    connection.execute(f"DELETE {DROPPED}", [upto])
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('pruned', ?)", [upto])
