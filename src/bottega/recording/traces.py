"""Store of traces in an SQLite file or in PostgreSQL."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bottega._util.postgres import PostgresKind, postgres_url
from bottega._util.sql_tables import (
    POSTGRES,
    SQLITE,
    DatabaseTables,
    FileTables,
    SqlDialect,
    SqlTables,
    Statement,
    placeholders,
)
from bottega._util.sqlite import FileKind
from bottega.errors import NotFoundError
from bottega.image import Image, path_text
from bottega.recording.stored_traces import (
    StoredTrace,
    from_json,
    json_text,
    searchable_text,
    stored_trace,
)
from bottega.recording.trace_images import ImageFolder, ImageTable, TraceImages
from bottega.types import Trace

StoredTraces = list[StoredTrace]  # inside the class, `list` is its method
BUSY_SECONDS = ANSWER_SECONDS = 10.0
INSERT = (
    "INSERT INTO traces VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8) ON CONFLICT (id) DO UPDATE SET"
    " time = excluded.time, prompt_tokens = excluded.prompt_tokens,"
    " completion_tokens = excluded.completion_tokens, cached_tokens = excluded.cached_tokens,"
    " seconds = excluded.seconds, cost_usd = excluded.cost_usd, body = excluded.body"
)
INSERT_TEXT = (
    "INSERT INTO trace_texts (id, time, namespace, tier, text) VALUES (?1, ?2, ?3, ?4, ?5)"
    " ON CONFLICT (id) DO UPDATE SET time = excluded.time, namespace = excluded.namespace,"
    " tier = excluded.tier, text = excluded.text"
)
NEIGHBOURS = (
    "SELECT (SELECT max(id) FROM trace_texts WHERE id < ?1),"
    " (SELECT min(id) FROM trace_texts WHERE id > ?1)"
)
SUMS = (
    "SELECT count(*), coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0),"
    " coalesce(sum(cached_tokens), 0), coalesce(sum(seconds), 0), coalesce(sum(cost_usd), 0),"
    " count(*) - count(cost_usd) FROM traces"
)


def _tables(dialect: SqlDialect) -> str:
    text, real = dialect.types[str] + dialect.collation, dialect.types[float]
    integer, end = dialect.types[int], dialect.without_rowid
    return f"""
