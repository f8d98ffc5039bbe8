"""Where a run keeps its answers."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import orjson

from bottega._util.identity import image_hashes
from bottega._util.sqlite import FileKind
from bottega.errors import BottegaError, SettingError, StoreError
from bottega.evaluation.committing import Committer, Write
from bottega.evaluation.labels import labels_of
from bottega.evaluation.metrics.metric import Metric
from bottega.evaluation.outcomes import Method, Outcome, ScoredAnswer
from bottega.image import path_text
from bottega.recording import json_text, stored_trace, to_json
from bottega.types import Answer, Candidate, Example, Trace


class Ledger(Protocol):
    """An answer is kept when `keep` returns; one that failed is no answer."""

    def answered(self, method: Method, items: tuple[Example, ...]) -> dict[int, ScoredAnswer]:
        """What was answered before, by the item's place."""
        ...

    async def keep(self, method: Method, scored: ScoredAnswer, outcome: Outcome) -> None: ...

    async def fail(self, method: Method, place: int, error: BottegaError) -> None: ...


class Unkept:
    """The ledger of a run that begins and ends in one process."""

    def answered(self, method: Method, items: tuple[Example, ...]) -> dict[int, ScoredAnswer]:
        return {}

    async def keep(self, method: Method, scored: ScoredAnswer, outcome: Outcome) -> None:
        pass

    async def fail(self, method: Method, place: int, error: BottegaError) -> None:
        pass


class Shown(Unkept):
    """Remembers which demonstrations one method showed, by the item's place."""

    def __init__(self, method: str, shots: int) -> None:
        self.key = (method, shots)
        self.by_place: dict[int, tuple[Candidate, ...]] = {}

    async def keep(self, method: Method, scored: ScoredAnswer, outcome: Outcome) -> None:
        if (method.name, method.shots) == self.key and outcome.trace is not None:
            self.by_place[scored.place] = outcome.trace.candidates


