"""Stores of the ledger: gateway.db, and PostgreSQL, which several gateways share (decision 19)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain, count
from pathlib import Path
from secrets import token_hex

import orjson

from bottega._util.postgres import PostgresPool, is_postgres_url
from bottega._util.sql_tables import (
    POSTGRES,
    DatabaseTables,
    FileTables,
    SqlRow,
    SqlTables,
    Statement,
    TableSchema,
    placeholders,
    postgres_statement,
    storable_text,
)
from bottega.errors import StoreError
from bottega.gateway.accounting.ledger_schema import (
    CURRENT_RULES,
    ENTRIES,
    FEEDBACK,
    GATEWAY_DB,
    GATEWAY_TABLES,
    SHADOWS,
    Entry,
    ShadowSample,
)
from bottega.image import path_text

AccountMonth = tuple[str, str]

BUSY_SECONDS = 3.0
ANSWER_SECONDS = 5.0
PRUNE_BATCH = 5_000
INSERT_BATCH = 256
SET_NOTE = "ON CONFLICT (name) DO UPDATE SET value = excluded.value"
ADD_LOST = (
    "INSERT INTO gateway_notes AS old VALUES ('lost', ?1) ON CONFLICT (name) DO UPDATE"
    " SET value = CAST(CAST(old.value AS BIGINT) + CAST(excluded.value AS BIGINT) AS TEXT)"
)
ADD_SPENDING = (
    "INSERT INTO gateway_spending VALUES (?1, ?2, ?3)"
    " ON CONFLICT (month, account) DO UPDATE SET usd = usd + excluded.usd"
)
# The order is the same for all readers: a transaction is read once all earlier ones have ended,
# because row numbers are not in commit order.
SHADOWS_AFTER = (
    "SELECT transaction, number, similarity, with_score, without_score FROM gateway_shadows"
    " WHERE namespace = ?1 AND (transaction, number) > (?2, ?3)"
    " AND transaction < pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
    " AND retrieve = ?4 AND with_score IS NOT NULL AND without_score IS NOT NULL"
    f" AND {CURRENT_RULES} ORDER BY transaction, number LIMIT ?5"
)
# Insertions of many rows in one statement, with one array per column.
WRITE = postgres_statement(f"SELECT * FROM gateway_write({placeholders(len(ENTRIES.columns) + 2)})")


def open_tables(location: str | Path, *, create: bool = True) -> FileTables | DatabaseTables:
    """Open the tables of the gateway in gateway.db, or in PostgreSQL if `location` is a URL. A
    commit to the file survives a crash of the process; a crash of the machine may lose the last
    commits but does not damage the file. With `create=False` the file must exist; tables in
    PostgreSQL are always created. Raises `StoreError`."""
    if is_postgres_url(location):
        return DatabaseTables(str(location), GATEWAY_TABLES, answer_seconds=ANSWER_SECONDS)
    path = Path(location)
    name = path_text(path)
    if not create and not path.exists():
        raise StoreError(
            f"gateway database {name} does not exist",
            hint="check --data; bottega serve --data FOLDER and bottega keys add NAME create it;"
            " bottega serve --demo keeps its ledger only with --data FOLDER",
        )
    if not path.parent.is_dir():
        raise StoreError(f"folder {path_text(path.parent)} does not exist", hint="create it first")
    return FileTables(path, GATEWAY_DB, busy_seconds=BUSY_SECONDS)


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

    def note_rows(self) -> list[tuple[str, str]]:
        return sorted(
            (storable_text(name), storable_text(value)) for name, value in self.notes.items()
        )


class LedgerStore:
    """Stored ledger. Methods block and raise `StoreError`. Callers must not run them concurrently,
    except `tables.report`, `shadows_after` and `claim_cold_start`. `flush_seconds` is the time to
    collect a batch."""

    flush_seconds: float

    def __init__(self, tables: SqlTables) -> None:
        self.tables = tables

    def new_id(self) -> str:
        """Return the id of a new row, "" if rows need none."""
        return ""

    def write(self, batch: LedgerBatch) -> None:
        """Write the batch in one transaction."""
        raise NotImplementedError

    def spent_since(
        self, month: str, accounts: Collection[str] | None = None
    ) -> dict[AccountMonth, float]:
        """Return the spending in US dollars by month and account, from this month on, of all
        accounts or of these."""
        named = None if accounts is None else [storable_text(account) for account in accounts]
        rows = self.tables.execute(
            "SELECT month, account, usd FROM gateway_spending WHERE month >= ?1 AND"
            " (CAST(?2 AS TEXT) IS NULL"
            f" OR account IN ({self.tables.dialect.json_texts.format('?2')}))",
            month,
            None if named is None else orjson.dumps(named).decode(),
        )
        with GATEWAY_DB.reading(self.tables.name):
            return {(str(month), str(account)): float(usd) for month, account, usd in rows}

    def prune(self, before: float) -> int:
        """Delete up to `PRUNE_BATCH` older rows of each table. Return their number; 0 means that
        none are left. Monthly spending is kept."""
        row_id, end = self.tables.dialect.row_id, self.tables.dialect.skip_locked
        return sum(
            len(
                self.tables.execute(
                    f"DELETE FROM {table.name} WHERE {row_id} IN (SELECT {row_id}"
                    f" FROM {table.name} WHERE time < ?1 ORDER BY time LIMIT {PRUNE_BATCH}{end})"
                    " RETURNING 1",
                    before,
                )
            )
            for table in (ENTRIES, SHADOWS, FEEDBACK)
        )

    def delete_notes(self, prefix: str, before: float) -> int:
        """Delete notes whose name has this prefix and whose value starts with an earlier time than
        `before`. Return their number."""
        time = self.tables.dialect.leading_number.format("value")
        rows = self.tables.execute(
            f"DELETE FROM gateway_notes WHERE CASE WHEN substr(name, 1, ?1) = ?2 THEN {time} < ?3"
            " END RETURNING 1",
            len(prefix),
            prefix,
            before,
        )
        return len(rows)

    def close(self) -> None:
        self.tables.close()


class FileLedger(LedgerStore):
    """Ledger in gateway.db."""

    flush_seconds = 0.3

    def write(self, batch: LedgerBatch) -> None:
        statements = [*_inserts(ENTRIES, batch.entries), *_inserts(SHADOWS, batch.shadows)]
        note = f"INSERT INTO gateway_notes VALUES (?1, ?2) {SET_NOTE}"
        statements += [(note, row) for row in batch.note_rows()]
        statements += [
            (ADD_SPENDING, (month, storable_text(account), usd))
            for (month, account), usd in batch.spent.items()
        ]
        if batch.lost:
            statements.append((ADD_LOST, (str(batch.lost),)))
        self.tables.write(statements)


def _inserts(table: TableSchema, rows: Sequence[object]) -> Iterator[Statement]:
    """Yield statements that insert many rows each: between two statements the thread releases the
    GIL and waits for the event loop to give it back. The number of rows per statement is a power of
    two, because sqlite3 caches the last 128 different statements, 0.3 MB each."""
    start, marks = 0, f"({', '.join('?' * len(table.columns))})"
    while start < len(rows):
        most = 1 << (len(rows) - start).bit_length() - 1
        some = rows[start : start + min(INSERT_BATCH, most)]
        start += len(some)
        values = list(chain.from_iterable(map(table.row, some)))
        yield f"INSERT INTO {table.name} VALUES {', '.join([marks] * len(some))}", values


class SharedLedger(LedgerStore):
    """Ledger in PostgreSQL. Each row has an id: a batch whose outcome is unknown, such as after a
    lost connection, is written again without duplicates."""

    # Replies wait for the commit; entries that arrive meanwhile form the next batch.
    flush_seconds = 0.0

    def __init__(self, tables: DatabaseTables) -> None:
        super().__init__(tables)
        self._database = tables.database
        self._owner, self._numbers = token_hex(8), count()

    def new_id(self) -> str:
        return f"{self._owner}-{next(self._numbers)}"

    def write(self, batch: LedgerBatch) -> None:
        self._database.run(lambda pool: self.write_in(pool, batch))

    async def write_in(
        self,
        pool: PostgresPool,
        batch: LedgerBatch,
        month: str = "",
        accounts: Collection[str] = (),
    ) -> dict[AccountMonth, float]:
        """Write the batch in one transaction, with a pool of the running event loop. Return the
        resulting spending of `accounts`, like `spent_since`. Entries are written last, because
        their triggers lock sums that other gateways need as well."""
        statements: list[Statement] = []
        if batch.notes:
            statements.append((NOTES, _arrays(batch.note_rows())))
        if batch.lost:
            statements.append((postgres_statement(ADD_LOST), (str(batch.lost),)))
        if batch.shadows:
            statements.append((INSERT_SHADOWS, _arrays(map(SHADOWS.row, batch.shadows))))
        entries = _arrays(map(ENTRIES.row, batch.entries)) or [()] * len(ENTRIES.columns)
        # A single statement is its own transaction and needs no further round trips.
        opened = pool.transaction if statements else pool.connection
        async with opened() as connection:
            for statement, values in statements:
                await connection.execute(statement, *values)
            rows = await connection.fetch(WRITE, *entries, month, list(accounts))
        return {(month, account): usd for month, account, usd in rows}

    def shadows_after(
        self, namespace: str, cursor: tuple[int, int], limit: int, retrieve: str
    ) -> list[SqlRow]:
        """Return up to `limit` decided samples of a retrieval method after a cursor: transaction,
        row number, similarity and both scores."""
        return self.tables.execute(SHADOWS_AFTER, namespace, *cursor, retrieve, limit)

    def claim_cold_start(self, namespace: str, held: int, limit: int) -> bool:
        """Count one query of the cold start. Return False if none is left."""
        rows = self.tables.write(
            [
                (
                    "INSERT INTO gateway_cold_starts VALUES (?1, ?2) ON CONFLICT DO NOTHING",
                    (namespace, held),
                ),
                (
                    "UPDATE gateway_cold_starts SET used = used + 1"
                    " WHERE namespace = ?1 AND used < ?2 RETURNING used",
                    (namespace, limit),
                ),
            ]
        )
        return bool(rows)


def _arrays(rows: Iterable[SqlRow]) -> list[tuple[object, ...]]:
    """Return an array for each column."""
    return [*zip(*rows, strict=True)]


def _unnest(types: Iterable[type]) -> str:
    arrays = ", ".join(f"${n}::{POSTGRES.types[kind]}[]" for n, kind in enumerate(types, 1))
    return f"SELECT * FROM unnest({arrays})"


INSERT_SHADOWS = (
    f"INSERT INTO gateway_shadows ({SHADOWS.column_list})"
    f" {_unnest(column.type for column in SHADOWS.columns)} ON CONFLICT (id) DO NOTHING"
)
NOTES = f"INSERT INTO gateway_notes {_unnest((str, str))} {SET_NOTE}"


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
