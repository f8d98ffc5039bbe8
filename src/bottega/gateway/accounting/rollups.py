"""Daily sums of the ledger's entries: a report reads them instead of every entry.

Triggers update them in the transaction that writes or deletes an entry.
"""

from __future__ import annotations

import sqlite3

DAY = 86_400
KEYS = ("day", "namespace", "route", "how", "shots")
SUMS = (
    *("requests", "prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd", "priced"),
    *("seconds", "similarity", "compared", "net_usd", "net_usd_squared"),
)
# A refused request is the client's error, a failed one is not. `net_usd` leaves out what dismissed
# tiers cost.
VALUES = (
    "CAST({0}time / 86400 AS INTEGER), {0}namespace, {0}route,"
    " CASE WHEN {0}state = 'failed' AND {0}status BETWEEN 400 AND 498"
    " THEN 'refused' ELSE {0}state END,"
    " CASE WHEN {0}state = 'answered' THEN {0}shots ELSE 0 END,"
    " 1, {0}prompt_tokens, {0}completion_tokens, {0}cached_tokens, coalesce({0}cost_usd, 0.0),"
    " {0}cost_usd IS NOT NULL, {0}seconds, coalesce({0}similarity, 0.0),"
    " {0}similarity IS NOT NULL, coalesce({0}cost_usd - {0}dismissed_usd, 0.0),"
    " coalesce(({0}cost_usd - {0}dismissed_usd) * ({0}cost_usd - {0}dismissed_usd), 0.0)"
)
COLUMNS = ", ".join((*KEYS, *SUMS))
# What came since a moment: whole days from the sums, the day that the moment cuts from its entries.
# Values: the first whole day, the moment, and the beginning of that day.
SINCE = (
    f"(SELECT {COLUMNS} FROM rollups WHERE day >= ?"
    f" UNION ALL SELECT {VALUES.format('')} FROM entries WHERE time >= ? AND time < ?)"
)


def since_values(moment: float) -> tuple[float, float, float]:
    day = -(-moment // DAY)
    return day, moment, day * DAY


def add_rollups(connection: sqlite3.Connection) -> None:
    """Create the sums and their triggers, and fill them from the entries that are there."""
    sums = ", ".join(f"{name} NOT NULL" for name in SUMS)
    keys = ", ".join(KEYS)
    connection.execute(
        "CREATE TABLE rollups (day INTEGER NOT NULL, namespace TEXT NOT NULL, route TEXT NOT NULL,"
        f" how TEXT NOT NULL, shots INTEGER NOT NULL, {sums}, PRIMARY KEY ({keys})) WITHOUT ROWID"
    )
    totals = ", ".join(f"sum({name})" for name in SUMS)
    connection.execute(
        f"INSERT INTO rollups WITH each ({COLUMNS}) AS (SELECT {VALUES.format('')} FROM entries)"
        f" SELECT {keys}, {totals} FROM each GROUP BY {keys}"
    )
    for event, row, sign in (("INSERT", "NEW.", "+"), ("DELETE", "OLD.", "-")):
        changed = ", ".join(f"{name} = {name} {sign} excluded.{name}" for name in SUMS)
        # Rounding leaves a trace of sums that are taken away, so a row goes with its last request.
        last = "DELETE FROM rollups WHERE requests = 0;" if event == "DELETE" else ""
        connection.execute(
            f"CREATE TRIGGER entries_{event.lower()}_rollup AFTER {event} ON entries BEGIN"
            f" INSERT INTO rollups VALUES ({VALUES.format(row)})"
            f" ON CONFLICT ({keys}) DO UPDATE SET {changed}; {last} END"
        )
    # The bootstrap needs single costs where there are few.
    connection.execute(
        "CREATE INDEX entries_by_route ON entries (route, namespace, time)"
        " WHERE state IN ('answered', 'shadow')"
    )
