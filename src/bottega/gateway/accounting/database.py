"""Tables of gateway.db: accounts, ledger entries, their daily sums, spending and notes."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from bottega._util.sqlite import FileKind
from bottega.errors import StoreError
from bottega.image import path_text

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


FILE = "gateway.db"
BUSY_SECONDS = 3.0
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
    ),
)


def connect(path: Path, *, create: bool) -> sqlite3.Connection:
    """Open a connection that any thread may use. Commits survive a crash of the process. A crash
    of the machine may lose the last commits but does not damage the file. Raises `StoreError`."""
    name = path_text(path)
    if not create and not path.exists():
        raise StoreError(
            f"gateway database {name} does not exist",
            hint="check --data; bottega serve --data FOLDER and bottega keys add NAME create it",
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
PRUNE_BATCH = 5_000
FLUSH_SECONDS = 0.3
INSERT_BATCH = 250


@dataclass(slots=True)  # not frozen: a frozen instance takes three times as long to create
class Entry:
    """Ledger entry of one request. `cost_usd` is None if the price is
    unknown; it includes `dismissed_usd`, the cost of tiers whose answers were escalated.
    `similarity` is that of the best example found, shown or not, None without a retrieval or a
    candidate. `variant` is that of an experiment, such as "more-shots:b"."""

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


@dataclass(frozen=True, slots=True)
class Shadow:
    """Shadow sample: the agreement of an answer with the master's, from 0 to 1, with and without
    demonstrations."""

    time: float
    request_id: str
    namespace: str
    similarity: float
    with_score: float
    without_score: float
    id: str = ""  # as of an entry


@dataclass(frozen=True)
class Batch:
    """Rows for one transaction. `spent` is the cost of the entries in US dollars, by month and
    account."""

    entries: Sequence[Entry] = ()
    shadows: Sequence[Shadow] = ()
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

    def write(self, batch: Batch) -> None:
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
        waits for the event loop to give it back."""
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
    )


def shadow_row(shadow: Shadow) -> tuple[Value, ...]:
    return (
        shadow.time,
        text_of(shadow.request_id),
        text_of(shadow.namespace),
        _finite(shadow.similarity) or 0.0,
        _finite(shadow.with_score) or 0.0,
        _finite(shadow.without_score) or 0.0,
    )


def text_of(text: str) -> str:
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def _count(number: int) -> int:
    return min(max(number, 0), MAX_COUNT)


def _finite(number: float | None) -> float | None:
    return float(number) if number is not None and math.isfinite(number) else None
