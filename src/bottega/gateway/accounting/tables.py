"""Accounts and ledger in PostgreSQL, shared by several gateways (decision 19)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from secrets import token_hex
from typing import Any, TypeVar

from bottega._util.event_loops import BACKGROUND_LOOP
from bottega._util.postgres import PostgresPool
from bottega.gateway.accounting.database import (
    PRUNE_BATCH,
    AccountMonth,
    LedgerBatch,
    Row,
    Value,
    entry_row,
    shadow_row,
    text_of,
)
from bottega.gateway.accounting.migrations import ENTRY_COLUMNS, GATEWAY_TABLES, SHADOW_COLUMNS

T = TypeVar("T")
POOL_SIZE = 3
ANSWER_SECONDS = 5.0


class BlockingPool:
    """Pool of connections to the gateway's tables for blocking callers."""

    def __init__(
        self, url: str, answer_seconds: float | None = ANSWER_SECONDS, *, migrates: bool = True
    ) -> None:
        self.pool = PostgresPool(
            url,
            GATEWAY_TABLES,
            size=POOL_SIZE,
            answer_seconds=answer_seconds,
            resets=False,
            migrates=migrates,
        )
        self.name = self.pool.name

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return BACKGROUND_LOOP.run(work)

    def fetch(self, statement: str, *values: object) -> list[Row]:
        return [tuple(row) for row in self.run(self.pool.fetch(statement, *values))]

    def execute(self, statement: str, *values: object) -> None:
        self.run(self.pool.execute(statement, *values))

    def transaction(self, statements: Sequence[tuple[str, Sequence[object]]]) -> list[Row]:
        """Run statements in one transaction and return the rows of the last one. A single statement
        needs no further round trips."""

        async def work() -> list[Row]:
            rows: list[Row] = []
            opened = self.pool.connection if len(statements) == 1 else self.pool.transaction
            async with opened() as connection:
                for statement, values in statements:
                    rows = await connection.fetch(statement, *values)
            return [tuple(row) for row in rows]

        return self.run(work())

    def close(self) -> None:
        self.run(self.pool.close())


class AccountTable:
    """Accounts and their namespaces in PostgreSQL."""

    def __init__(self, url: str) -> None:
        self._pool = BlockingPool(url)
        self.name = self._pool.name
        self._stamp: object = None

    def insert(self, columns: Sequence[str], values: Sequence[object]) -> None:
        marks = ", ".join(f"${number}" for number in range(1, len(values) + 1))
        self._pool.execute(
            f"INSERT INTO gateway_accounts ({', '.join(columns)}) VALUES ({marks})", *values
        )

    def revoke(self, id: str, moment: float) -> None:
        self._pool.execute(
            "UPDATE gateway_accounts SET revoked = coalesce(revoked, $2) WHERE id = $1", id, moment
        )

    def update(self, id: str, columns: Sequence[str], values: Sequence[object]) -> None:
        changes = ", ".join(f"{name} = ${number}" for number, name in enumerate(columns, 2))
        self._pool.execute(
            f"UPDATE gateway_accounts SET {changes}, changes = changes + 1 WHERE id = $1",
            id,
            *values,
        )

    def claim(self, id: str, namespace: str, limit: int) -> bool:
        # Lock the account's row first: concurrent claims must see each other's insertions.
        rows = self._pool.transaction(
            [
                ("SELECT 1 FROM gateway_accounts WHERE id = $1 FOR UPDATE", (id,)),
                (
                    "INSERT INTO gateway_namespaces SELECT $1, $2 WHERE"
                    " (SELECT count(*) FROM gateway_namespaces WHERE account = $1) < $3"
                    " ON CONFLICT DO NOTHING",
                    (id, namespace, limit),
                ),
                (
                    "SELECT 1 FROM gateway_namespaces WHERE account = $1 AND namespace = $2",
                    (id, namespace),
                ),
            ]
        )
        return bool(rows)

    def read_if_changed(self, columns: Sequence[str], read: Callable[..., T]) -> list[T] | None:
        """Return `read` of each row, oldest account first; None if nothing has changed since the
        last call."""
        stamp = self._pool.fetch(
            "SELECT count(*), count(revoked), coalesce(sum(revoked), 0), sum(changes)"
            " FROM gateway_accounts"
        )
        if stamp == self._stamp:
            return None
        rows = self._pool.fetch(
            f"SELECT {', '.join(columns)} FROM gateway_accounts ORDER BY created, id"
        )
        found = [read(*row) for row in rows]
        self._stamp = stamp
        return found

    def close(self) -> None:
        self._pool.close()


