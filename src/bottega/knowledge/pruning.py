"""The change log kept short: it loses what it says of rows that are gone.

What a row that is there was stored by stays, so that change 0 is always a good place to begin. Who
has read up to an earlier change than `pruned` may miss a deletion and must begin anew.
"""

from __future__ import annotations

import sqlite3

KEPT = 10_000
# An index file may be behind by a tenth of its rows, and should still be of use.
KEPT_SHARE = 5
LOOKED_EVERY = 1000
PRUNED = "SELECT coalesce((SELECT CAST(value AS INTEGER) FROM meta WHERE name = 'pruned'), 0)"


def prune(connection: sqlite3.Connection, added: int) -> None:
    """Within the transaction that has added so many rows. It reads the whole log, so it waits
    until the log has grown by a fifth of the rows."""
    last, pruned = connection.execute(f"SELECT max(seq), ({PRUNED}) FROM changes").fetchone()
    # Each row that came may have driven out another.
    if last % LOOKED_EVERY >= 2 * added or last - pruned <= 2 * KEPT:
        return
    rows = connection.execute("SELECT count(*) FROM examples").fetchone()[0]
    kept = max(KEPT, rows // KEPT_SHARE)
    if last - pruned > 2 * kept:
        connection.execute(
            "DELETE FROM changes WHERE seq <= ?"
            " AND NOT EXISTS (SELECT 1 FROM examples WHERE examples.key = changes.key)",
            [last - kept],
        )
        connection.execute("INSERT OR REPLACE INTO meta VALUES ('pruned', ?)", [last - kept])