FILE = "run.db"
DATA = "data"
BUSY_SECONDS = 10.0
RUN_FILE = FileKind(
    "run",
    application_id=0x42747267,  # "Btrg"
    migrations=(
        """
        CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
        CREATE TABLE items (
            place INTEGER PRIMARY KEY,
            question TEXT NOT NULL,
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


@dataclass(frozen=True)
class Failure:
    method: str
    shots: int
    place: int
    error: str


class RunStore:
    """The answers of a run in a folder. An answer is stored when `keep` returns: a killed process
    loses nothing of it. A failure is forgotten when the item is answered."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _locked(path.with_suffix(".lock"))
        try:
            with RUN_FILE.translated(str(path)):
                self._connection = _connected(path)
        except BaseException:
            self._lock.close()
            raise
        self._committer = Committer(lambda: _connected(path))

    @classmethod
    def open(
        cls, folder: Path, settings: Mapping[str, object], items: tuple[Example, ...]
    ) -> RunStore:
        """`settings` are what the answers depend on. Raises `SettingError` if those in the folder
        are of other ones."""
        journal = cls(_file_in(folder))
        try:
            journal._begin(settings, items)
        except BaseException:
            journal.close()
            raise
        return journal

    def answered(self, method: Method, items: tuple[Example, ...]) -> dict[int, ScoredAnswer]:
        rows = self._read(
            "SELECT place, answer, scores, tier, calls, prompt_tokens, completion_tokens, cost_usd"
            " FROM answers WHERE method = ? AND shots = ? ORDER BY place",
            method.name,
            method.shots,
        )
        with RUN_FILE.reading(str(self.path)):
            return {
                place: ScoredAnswer(
                    place, items[place], _answer(answer), tuple(orjson.loads(scores)), *rest
                )
                for place, answer, scores, *rest in rows
            }

    def score_again(self, metrics: Sequence[Metric], items: tuple[Example, ...]) -> int:
        """By the metrics as they are now: their code, or what annotators said, may have changed.
        Returns of how many answers the scores did."""
        rows = self._read("SELECT method, shots, place, answer, scores FROM answers")
        changed = []
        for method, shots, place, answer, before in rows:
            with RUN_FILE.reading(str(self.path)):
                item, said = items[place], _answer(answer)
            scores = json_text([metric.score(item, said) for metric in metrics])
            if scores != before:
                changed.append((scores, method, shots, place))
        with RUN_FILE.translated(str(self.path)), self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(
                "UPDATE answers SET scores = ? WHERE (method, shots, place) = (?, ?, ?)", changed
            )
        return len(changed)

    def spent(self) -> tuple[float, float]:
        """US dollars of all answers, and of the dearest."""
        ((usd, highest_cost),) = self._read("SELECT total(cost_usd), max(cost_usd) FROM answers")
        return usd, highest_cost or 0.0

    def failures(self) -> list[Failure]:
        rows = self._read(
            "SELECT method, shots, place, error FROM failures ORDER BY method, shots, place"
        )
        return [Failure(*row) for row in rows]

    async def keep(self, method: Method, scored: ScoredAnswer, outcome: Outcome) -> None:
        key = (method.name, method.shots, scored.place)

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM failures WHERE (method, shots, place) = (?, ?, ?)", key)
            connection.execute(
                f"REPLACE INTO answers VALUES ({', '.join('?' * 12)})",
                (*key, *_row(scored, outcome.trace)),
            )

        await self._write(write)

    async def fail(self, method: Method, place: int, error: BottegaError) -> None:
        row = (method.name, method.shots, place, time.time(), path_text(str(error)))

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("REPLACE INTO failures VALUES (?, ?, ?, ?, ?)", row)

        await self._write(write)

    def close(self) -> None:
        self._committer.close()
        self._connection.close()
        self._lock.close()

    async def _write(self, write: Write) -> None:
        with RUN_FILE.translated(str(self.path)):
            await self._committer.write(write)

    def _read(self, statement: str, *values: object) -> list[Any]:
        with RUN_FILE.translated(str(self.path)):
            return self._connection.execute(statement, values).fetchall()

    def _begin(self, settings: Mapping[str, object], items: tuple[Example, ...]) -> None:
        wanted = {name: json_text(value) for name, value in settings.items()}
        found = dict(self._read("SELECT name, value FROM settings"))
        differing = [name for name in wanted if found and found.get(name) != wanted[name]]
        if differing:
            name = differing[0]
            other = f"with {name} {found.get(name)}, not {wanted[name]}"
            raise SettingError(
                f"{self.path.parent} holds a run {'over other data' if name == DATA else other}",
                hint="name another folder, or repeat the command that began it",
            )
        if found:
            return
        with RUN_FILE.translated(str(self.path)), self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT INTO settings VALUES (?, ?)", wanted.items())
            rows = (_item(place, item) for place, item in enumerate(items))
            connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?)", rows)


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        RUN_FILE.migrate(connection, str(path))
        connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def _locked(path: Path) -> IO[bytes]:
    """Held until it is closed, or its process is gone: two runs would ask everything twice."""
    try:
        lock = path.open("ab")
    except OSError as error:
        raise StoreError(
            f"{path.parent} cannot be written: {error.strerror}", hint="check its permissions"
        ) from error
    try:
        import fcntl
    except ImportError:  # Windows: two runs at once are the user's affair
        return lock
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise StoreError(
            f"another process is running in {path.parent}",
            hint="wait for it, or name another folder",
        ) from error
    return lock


def _file_in(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            f"{folder} cannot be made: {error.strerror}", hint="name a folder to write to"
        ) from error
    return folder / FILE


def _item(place: int, item: Example) -> tuple[object, ...]:
    query = item.query
    lists = (image_hashes(query), query.choices, labels_of(item), dict(item.tags))
    return (place, path_text(query.text), *map(json_text, lists))


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
        None if trace is None else to_json(stored_trace(trace)),
    )


def _answer(text: str) -> Answer:
    """Without its rationale, as an answer that was just given: methods learn from either."""
    row: dict[str, Any] = orjson.loads(text)
    return Answer(**row | {"labels": tuple(row["labels"]), "rationale": None})