class EntryTables:
    """Tables of the ledger in PostgreSQL. Each row has an id: a batch whose outcome is unknown,
    such as after a lost connection, is written again without duplicates."""

    # Replies wait for the commit; entries that arrive meanwhile form the next batch.
    flush_seconds = 0.0

    def __init__(self, url: str) -> None:
        self._pool = BlockingPool(url)
        # It may connect after a newer version has migrated the tables.
        self._reports = BlockingPool(url, None, migrates=False)
        self.name = self._pool.name
        self._owner, self._numbers = token_hex(8), count()

    def new_id(self) -> str:
        return f"{self._owner}-{next(self._numbers)}"

    def write(self, batch: LedgerBatch) -> None:
        """Write the batch in one transaction."""
        self._pool.run(self.write_in(self._pool.pool, batch))

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
        statements = list(_other_rows(batch))
        rows = ((entry_row(one), one.id) for one in batch.entries)
        entries = [(*row[:ID_COLUMN], id, *row[ID_COLUMN:]) for row, id in rows]
        columns = [*zip(*entries, strict=True)] or [()] * len(ENTRY_COLUMNS)
        # A single statement is its own transaction and needs no further round trips.
        opened = pool.transaction if statements else pool.connection
        async with opened() as connection:
            for statement, values in statements:
                await connection.execute(statement, *values)
            rows = await connection.fetch(WRITE, *columns, month, list(accounts))
        return _by_month(rows)

    def read(self, sql: str, *values: Value) -> list[Row]:
        """Run a query that is written for SQLite."""
        return self._pool.fetch(_translated(sql), *values)

    def execute(self, sql: str, *values: Value) -> None:
        """Run one statement that writes and is written for SQLite."""
        self._pool.execute(_translated(sql), *values)

    def read_report(self, sql: str, *values: Value) -> list[Row]:
        return self._reports.fetch(_translated(sql), *values)

    def spent_since(
        self, month: str, accounts: Collection[str] | None = None
    ) -> dict[AccountMonth, float]:
        """Return the spending in US dollars by month and account, from this month on."""
        rows = self._pool.fetch(
            "SELECT month, account, usd FROM gateway_spending"
            " WHERE month >= $1 AND ($2::text[] IS NULL OR account = ANY($2))",
            month,
            None if accounts is None else list(accounts),
        )
        return _by_month(rows)

    def prune(self, before: float) -> int:
        """Delete up to `PRUNE_BATCH` older rows of each table. Return their number."""
        deleted = 0
        for table in ("gateway_entries", "gateway_shadows", "gateway_feedback"):
            rows = self._pool.transaction(
                [
                    (
                        f"DELETE FROM {table} WHERE id IN (SELECT id FROM {table} WHERE time < $1"
                        f" ORDER BY time LIMIT {PRUNE_BATCH} FOR UPDATE SKIP LOCKED) RETURNING 1",
                        (before,),
                    )
                ]
            )
            deleted += len(rows)
        return deleted

    def delete_notes(self, prefix: str, before: float) -> int:
        """Delete notes whose name has this prefix and whose value starts with an earlier time than
        `before`. Return their number."""
        rows = self._pool.transaction(
            [
                (
                    "DELETE FROM gateway_notes WHERE CASE WHEN starts_with(name, $1)"
                    " THEN split_part(value, ' ', 1)::double precision < $2 END RETURNING 1",
                    (prefix, before),
                )
            ]
        )
        return len(rows)

    def shadows_after(
        self, namespace: str, cursor: tuple[int, int], limit: int, retrieve: str
    ) -> list[tuple[int, int, float, float, float]]:
        """Return up to `limit` samples of a retrieval method after a cursor: transaction, row
        number, similarity and both scores. The order is the same for all readers: a transaction is
        read once all earlier ones have ended, because row numbers are not in commit order."""
        return [
            tuple(row)
            for row in self._pool.fetch(
                "SELECT transaction, number, similarity, with_score, without_score"
                " FROM gateway_shadows WHERE namespace = $1 AND (transaction, number) > ($2, $3)"
                " AND transaction < pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
                " AND retrieve = $4 ORDER BY transaction, number LIMIT $5",
                namespace,
                *cursor,
                retrieve,
                limit,
            )
        ]

    def claim_cold_start(self, namespace: str, held: int, limit: int) -> bool:
        """Count one query of the cold start. Return False if none is left."""
        rows = self._pool.transaction(
            [
                (
                    "INSERT INTO gateway_cold_starts VALUES ($1, $2) ON CONFLICT DO NOTHING",
                    (namespace, held),
                ),
                (
                    "UPDATE gateway_cold_starts SET used = used + 1"
                    " WHERE namespace = $1 AND used < $2 RETURNING used",
                    (namespace, limit),
                ),
            ]
        )
        return bool(rows)

    def close(self) -> None:
        self._pool.close()
        self._reports.close()


