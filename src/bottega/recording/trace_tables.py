"""Tables of traces in an SQLite file or in PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from bottega._util.postgres import PostgresKind, PostgresPool
from bottega._util.postgres_database import PostgresDatabase
from bottega._util.sqlite import FileKind

BUSY_SECONDS = ANSWER_SECONDS = 10.0
Statement = tuple[str, Sequence[object]]
TRACE_STORE = FileKind(
    "trace store",
    application_id=0x42747472,  # "Bttr"
    migrations=(
        """
        CREATE TABLE traces (
            id TEXT PRIMARY KEY,
            time REAL NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            completion_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            seconds REAL NOT NULL,
            cost_usd REAL,
            body TEXT NOT NULL
        ) WITHOUT ROWID;
        CREATE INDEX traces_by_time ON traces (time);
        CREATE TABLE trace_texts (
            id TEXT PRIMARY KEY,
            time REAL NOT NULL,
            namespace TEXT NOT NULL,
            tier TEXT NOT NULL,
            text TEXT NOT NULL
        ) WITHOUT ROWID;
        CREATE INDEX trace_texts_by_time ON trace_texts (time);
        """,
    ),
)
TRACE_TABLES = PostgresKind(
    "trace store",
    (
        """
        CREATE TABLE traces (
            id text COLLATE "C" PRIMARY KEY,
            time double precision NOT NULL,
            prompt_tokens bigint NOT NULL,
            completion_tokens bigint NOT NULL,
            cached_tokens bigint NOT NULL,
            seconds double precision NOT NULL,
            cost_usd double precision,
            body text NOT NULL
        );
        CREATE INDEX traces_by_time ON traces (time, id);
        CREATE TABLE trace_texts (
            id text COLLATE "C" PRIMARY KEY,
            time double precision NOT NULL,
            namespace text COLLATE "C" NOT NULL,
            tier text NOT NULL,
            text text NOT NULL
        );
        CREATE INDEX trace_texts_by_time ON trace_texts (time, id);
        CREATE TABLE trace_images (
            sha256 text PRIMARY KEY,
            time double precision NOT NULL,
            data bytea NOT NULL
        );
        CREATE INDEX trace_images_by_time ON trace_images (time);
        """,
    ),
)


class TraceTables(Protocol):
    """Tables in a database. Statements have parameters such as "?1" and one meaning in both
    dialects. All methods raise `StoreError`."""

    def execute(self, statement: str, *values: object) -> Sequence[Sequence[Any]]:
        """Run one statement in its own transaction and return its rows."""
        ...

    def write(self, statements: Sequence[Statement]) -> None:
        """Run statements in one transaction. They may run twice, after a lost connection."""
        ...

    def close(self) -> None: ...


class FileTables:
    """Tables in an SQLite file."""

    def __init__(self, path: Path) -> None:
        self._name = str(path)
        self._lock = threading.Lock()
        with TRACE_STORE.translated(self._name):
            self._connection = TRACE_STORE.open(path, busy_seconds=BUSY_SECONDS)

    def execute(self, statement: str, *values: object) -> Sequence[Sequence[Any]]:
        with self._lock, TRACE_STORE.translated(self._name):
            return self._connection.execute(statement, values).fetchall()

    def write(self, statements: Sequence[Statement]) -> None:
        with self._lock, TRACE_STORE.translated(self._name):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                for statement, values in statements:
                    self._connection.execute(statement, values)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        with self._lock:
            self._connection.close()


class DatabaseTables(PostgresDatabase):
    """Tables in PostgreSQL."""

    def __init__(self, url: str) -> None:
        super().__init__(url, TRACE_TABLES, answer_seconds=ANSWER_SECONDS)

    def execute(self, statement: str, *values: object) -> Sequence[Sequence[Any]]:
        # Retried after a lost connection, which is safe: an insertion sets the same row again.
        return self.read(statement.replace("?", "$"), *values)

    def write(self, statements: Sequence[Statement]) -> None:
        async def work(pool: PostgresPool) -> None:
            async with pool.transaction() as connection:
                for statement, values in statements:
                    await connection.execute(statement.replace("?", "$"), *values)

        self.run(work)
