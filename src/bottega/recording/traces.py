"""Store of traces in an SQLite file or in PostgreSQL."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bottega._util.postgres import PostgresKind, postgres_url
from bottega._util.postgres_database import PostgresDatabase
from bottega._util.sqlite import FileKind
from bottega.errors import NotFoundError
from bottega.recording.stored_traces import StoredTrace, from_json, json_text, stored_trace
from bottega.types import Trace

StoredTraces = list[StoredTrace]  # inside the class, `list` is its method
BUSY_SECONDS = ANSWER_SECONDS = 10.0
# Statements for both databases; in PostgreSQL, "?" becomes "$".
INSERT = (
    "INSERT INTO traces VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8) ON CONFLICT (id) DO UPDATE SET"
    " time = excluded.time, prompt_tokens = excluded.prompt_tokens,"
    " completion_tokens = excluded.completion_tokens, cached_tokens = excluded.cached_tokens,"
    " seconds = excluded.seconds, cost_usd = excluded.cost_usd, body = excluded.body"
)
SUMS = (
    "SELECT count(*), coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0),"
    " coalesce(sum(cached_tokens), 0), coalesce(sum(seconds), 0), coalesce(sum(cost_usd), 0),"
    " count(*) - count(cost_usd) FROM traces"
)
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
        """,
    ),
)


@dataclass(frozen=True)
class TraceSummary:
    """Sums over traces. `cost_usd` excludes the `unpriced` ones, whose price is unknown."""

    count: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seconds: float
    cost_usd: float
    unpriced: int


class _Tables(Protocol):
    def execute(self, statement: str, *values: object) -> Sequence[Sequence[Any]]:
        """Run one statement in its own transaction and return its rows."""
        ...

    def close(self) -> None: ...


class _FileTables:
    def __init__(self, path: Path) -> None:
        self._name = str(path)
        self._lock = threading.Lock()
        with TRACE_STORE.translated(self._name):
            self._connection = TRACE_STORE.open(path, busy_seconds=BUSY_SECONDS)

    def execute(self, statement: str, *values: object) -> Sequence[Sequence[Any]]:
        with self._lock, TRACE_STORE.translated(self._name):
            return self._connection.execute(statement, values).fetchall()

    def close(self) -> None:
        with self._lock:
            self._connection.close()


class _DatabaseTables(PostgresDatabase):
    def __init__(self, url: str) -> None:
        super().__init__(url, TRACE_TABLES, answer_seconds=ANSWER_SECONDS)

    def execute(self, statement: str, *values: object) -> Sequence[Sequence[Any]]:
        # Retried after a lost connection, which is safe: an insertion sets the same row again.
        return self.read(statement.replace("?", "$"), *values)


class TraceStore:
    """Recorder that stores every trace in a file or a PostgreSQL database, which threads and
    processes may share.

    A process crash loses no trace. A file has a write-ahead log with `synchronous=NORMAL`: a
    machine crash may lose its last traces but never damages it. Traces have texts and sha256s of
    images, no image bytes; lone surrogates become U+FFFD. A trace with an existing id replaces the
    old one. Read methods block.
    """

    def __init__(self, path: Path | str, tables: _Tables) -> None:
        self.path = path  # or the address of the database, without user and password
        self._tables = tables

    @classmethod
    def open(cls, path: str | Path) -> TraceStore:
        """Open or create a file, or the tables of a `postgresql://` URL."""
        if (url := postgres_url(path)) is not None:
            tables = _DatabaseTables(url)
            store = cls(tables.name, tables)
            store.summary()  # connects
            return store
        return cls(Path(path), _FileTables(Path(path)))

    async def __call__(self, trace: Trace, /) -> None:
        await asyncio.to_thread(self._write, trace)

    def list(self, limit: int = 20) -> StoredTraces:
        """Return the newest traces, the newest first."""
        return self._read("ORDER BY time DESC, id DESC LIMIT ?1", limit)

    def get(self, id: str) -> StoredTrace:
        """Return the trace with this id or unique id prefix. Raises `NotFoundError`."""
        found = self._read("WHERE id >= ?1 AND id < ?2 ORDER BY id LIMIT 2", id, id + "\U0010ffff")
        if not found:
            raise NotFoundError(f"no trace {id!r} in {self.path}", hint="`bottega log` lists them")
        if len(found) > 1 and found[0].id != id:
            raise NotFoundError(
                f"trace id {id!r} matches several traces", hint="pass more characters of the id"
            )
        return found[0]

    def summary(self) -> TraceSummary:
        [row] = self._tables.execute(SUMS)
        count, prompt, completion, cached, seconds, usd, unpriced = row
        return TraceSummary(
            count, int(prompt), int(completion), int(cached), float(seconds), float(usd), unpriced
        )

    def check_writable(self) -> None:
        """Raise `StoreError` if a trace cannot be recorded."""
        # Requires write access, unlike BEGIN IMMEDIATE.
        self._tables.execute("DELETE FROM traces WHERE false")

    def close(self) -> None:
        self._tables.close()

    def _write(self, trace: Trace) -> None:
        kept = stored_trace(trace)
        usage, body = kept.usage, json_text(kept)
        tokens = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        cost = trace.cost_usd
        if cost is not None and not math.isfinite(cost):  # a NaN would make all sums NaN
            cost = None
        row = (trace.id, trace.time, *tokens, trace.seconds, cost, body)
        self._tables.execute(INSERT, *row)

    def _read(self, where: str, *values: object) -> StoredTraces:
        rows = self._tables.execute(f"SELECT body FROM traces {where}", *values)
        with TRACE_STORE.reading(str(self.path)):
            return [from_json(body) for (body,) in rows]