def _insert(table: str, columns: dict[str, str], more: str) -> str:
    """Return an insertion of many rows in one statement, with one array per column."""
    arrays = ", ".join(f"${n}::{kind}[]" for n, kind in enumerate(columns.values(), 1))
    return f"INSERT INTO {table} ({', '.join(columns)}) SELECT * FROM unnest({arrays}) {more}"


def _other_rows(batch: LedgerBatch) -> Iterator[tuple[str, Sequence[object]]]:
    """Yield the statements that write everything but the entries."""
    if batch.notes:
        notes = sorted((text_of(name), text_of(value)) for name, value in batch.notes.items())
        yield NOTES, [*zip(*notes, strict=True)]
    if batch.lost:
        yield LOST, (str(batch.lost),)
    if batch.shadows:
        shadows = [(*shadow_row(one), one.id) for one in batch.shadows]
        yield SHADOWS, [*zip(*shadows, strict=True)]


def _by_month(rows: Iterable[Row]) -> dict[AccountMonth, float]:
    return {(month, account): usd for month, account, usd in rows}


ID_COLUMN = [*ENTRY_COLUMNS].index("id")  # only PostgreSQL has it
PARAMETERS = ", ".join(f"${n}" for n in range(1, len(ENTRY_COLUMNS) + 3))
WRITE = f"SELECT * FROM gateway_write({PARAMETERS})"
SHADOWS = _insert("gateway_shadows", SHADOW_COLUMNS, "ON CONFLICT (id) DO NOTHING")
NOTES = _insert(
    "gateway_notes",
    {"name": "text", "value": "text"},
    "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
)
LOST = (
    "INSERT INTO gateway_notes AS old VALUES ('lost', $1) ON CONFLICT (name)"
    " DO UPDATE SET value = (old.value::bigint + excluded.value::bigint)::text"
)
TABLE = re.compile(r"\b(FROM|JOIN|INTO) (entries|rollups|shadows|notes|feedback|responses)\b")
PERIOD = re.compile(r"CAST\(time / (\d+) AS INTEGER\)")
MARK = re.compile(r"\?")


@lru_cache(64)
def _translated(sql: str) -> str:
    """Return the PostgreSQL form of a report's query: table names, parameters and days."""
    numbers = count(1)
    sql = PERIOD.sub(r"floor(time / \1)", sql)
    sql = sql.replace(
        "json_each(?) AS few CROSS JOIN entries",
        "jsonb_array_elements_text(CAST(? AS jsonb)) AS few (value) CROSS JOIN gateway_entries",
    )
    sql = TABLE.sub(r"\1 gateway_\2", sql)
    return MARK.sub(lambda _: f"${next(numbers)}", sql)
