"""Stored runs as reports read them, and their progress."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from sys import intern
from typing import Any, Literal, NamedTuple

import orjson

from bottega.errors import NotFoundError, StoreError
from bottega.evaluation.methods.specifications import METHODS
from bottega.evaluation.outcomes import ScoredAnswer
from bottega.evaluation.runs.run_store import (
    BUSY_SECONDS,
    FILE,
    ORDERS,
    PLANNED,
    RUN_FILE,
    is_running,
)
from bottega.evaluation.streams.stream_plan import StreamConfig
from bottega.image import path_text
from bottega.types import Answer, Example, Query

# Name of a method and its number of demonstrations.
AnswerKey = tuple[str, int]

ProgressState = Literal["running", "finished", "incomplete"]
# Identity of a run's content: modification times in nanoseconds and sizes of its files.
FileState = tuple[tuple[int, int], ...]
COUNTS = "SELECT method, shots, count(*) FROM {} GROUP BY method, shots"


class Demonstration(NamedTuple):
    """Demonstration; images are SHA-256 hashes."""

    answer: str
    text: str
    images: tuple[str, ...]
    score: float


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """Answer with parts of its trace, whose id is "" if no model was called.

    `replies` are the raw samples, `shown` the demonstrations in their order.
    """

    scored: ScoredAnswer
    seconds: float
    trace: str
    replies: tuple[str, ...]
    shown: tuple[Demonstration, ...]


@dataclass(frozen=True)
class Item:
    """Item without pixels; `images` are SHA-256 hashes, `files` their names."""

    example: Example
    images: tuple[str, ...]
    files: str = ""


@dataclass(frozen=True)
class StoredRun:
    """Run read from its folder; `answers` and `failures` are indexed by item."""

    folder: Path
    settings: Mapping[str, Any]
    items: tuple[Item, ...]
    answers: Mapping[AnswerKey, Mapping[int, RecordedAnswer]]
    failures: Mapping[AnswerKey, Mapping[int, str]]
    thumbnails: Mapping[str, bytes]

    @property
    def methods(self) -> tuple[AnswerKey, ...]:
        """Return the methods in table order."""
        return in_table_order({*self.answers, *self.failures})


def read_run(folder: Path, *, thumbnails: bool = True, traces: bool = True) -> StoredRun:
    """Read a run without changing it, even while it is in progress. Without `traces`, which take
    most of the time, answers have no replies and demonstrations. Raises `StoreError`."""
    with opened_run(folder) as (connection, settings):
        items = tuple(_items(connection))
        images = connection.execute("SELECT sha256, data FROM thumbnails") if thumbnails else ()
        return StoredRun(
            folder,
            {name: value for name, value in settings.items() if name != PLANNED},
            items,
            _answers(connection, items, "trace" if traces else "NULL"),
            _failures(connection),
            dict(images),
        )


def thumbnail_names(folder: Path) -> frozenset[str]:
    """Return the SHA-256 hashes of the images with a stored thumbnail. Raises `StoreError`."""
    with opened_run(folder) as (connection, _):
        return frozenset(name for (name,) in connection.execute("SELECT sha256 FROM thumbnails"))


def read_thumbnail(folder: Path, sha256: str) -> bytes | None:
    """Return a stored thumbnail, None if there is none. Raises `StoreError`."""
    with opened_run(folder) as (connection, _):
        rows = connection.execute("SELECT data FROM thumbnails WHERE sha256 = ?", (sha256,))
        return next((bytes(data) for (data,) in rows), None)


@contextmanager
def opened_run(folder: Path) -> Iterator[tuple[sqlite3.Connection, dict[str, Any]]]:
    """Yield a snapshot of the run in a folder, and its settings. Raises `StoreError`."""
    path = folder / FILE
    name = path_text(path)
    if not path.is_file():
        raise NotFoundError(
            f"{path_text(folder)} holds no run",
            hint="pass a folder of --out of bottega eval or stream",
        )
    with (
        RUN_FILE.connected(path, create=False, busy_seconds=BUSY_SECONDS) as connection,
        _snapshot(connection, name),
        RUN_FILE.reading(name),
    ):
        settings = dict(connection.execute("SELECT name, value FROM settings"))
        if not settings.keys() - {PLANNED}:
            raise NotFoundError(f"{name} holds no run yet", hint="wait until the run has started")
        yield connection, {key: orjson.loads(value) for key, value in settings.items()}


def in_table_order(keys: Iterable[AnswerKey]) -> tuple[AnswerKey, ...]:
    return tuple(sorted(keys, key=_rank))


def _rank(key: AnswerKey) -> tuple[int, str, int]:
    method, shots = key
    return list(METHODS).index(method) if method in METHODS else len(METHODS), method, shots


@contextmanager
def _snapshot(connection: sqlite3.Connection, name: str) -> Iterator[None]:
    """Read all tables in one transaction."""
    connection.execute("PRAGMA query_only = ON")
    RUN_FILE.migrate(connection, name)
    connection.execute("BEGIN")
    yield
    connection.execute("ROLLBACK")


def _items(connection: sqlite3.Connection) -> Iterator[Item]:
    rows = connection.execute("SELECT * FROM items ORDER BY place")
    for index, question, files, images, choices, truth, tags in rows:
        labels = tuple(orjson.loads(truth))
        query = Query(question, choices=tuple(orjson.loads(choices)), id=str(index))
        several = None if len(labels) == 1 else labels
        example = Example(query, ", ".join(labels), several, tags=dict(orjson.loads(tags)))
        yield Item(example, tuple(orjson.loads(images)), files)


def _answers(
    connection: sqlite3.Connection, items: tuple[Item, ...], trace_column: str
) -> dict[AnswerKey, dict[int, RecordedAnswer]]:
    found: defaultdict[AnswerKey, dict[int, RecordedAnswer]] = defaultdict(dict)
    rows = connection.execute(
        f"SELECT method, shots, place, answer, scores, seconds, {trace_column}, tier, calls,"
        " prompt_tokens, completion_tokens, cost_usd FROM answers ORDER BY method, shots, place"
    )
    for method, shots, index, answer, scores, seconds, trace, *costs in rows:
        scored = ScoredAnswer(
            index, items[index].example, _answer(answer), tuple(orjson.loads(scores)), *costs
        )
        found[method, shots][index] = RecordedAnswer(scored, seconds, *_trace_parts(trace))
    return dict(found)


def _answer(text: str) -> Answer:
    row: dict[str, Any] = orjson.loads(text)
    return Answer(**row | {"labels": tuple(map(intern, row["labels"]))})


def _trace_parts(trace: str | None) -> tuple[str, tuple[str, ...], tuple[Demonstration, ...]]:
    """Parse the shown parts of a trace, with equal texts stored once.

    Whole traces of ten thousand items would not fit into memory.
    """
    if trace is None:
        return "", (), ()
    row: dict[str, Any] = orjson.loads(trace)
    shown = tuple(
        Demonstration(
            intern(one["answer"]),
            intern(one["text"]),
            tuple(map(intern, one["images"])),
            one["score"],
        )
        for one in row["demonstrations"]
    )
    return row["id"], tuple(intern(one["text"]) for one in row["completions"]), shown


def _failures(connection: sqlite3.Connection) -> dict[AnswerKey, dict[int, str]]:
    found: defaultdict[AnswerKey, dict[int, str]] = defaultdict(dict)
    for method, shots, index, error in connection.execute(
        "SELECT method, shots, place, error FROM failures ORDER BY place"
    ):
        found[method, shots][index] = error
    return dict(found)


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run: answered and failed items by method, of `items` each. `methods` are in
    table order, those of the last command and those with answers."""

    benchmark: str
    model: str
    is_stream: bool
    items: int
    methods: tuple[AnswerKey, ...]
    answered: Mapping[AnswerKey, int]
    failed: Mapping[AnswerKey, int]
    running: bool

    @property
    def done(self) -> int:
        return sum(self.answered.values())

    @property
    def failures(self) -> int:
        return sum(self.failed.values())

    @property
    def planned(self) -> int:
        return self.items * len(self.methods)

    @property
    def state(self) -> ProgressState:
        if self.running:
            return "running"
        return "finished" if self.done >= self.planned > 0 else "incomplete"


