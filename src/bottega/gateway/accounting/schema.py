"""Tables of gateway.db: accounts, ledger entries, their daily sums, spending, notes, feedback and
stored responses."""

from __future__ import annotations

import sqlite3

from bottega._util.sqlite import FileKind

DAY = 86_400
KEYS = ("day", "namespace", "tier", "state", "shots")
SUMS = (
    *("requests", "prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd", "priced"),
    *("seconds", "similarity", "compared", "net_usd", "net_usd_squared"),
)
# A rejected request is the client's error, a failed one is not. `net_usd` excludes the cost of
# dismissed tiers.
VALUES = (
    "CAST({0}time / 86400 AS INTEGER), {0}namespace, {0}tier,"
    " CASE WHEN {0}state = 'failed' AND {0}status BETWEEN 400 AND 498"
    " THEN 'rejected' ELSE {0}state END,"
    " CASE WHEN {0}state = 'answered' THEN {0}shots ELSE 0 END,"
    " 1, {0}prompt_tokens, {0}completion_tokens, {0}cached_tokens, coalesce({0}cost_usd, 0.0),"
    " CASE WHEN {0}cost_usd IS NULL THEN 0 ELSE 1 END, {0}seconds, coalesce({0}similarity, 0.0),"
    " CASE WHEN {0}similarity IS NULL THEN 0 ELSE 1 END,"
    " coalesce({0}cost_usd - {0}dismissed_usd, 0.0),"
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
    day = int(-(-moment // DAY))
    return day, moment, day * DAY


def add_rollups(connection: sqlite3.Connection) -> None:
    """Create the sums and their triggers, and fill them from the existing entries."""
    sums = ", ".join(f"{name} NOT NULL" for name in SUMS)
    keys = ", ".join(KEYS)
    connection.execute(
        "CREATE TABLE rollups (day INTEGER NOT NULL, namespace TEXT NOT NULL, tier TEXT NOT NULL,"
        f" state TEXT NOT NULL, shots INTEGER NOT NULL, {sums}, PRIMARY KEY ({keys})) WITHOUT ROWID"
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
        "CREATE INDEX entries_by_tier ON entries (tier, namespace, time)"
        " WHERE state IN ('answered', 'shadow')"
    )


def use_current_names(connection: sqlite3.Connection) -> None:
    """Rename columns and values of commit fd291dc, and compute the daily sums again."""
    for statement in (
        "DROP TRIGGER IF EXISTS entries_insert_rollup",
        "DROP TRIGGER IF EXISTS entries_delete_rollup",
        "DROP INDEX IF EXISTS entries_by_route",
        "DROP TABLE IF EXISTS rollups",
        "ALTER TABLE entries RENAME COLUMN route TO tier",
        "UPDATE entries SET state = 'passed_through' WHERE state = 'passed'",
        "ALTER TABLE accounts RENAME COLUMN may_store TO can_store",
        "ALTER TABLE spending DROP COLUMN dearest",
        "UPDATE notes SET name = 'replay:' || substr(name, 8) WHERE name LIKE 'repeat:%'",
    ):
        connection.execute(statement)
    add_rollups(connection)


GATEWAY_DB = FileKind(
    "gateway database",
    application_id=0x42746777,  # "Btgw"
    migrations=(
        """
        CREATE TABLE accounts (
            id TEXT PRIMARY KEY,
            name TEXT NOT NULL,
            namespace TEXT NOT NULL,
            admin INTEGER NOT NULL,
            may_store INTEGER NOT NULL,
            requests_per_minute INTEGER,
            usd_per_month REAL,
            created REAL NOT NULL,
            revoked REAL,
            secret BLOB NOT NULL
        ) WITHOUT ROWID;
        CREATE TABLE entries (
            time REAL NOT NULL,
            request_id TEXT NOT NULL,
            account TEXT NOT NULL,
            namespace TEXT NOT NULL,
            route TEXT NOT NULL,
            model TEXT NOT NULL,
            state TEXT NOT NULL,
            shots INTEGER NOT NULL,
            similarity REAL,
            prompt_tokens INTEGER NOT NULL,
            completion_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            cost_usd REAL,
            dismissed_usd REAL NOT NULL,
            seconds REAL NOT NULL,
            status INTEGER NOT NULL
        );
        CREATE INDEX entries_by_time ON entries (time);
        CREATE TABLE shadows (
            time REAL NOT NULL,
            request_id TEXT NOT NULL,
            namespace TEXT NOT NULL,
            similarity REAL NOT NULL,
            with_score REAL NOT NULL,
            without_score REAL NOT NULL
        );
        CREATE INDEX shadows_by_time ON shadows (time);
        CREATE TABLE spending (
            month TEXT NOT NULL,
            account TEXT NOT NULL,
            usd REAL NOT NULL,
            dearest REAL NOT NULL,
            PRIMARY KEY (month, account)
        ) WITHOUT ROWID;
        CREATE TABLE notes (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
        """,
        """
        ALTER TABLE accounts ADD COLUMN max_concurrent INTEGER;
        ALTER TABLE accounts ADD COLUMN tiers TEXT;
        ALTER TABLE accounts ADD COLUMN max_namespaces INTEGER;
        CREATE TABLE namespaces (
            account TEXT NOT NULL,
            namespace TEXT NOT NULL,
            PRIMARY KEY (account, namespace)
        ) WITHOUT ROWID;
        """,
        "-- The next step creates the daily sums.",
        use_current_names,
        """
        CREATE INDEX entries_by_request ON entries (request_id);
        CREATE TABLE feedback (
            time REAL NOT NULL,
            request_id TEXT NOT NULL,
            account TEXT NOT NULL,
            namespace TEXT NOT NULL,
            tier TEXT NOT NULL,
            rating REAL,
            correction TEXT,
            comment TEXT,
            example TEXT,
            PRIMARY KEY (request_id, account)
        );
        CREATE INDEX feedback_by_time ON feedback (time);
        """,
        """
        CREATE TABLE responses (
            id TEXT PRIMARY KEY,
            account TEXT NOT NULL,
            time REAL NOT NULL,
            size INTEGER NOT NULL,
            previous TEXT,
            input TEXT NOT NULL,
            response TEXT NOT NULL
        );
        CREATE INDEX responses_by_account ON responses (account, time);
        CREATE INDEX responses_by_time ON responses (time);
        """,
        """
        ALTER TABLE accounts ADD COLUMN expires REAL;
        ALTER TABLE accounts ADD COLUMN viewer INTEGER NOT NULL DEFAULT 0;
        ALTER TABLE accounts ADD COLUMN changes INTEGER NOT NULL DEFAULT 0;
        ALTER TABLE accounts ADD COLUMN previous_secret BLOB;
        ALTER TABLE accounts ADD COLUMN previous_until REAL;
        """,
        """
        ALTER TABLE entries ADD COLUMN variant TEXT NOT NULL DEFAULT '';
        CREATE INDEX entries_by_variant ON entries (variant, time) WHERE variant != '';
        """,
        "DROP INDEX entries_by_request",
        "ALTER TABLE entries ADD COLUMN reason TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE shadows ADD COLUMN retrieve TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE shadows ADD COLUMN sampled INTEGER NOT NULL DEFAULT 1",
    ),
)
