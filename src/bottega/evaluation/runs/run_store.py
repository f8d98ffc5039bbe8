"""Durable store of a run's answers in a folder, also read as a store of traces."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from bottega._util.batch_writer import BatchWriter
from bottega._util.durable_files import is_locked, lock_file, make_out_folder
from bottega._util.identity import image_hashes
from bottega._util.sql_tables import FileTables, SqlRow
from bottega._util.sqlite import FileKind, application_id, transaction
from bottega.errors import BottegaError, SettingError, StoreError
from bottega.evaluation.metrics.metric import Metric, labels_of
from bottega.evaluation.outcomes import Method, MethodKey, Outcome, ScoredAnswer
from bottega.evaluation.runs.runner import AnswerStore
from bottega.image import Image, path_text
from bottega.recording import TraceStore, json_text, stored_trace
from bottega.recording.stored_traces import searchable_text
from bottega.types import Answer, Example, Trace

DATA, BENCHMARK, SEARCH = "data", "benchmark", "search"
ORDERS = "item_orders"  # the setting that only runs of streams have
# Notes: values that may change.
PLANNED = "planned"  # the methods of the last command
SHOWN = "shown"  # the descriptions of `describe_methods`
CORPUS = "corpus"  # the digest of the master's answers
NOTES = (PLANNED, SHOWN, CORPUS)
# Settings that follow from others, named only if nothing else differs.
DERIVED = (DATA, ORDERS, "metrics", "model", "cold", "embedder", "embed")
OPTIONS = {
    BENCHMARK: "the benchmark",
    "tiers": "the models",
    "model": "the model",
    "embedder": "--embed",
    "rates": "--master-rate",
    "starts": "--start",
    "compressor_digest": "the content of --compressor",
    "store_digest": "the content of --store",
}
Write = Callable[[sqlite3.Connection], None]

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
FILE = "run.db"
BUSY_SECONDS = 10.0
PROBE_SECONDS = 0.05  # `is_running` holds the lock for less
RUN_FILE = FileKind(
    "run",
    application_id=0x42747267,  # "Btrg"
    way_out="set another --out folder",
    migrations=(
        """
        CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
        CREATE TABLE items (
            place INTEGER PRIMARY KEY,
            question TEXT NOT NULL,
            files TEXT NOT NULL,
            images TEXT NOT NULL,
            choices TEXT NOT NULL,
            truth TEXT NOT NULL,
            tags TEXT NOT NULL
        );
        CREATE TABLE answers (
            method TEXT NOT NULL,
            shots INTEGER NOT NULL,
            place INTEGER NOT NULL,
            answer TEXT NOT NULL,
            scores TEXT NOT NULL,
            calls INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            completion_tokens INTEGER NOT NULL,
            cost_usd REAL,
            seconds REAL NOT NULL,
            tier TEXT NOT NULL,
            trace TEXT,
            PRIMARY KEY (method, shots, place)
        ) WITHOUT ROWID;
        CREATE TABLE failures (
            method TEXT NOT NULL,
            shots INTEGER NOT NULL,
            place INTEGER NOT NULL,
            time REAL NOT NULL,
            error TEXT NOT NULL,
            PRIMARY KEY (method, shots, place)
        ) WITHOUT ROWID;
        CREATE TABLE thumbnails (sha256 TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
        """,
    ),
)


class Committer:
    """Writer with its own connection, which commits concurrent writes in one transaction. An error
    of one of them is raised by all."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._connection: sqlite3.Connection | None = None
        self._writer = BatchWriter(self._commit, name="bottega-run")
        self.write = self._writer.write

    def close(self) -> None:
        self._writer.close()
        if self._connection is not None:
            self._connection.close()

    def _commit(self, writes: list[Write]) -> list[None]:
        if self._connection is None:
            self._connection = self._connect()
        with transaction(self._connection):
            for write in writes:
                write(self._connection)
        return [None] * len(writes)


@dataclass(frozen=True)
class Failure:
    """Failed item of a method with its error message."""

    method: str
    shots: int
    index: int
    error: str


class RunStore(AnswerStore):
    """Durable store of a run in a folder: a killed process loses no kept answer.

    An answer replaces the failure of its item. A lock file keeps other processes out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock(path.with_suffix(".lock"))
        try:
            with RUN_FILE.translated(str(path)):
                self._connection = RUN_FILE.open(path, busy_seconds=BUSY_SECONDS)
        except BaseException:
            self._lock.close()
            raise
        self._committer = Committer(lambda: RUN_FILE.open(path, busy_seconds=BUSY_SECONDS))

    @classmethod
    def open(
        cls, folder: Path, settings: Mapping[str, object], items: tuple[Example, ...]
    ) -> RunStore:
        """Open or create the run in a folder.

        The answers depend on the `settings`. Raises `SettingError` if the folder holds a run with
        different ones.
        """
        make_out_folder(folder)
        store = cls(folder / FILE)
        try:
            store._begin(settings, items)
        except BaseException:
            store.close()
            raise
        return store

    def answered(self, key: MethodKey, items: tuple[Example, ...]) -> dict[int, ScoredAnswer]:
        rows = self._read(
            "SELECT place, answer, scores, tier, calls, prompt_tokens, completion_tokens, cost_usd"
            " FROM answers WHERE method = ? AND shots = ? ORDER BY place",
            *key,
        )
        with RUN_FILE.reading(str(self.path)):
            return {
                index: ScoredAnswer(
                    index, items[index], _answer(answer), tuple(orjson.loads(scores)), *rest
                )
                for index, answer, scores, *rest in rows
            }

    def score_again(self, metrics: Sequence[Metric], items: tuple[Example, ...]) -> int:
        """Score all answers with the current metrics; return the number of changed answers.

        A metric's code or the annotators' answers may have changed since.
        """
        rows = self._read("SELECT method, shots, place, answer, scores FROM answers")
        changed = []
        for method, shots, index, answer, before in rows:
            with RUN_FILE.reading(str(self.path)):
                item, stored_answer = items[index], _answer(answer)
            scores = json_text([metric.score(item, stored_answer) for metric in metrics])
            if scores != before:
                changed.append((scores, method, shots, index))
        with self._transaction() as connection:
            connection.executemany(
                "UPDATE answers SET scores = ? WHERE (method, shots, place) = (?, ?, ?)", changed
            )
        return len(changed)

    def count(self) -> int:
        """Return the number of stored answers of all methods."""
        ((count,),) = self._read("SELECT count(*) FROM answers")
        return int(count)

    def spent(self) -> tuple[float, float]:
        """Return the cost of all answers and that of the most expensive one, in US dollars."""
        ((usd, highest),) = self._read("SELECT total(cost_usd), max(cost_usd) FROM answers")
        return usd, highest or 0.0

    def failures(self) -> list[Failure]:
        rows = self._read(
            "SELECT method, shots, place, error FROM failures ORDER BY method, shots, place"
        )
        return [Failure(*row) for row in rows]

    async def keep(self, method: Method, scored: ScoredAnswer, outcome: Outcome) -> None:
        key = (*method.key, scored.index)

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM failures WHERE (method, shots, place) = (?, ?, ?)", key)
            connection.execute(
                f"REPLACE INTO answers VALUES ({', '.join('?' * 12)})",
                (*key, *_row(scored, outcome.trace)),
            )

        await self._write(write)

    async def fail(self, method: Method, index: int, error: BottegaError) -> None:
        row = (*method.key, index, time.time(), path_text(str(error)))

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("REPLACE INTO failures VALUES (?, ?, ?, ?, ?)", row)

        await self._write(write)

    def close(self) -> None:
        self._committer.close()
        self._connection.close()
        self._lock.close()

    async def forget(self, key: MethodKey) -> None:
        def write(connection: sqlite3.Connection) -> None:
            for table in ("answers", "failures"):
                connection.execute(f"DELETE FROM {table} WHERE (method, shots) = (?, ?)", key)

        await self._write(write)

    def plan(self, keys: Sequence[MethodKey]) -> None:
        """Store the methods that the command evaluates, from which readers tell its progress."""
        self.note(PLANNED, keys)

    def describe(self, shown: Mapping[str, Mapping[str, str]]) -> None:
        """Store the descriptions of the methods (`describe_methods`).

        Raises `SettingError` for a method whose stored answers have another prompt. An equal
        record of the run does not imply an equal prompt: defaults may differ between versions.
        """
        stored = self._read("SELECT value FROM settings WHERE name = ?", SHOWN)
        before: dict[str, dict[str, str]] = orjson.loads(stored[0][0]) if stored else {}
        answered = [name for (name,) in self._read("SELECT DISTINCT method FROM answers")]
        for name in (name for name in shown if name in answered):
            past, now = before.get(name, {}), shown[name]
            # The fingerprint of the data covers the rationales.
            keys = [key for key in (*now, *past) if key != "rationales"]
            differing = [key for key in keys if past.get(key) != now.get(key)]
            if differing:
                key = differing[0]
                raise SettingError(
                    f"{self.path.parent} holds answers of {name} with"
                    f" {key.replace('_', ' ')} {past.get(key, 'unset')},"
                    f" got {now.get(key, 'unset')}",
                    hint=f"set another --out folder, or remove {name} from --methods",
                )
        self.note(SHOWN, {**before, **shown})

    def note(self, name: str, value: object) -> str | None:
        """Store a value of the run and return the text of the one before. It is no setting: it may
        change."""
        before = self._read("SELECT value FROM settings WHERE name = ?", name)
        with self._transaction() as connection:
            connection.execute("REPLACE INTO settings VALUES (?, ?)", (name, json_text(value)))
        return str(orjson.loads(before[0][0])) if before else None

    async def _write(self, write: Write) -> None:
        with RUN_FILE.translated(str(self.path)):
            await self._committer.write(write)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with RUN_FILE.translated(str(self.path)), transaction(self._connection) as connection:
            yield connection

    def _read(self, statement: str, *values: object) -> list[Any]:
        with RUN_FILE.translated(str(self.path)):
            return self._connection.execute(statement, values).fetchall()

    def _begin(self, settings: Mapping[str, object], items: tuple[Example, ...]) -> None:
        wanted = {name: json_text(value) for name, value in settings.items()}
        found = dict(self._read("SELECT name, value FROM settings"))
        names = (*wanted, *(name for name in found if name not in (*wanted, *NOTES)))
        differing = [name for name in names if found and found.get(name) != wanted.get(name)]
        if differing:
            raise SettingError(
                f"{self.path.parent} holds {_difference(found, wanted, differing)}",
                hint="set another --out folder, or repeat the original command",
            )
        if found:
            return
        with self._transaction() as connection:
            connection.executemany("INSERT INTO settings VALUES (?, ?)", wanted.items())
            rows = (_item(index, item) for index, item in enumerate(items))
            connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?)", rows)


def _difference(
    found: Mapping[str, str], wanted: Mapping[str, str], differing: Sequence[str]
) -> str:
    """Return the first difference of two runs in terms of the command's options."""
    if (ORDERS in found) != (ORDERS in wanted):
        return f"a run of bottega {'stream' if ORDERS in found else 'eval'}"
    name = next((name for name in differing if name not in DERIVED), differing[0])
    if name in (DATA, ORDERS):
        return "a run over other data"
    past, new = (orjson.loads(settings.get(name, "null")) for settings in (found, wanted))
    if name == SEARCH:  # a table of options
        past, new = past or {}, new or {}
        name = next(one for one in (*new, *past) if past.get(one) != new.get(one))
        past, new = past.get(name), new.get(name)
    option = OPTIONS.get(name, f"--{name.replace('_', '-')}")
    return f"a run with {option} {_option_text(past)}, got {_option_text(new)}"


def _option_text(plain: object) -> str:
    if plain is None or plain == []:
        return "unset"
    if isinstance(plain, bool):
        return "on" if plain else "off"
    text = ",".join(map(str, plain)) if isinstance(plain, list) else str(plain)
    return text if text.isprintable() else repr(text)


def is_running(folder: Path) -> bool:
    """Return whether a process writes to the run in a folder."""
    return is_locked((folder / FILE).with_suffix(".lock"))


def _lock(path: Path) -> IO[bytes]:
    """Lock a run until the file is closed or its process ends: two runs would pay twice."""
    try:
        lock = lock_file(path)
        if lock is None:
            time.sleep(PROBE_SECONDS)
            lock = lock_file(path)
    except OSError as error:
        raise StoreError(
            f"{path.parent} is not writable: {error.strerror}", hint="check its permissions"
        ) from error
    if lock is None:
        raise StoreError(
            f"another process uses the run in {path.parent}",
            hint="wait for it, or set another --out folder",
        )
    return lock


def _item(index: int, item: Example) -> tuple[object, ...]:
    query = item.query
    images = image_hashes(query)
    lists = (images, query.choices, labels_of(item), dict(item.tags))
    files = " ".join(path_text(image.source) for image in query.images if image.source)
    return (index, path_text(query.text), files, *map(json_text, lists))


def _row(scored: ScoredAnswer, trace: Trace | None) -> tuple[object, ...]:
    return (
        json_text(scored.answer),
        json_text(scored.scores),
        scored.calls,
        scored.prompt_tokens,
        scored.completion_tokens,
        scored.cost_usd,
        0.0 if trace is None else trace.seconds,
        "" if trace is None else path_text(trace.tier),
        None if trace is None else json_text(stored_trace(trace)),
    )


def _answer(text: str) -> Answer:
    """Parse a stored answer without its rationale, like the answers that a run holds in memory."""
    row: dict[str, Any] = orjson.loads(text)
    return Answer(**row | {"labels": tuple(row["labels"]), "rationale": None})


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
