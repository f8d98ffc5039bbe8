"""Traces of a run's answers, read like those of a trace store."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

import orjson

from bottega._util.sql_tables import FileTables, SqlRow
from bottega._util.sqlite import application_id
from bottega.evaluation.runs.run_store import BUSY_SECONDS, RUN_FILE
from bottega.image import Image
from bottega.recording import TraceStore
from bottega.recording.stored_traces import searchable_text

# Temporary tables: the file of the run does not change.
TABLES = """
CREATE TEMP TABLE run_traces (
    id TEXT PRIMARY KEY, time REAL, prompt_tokens INTEGER, completion_tokens INTEGER,
    cached_tokens INTEGER, seconds REAL, cost_usd REAL, method TEXT, shots INTEGER, place INTEGER
);
CREATE TEMP TABLE trace_texts (
    id TEXT PRIMARY KEY, time REAL, namespace TEXT, tier TEXT, text TEXT
);
CREATE TEMP VIEW traces AS
    SELECT run_traces.*, answers.trace AS body FROM run_traces
    JOIN answers USING (method, shots, place)
"""


def is_run_file(file: Path) -> bool:
    return application_id(file) == RUN_FILE.application_id


def open_run_traces(file: Path) -> TraceStore:
    """Open the traces in the file of a run for reading. Raises `StoreError`."""
    tables = RunTables(file)
    return TraceStore(file, tables, RunThumbnails(tables))


class RunTables(FileTables):
    """Tables of the traces in the file of a run, with the answers stored before it was opened. They
    are temporary tables of one connection, which reports use as well."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, RUN_FILE, busy_seconds=BUSY_SECONDS)
        try:
            with RUN_FILE.translated(self.name):
                self._fill(self._connection)
        except BaseException:
            self.close()
            raise

    def report(self, statement: str, *values: object) -> list[SqlRow]:
        return self.execute(statement, *values)

    def _fill(self, connection: sqlite3.Connection) -> None:
        for statement in TABLES.split(";"):
            connection.execute(statement)
        with RUN_FILE.reading(self.name):
            for row, texts in _rows(connection):
                connection.execute("REPLACE INTO run_traces VALUES (?,?,?,?,?,?,?,?,?,?)", row)
                connection.execute("REPLACE INTO trace_texts VALUES (?,?,?,?,?)", texts)
        connection.execute("PRAGMA query_only = ON")


class RunThumbnails:
    """Thumbnails of a run by the sha256 of their images. They cannot be changed."""

    def __init__(self, tables: RunTables) -> None:
        self._tables = tables

    def put(self, times: Mapping[Image, float]) -> None: ...

    def get(self, sha256: str) -> Image | None:
        rows = self._tables.execute("SELECT data FROM thumbnails WHERE sha256 = ?", sha256)
        return Image.from_bytes(bytes(rows[0][0])) if rows else None

    def prune(self, before: float, max_bytes: int | None) -> None: ...


def _rows(
    connection: sqlite3.Connection,
) -> Iterator[tuple[tuple[object, ...], tuple[object, ...]]]:
    """Yield the rows of both tables, with one trace in memory at a time."""
    for body, *key in connection.execute(
        "SELECT trace, method, shots, place FROM answers WHERE trace IS NOT NULL"
    ):
        trace = orjson.loads(body)
        id, time, usage = trace["id"], trace["time"], trace["usage"]
        tokens = (usage["prompt_tokens"], usage["completion_tokens"], usage["cached_tokens"])
        text = searchable_text(trace["question"], trace["answer"]["text"], trace.get("files", ()))
        yield (
            (id, time, *tokens, trace["seconds"], trace["cost_usd"], *key),
            (id, time, "", trace["tier"], text),
        )
