"""Store of traces in a SQLite file."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path

from bottega._util.sqlite import FileKind
from bottega.errors import NotFoundError
from bottega.recording.stored_trace import StoredTrace, from_json, stored_trace, to_json
from bottega.types import Trace

StoredTraces = list[StoredTrace]  # inside the class, `list` is its method
BUSY_SECONDS = 10.0
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


class TraceStore:
    """Recorder that stores every trace. Threads and processes may share the file.

    Write-ahead log with `synchronous=NORMAL`: a process crash loses no trace; a machine crash may
    lose the last ones but never damages the file. The file holds texts and sha256s of images, no
    image bytes; lone surrogates become U+FFFD. A trace with an existing id replaces the old one.
    Read methods block.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | Path) -> TraceStore:
        path = Path(path)
        with TRACE_STORE.translated(str(path)):
            return cls(path, TRACE_STORE.open(path, busy_seconds=BUSY_SECONDS))

    async def __call__(self, trace: Trace, /) -> None:
        await asyncio.to_thread(self._write, trace)

    def list(self, limit: int = 20) -> StoredTraces:
        """Return the newest traces, the newest first."""
        return self._read("ORDER BY time DESC, id DESC LIMIT ?", limit)

    def get(self, id: str) -> StoredTrace:
        """Return the trace with this id or unique id prefix. Raises `NotFoundError`."""
        found = self._read("WHERE id >= ? AND id < ? LIMIT 2", id, id + "\U0010ffff")
        if not found:
            raise NotFoundError(f"no trace {id!r} in {self.path}", hint="`bottega log` lists them")
        if len(found) > 1 and found[0].id != id:
            raise NotFoundError(
                f"trace id {id!r} matches several traces", hint="pass more characters of the id"
            )
        return found[0]

    def summary(self) -> TraceSummary:
        with self._lock, TRACE_STORE.translated(str(self.path)):
            row = self._connection.execute(
                """SELECT count(*), total(prompt_tokens), total(completion_tokens),
                total(cached_tokens), total(seconds), total(cost_usd), count(*) - count(cost_usd)
                FROM traces"""
            ).fetchone()
        count, prompt, completion, cached, seconds, cost, unpriced = row
        return TraceSummary(
            count, int(prompt), int(completion), int(cached), seconds, cost, unpriced
        )

    def check_writable(self) -> None:
        """Raise `StoreError` if a trace cannot be recorded."""
        with self._lock, TRACE_STORE.translated(str(self.path)):
            # Requires write access, unlike BEGIN IMMEDIATE.
            self._connection.execute("DELETE FROM traces WHERE false")

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _write(self, trace: Trace) -> None:
        kept = stored_trace(trace)
        usage, body = kept.usage, to_json(kept)
        tokens = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        row = (trace.id, trace.time, *tokens, trace.seconds, trace.cost_usd, body)
        with self._lock, TRACE_STORE.translated(str(self.path)):
            self._connection.execute("REPLACE INTO traces VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

    def _read(self, where: str, *values: object) -> StoredTraces:
        with self._lock, TRACE_STORE.translated(str(self.path)):
            rows = self._connection.execute(f"SELECT body FROM traces {where}", values).fetchall()
        with TRACE_STORE.reading(str(self.path)):
            return [from_json(body) for (body,) in rows]