def read_progress(folder: Path) -> RunProgress:
    """Read the progress of a run, which may be in progress. Raises `StoreError`."""
    with opened_run(folder) as (connection, settings):
        answered, failed = (_counts(connection, table) for table in ("answers", "failures"))
        [(items,)] = connection.execute("SELECT count(*) FROM items")
        planned = _planned(settings)
        stream = ORDERS in settings
        keys = tuple(dict.fromkeys([*planned, *answered, *failed]))
        return RunProgress(
            str(settings["benchmark"]),
            ", ".join(settings["tiers"]) if stream else str(settings["model"]),
            stream,
            items,
            keys if stream else in_table_order(keys),
            answered,
            failed,
            is_running(folder),
        )


def file_state(folder: Path) -> FileState:
    """Return the state of the files of a run; it changes with each stored answer. Raises
    `NotFoundError` if the run does not exist."""
    found = []
    for path in (folder / FILE, folder / f"{FILE}-wal"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StoreError(
                f"the run in {folder} cannot be read: {error.strerror}",
                hint="check its permissions",
            ) from error
        found.append((status.st_mtime_ns, status.st_size))
    if not found:
        raise NotFoundError(
            f"the run in {folder} does not exist any more", hint="check the folder of runs"
        )
    return tuple(found)


def _planned(settings: Mapping[str, Any]) -> Sequence[AnswerKey]:
    if ORDERS in settings:
        config = StreamConfig.from_record(settings)
        return [(stream.name, config.shots) for stream in config.streams()]
    return [(name, shots) for name, shots in settings.get(PLANNED, ())]


def _counts(connection: sqlite3.Connection, table: str) -> dict[AnswerKey, int]:
    rows = connection.execute(COUNTS.format(table))
    return {(method, shots): count for method, shots, count in rows}
