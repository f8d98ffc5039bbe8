"""Daily sums of the ledger's entries, which reports read instead of every entry.

Triggers update the sums in the transaction that writes or deletes an entry.
"""

from __future__ import annotations

import sqlite3

DAY = 86_400
KEYS = ("day", "namespace", "route", "how", "shots")
SUMS = (
    *("requests", "prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd", "priced"),
    *("seconds", "similarity", "compared", "net_usd", "net_usd_squared"),
)
# A refused request is the client's error, a failed one is not. `net_usd` excludes the cost of
# dismissed tiers.
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
# Sums since a moment: whole days come from the sums, the partial first day from its entries.
# Parameters (`since_values`): the first whole day, the moment, and the start of that day.
SINCE = (
    f"(SELECT {COLUMNS} FROM rollups WHERE day >= ?"
    f" UNION ALL SELECT {VALUES.format('')} FROM entries WHERE time >= ? AND time < ?)"
)


def since_values(moment: float) -> tuple[float, float, float]:
    """Return the parameters of `SINCE`."""
    day = -(-moment // DAY)
    return day, moment, day * DAY


def add_rollups(connection: sqlite3.Connection) -> None:
    """Create the sums and their triggers, and fill them from the existing entries."""
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
        # Subtraction leaves rounding errors in the sums, so a row is deleted with its last request.
        last = "DELETE FROM rollups WHERE requests = 0;" if event == "DELETE" else ""
        connection.execute(
            f"CREATE TRIGGER entries_{event.lower()}_rollup AFTER {event} ON entries BEGIN"
            f" INSERT INTO rollups VALUES ({VALUES.format(row)})"
            f" ON CONFLICT ({keys}) DO UPDATE SET {changed}; {last} END"
        )
    # For namespaces with few answers the bootstrap reads single costs.
    connection.execute(
        "CREATE INDEX entries_by_route ON entries (route, namespace, time)"
        " WHERE state IN ('answered', 'shadow')"
    )