CREATE TABLE traces (
    id {text} PRIMARY KEY,
    time {real} NOT NULL,
    prompt_tokens {integer} NOT NULL,
    completion_tokens {integer} NOT NULL,
    cached_tokens {integer} NOT NULL,
    seconds {real} NOT NULL,
    cost_usd {real},
    body {text} NOT NULL
){end};
CREATE INDEX traces_by_time ON traces (time, id);
CREATE TABLE trace_texts (
    id {text} PRIMARY KEY,
    time {real} NOT NULL,
    namespace {text} NOT NULL,
    tier {text} NOT NULL,
    text {text} NOT NULL
){end};
CREATE INDEX trace_texts_by_time ON trace_texts (time, id);
"""


TRACE_IMAGES = """
CREATE TABLE trace_images (
    sha256 text PRIMARY KEY, time double precision NOT NULL, data bytea NOT NULL
);
CREATE INDEX trace_images_by_time ON trace_images (time);
"""
WAY_OUT = "set --traces or BOTTEGA_TRACES to another file or URL"
TRACE_STORE = FileKind("trace store", (_tables(SQLITE),), 0x42747472, way_out=WAY_OUT)  # "Bttr"
TRACE_TABLES = PostgresKind("trace store", (_tables(POSTGRES) + TRACE_IMAGES,), way_out=WAY_OUT)


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
    """Recorder that stores every trace in a file or a PostgreSQL database, which threads and
    processes may share.

    A process crash loses no trace. A file has a write-ahead log with `synchronous=NORMAL`: a
    machine crash may lose its last traces but never damages it. Traces have texts and sha256s of
    images, no image bytes unless `write` is called with `images`; lone surrogates become U+FFFD. A
    trace with an existing id replaces the old one. Images of a file are in a folder beside it. All
    methods but the call block.
    """

    def __init__(self, path: Path | str, tables: SqlTables, images: TraceImages) -> None:
        self.path = path  # or the address of the database, without user and password
        self._tables = tables
        self._images = images

    @classmethod
    def open(cls, path: str | Path) -> TraceStore:
        """Open or create a file, or the tables of a `postgresql://` URL."""
        if (url := postgres_url(path)) is not None:
            tables = DatabaseTables(url, TRACE_TABLES, answer_seconds=ANSWER_SECONDS)
            store = cls(tables.name, tables, ImageTable(tables))
            store.summary()  # connects
            return store
        path = Path(path)
        file = FileTables(path, TRACE_STORE, busy_seconds=BUSY_SECONDS)
        return cls(path, file, ImageFolder(path.with_name(f"{path.name}-images")))

    async def __call__(self, trace: Trace, /) -> None:
        await asyncio.to_thread(self.write, [trace])

    def write(self, traces: Iterable[Trace], *, namespace: str = "", images: bool = False) -> None:
        """Store traces in one transaction, with the images of their queries if `images`."""
        traces = list(traces)
        if images:
            self._images.put({image: one.time for one in traces for image in one.query.images})
        self._tables.write([row for trace in traces for row in _rows(trace, namespace)])

    def list(self, limit: int = 20) -> StoredTraces:
        """Return the newest traces, the newest first."""
        return self._read("ORDER BY time DESC, id DESC LIMIT ?1", limit)

    def get(self, id: str) -> StoredTrace:
        """Return the trace with this id or unique id prefix. Raises `NotFoundError`."""
        found = self._read("WHERE id >= ?1 AND id < ?2 ORDER BY id LIMIT 2", id, id + "\U0010ffff")
        if not found:
            raise NotFoundError(
                f"no trace {id!r} in {self.path}",
                hint=f"run bottega log --traces {self.path} for the ids",
            )
        if len(found) > 1 and found[0].id != id:
            raise NotFoundError(
                f"trace id {id!r} matches several traces", hint="pass more characters of the id"
            )
        return found[0]

    def search(
        self,
        text: str = "",
        *,
        namespace: str | None = None,
        tier: str | None = None,
        before: float | None = None,
        since: float | None = None,
        limit: int = 20,
    ) -> StoredTraces:
        """Return the newest traces that match all filters, the newest first.

        `text` is part of the question, the answer or a file name, in any case. `before` and `since`
        are unix seconds. The tier `rcts` includes `rcts, 3 shots, digits` of an evaluation.
        """
        conditions = {
            "text LIKE {} ESCAPE '~'": f"%{_escaped(text)}%" if text else None,
            "namespace = {}": namespace,
            "(tier = {0} OR substr(tier, 1, length({0}) + 1) = {0} || ',')": tier,
            "t.time < {}": before,
            "t.time >= {}": since,
        }
        given = {sql: value for sql, value in conditions.items() if value is not None}
        where = [sql.format(f"?{number}") for number, sql in enumerate(given, 1)]
        rows = self._tables.execute(
            "SELECT body FROM trace_texts AS t JOIN traces ON traces.id = t.id"
            f"{' WHERE ' if where else ''}{' AND '.join(where)}"
            f" ORDER BY t.time DESC, t.id DESC LIMIT ?{len(where) + 1}",
            *given.values(),
            limit,
        )
        with TRACE_STORE.reading(str(self.path)):
            return [from_json(body) for (body,) in rows]

    def unique_length(self, ids: Sequence[str]) -> int:
        """Return the shortest length at which prefixes of these ids differ from all other ids."""
        length = 1
        for id in ids:
            [neighbours] = self._tables.execute(NEIGHBOURS, id)
            while any(other and other[:length] == id[:length] for other in neighbours):
                length += 1
        return length

    def find(self, ids: Sequence[str]) -> dict[str, StoredTrace]:
        """Return the traces with these ids, without those that are not stored."""
        if not ids:
            return {}
        marks = placeholders(len(ids))
        return {one.id: one for one in self._read(f"WHERE id IN ({marks})", *ids)}

    def namespace(self, id: str) -> str:
        """Return the namespace of a trace. Raises `NotFoundError`."""
        rows = self._tables.execute("SELECT namespace FROM trace_texts WHERE id = ?1", id)
        if not rows:
            raise NotFoundError(
                f"no trace {id!r} in {self.path}",
                hint=f"run bottega log --traces {self.path} for the ids",
            )
        return str(rows[0][0])

    def image(self, sha256: str) -> Image | None:
        """Return the image with this sha256, None if it is not stored."""
        return self._images.get(sha256)

    def prune(self, before: float, *, image_bytes: int | None = None) -> int:
        """Delete traces older than `before` in unix seconds, images last stored before it, and then
        the oldest images beyond `image_bytes` in total. Return the number of deleted traces."""
        rows = self._tables.execute("DELETE FROM traces WHERE time < ?1 RETURNING 1", before)
        self._tables.execute("DELETE FROM trace_texts WHERE time < ?1", before)
        self._images.prune(before, image_bytes)
        return len(rows)

    def summary(self) -> TraceSummary:
        """Return the sums over all stored traces."""
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

    def _read(self, where: str, *values: object) -> StoredTraces:
        rows = self._tables.execute(f"SELECT body FROM traces {where}", *values)
        with TRACE_STORE.reading(str(self.path)):
            return [from_json(body) for (body,) in rows]


def _rows(trace: Trace, namespace: str) -> Iterator[Statement]:
    """Yield the statements that store a trace."""
    kept = stored_trace(trace)
    usage = kept.usage
    tokens = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
    cost = trace.cost_usd
    if cost is not None and not math.isfinite(cost):  # a NaN would make all sums NaN
        cost = None
    yield INSERT, (trace.id, trace.time, *tokens, trace.seconds, cost, json_text(kept))
    text = searchable_text(kept.question, kept.answer.text, kept.files)
    yield INSERT_TEXT, (trace.id, trace.time, namespace, trace.tier, text)


def _escaped(text: str) -> str:
    """Return the text as a pattern of LIKE."""
    text = path_text(text).casefold().replace("\0", "")
    return text.replace("~", "~~").replace("%", "~%").replace("_", "~_")
