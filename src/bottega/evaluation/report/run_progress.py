"""Progress of runs, read without their answers."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bottega.errors import NotFoundError, StoreError
from bottega.evaluation.report.runs import AnswerKey, in_table_order, opened_run
from bottega.evaluation.runs.run_store import FILE, ORDERS, PLANNED, is_running
from bottega.evaluation.streams.stream_plan import StreamConfig

ProgressState = Literal["running", "finished", "incomplete"]
# Identity of a run's content: modification times in nanoseconds and sizes of its files.
FileState = tuple[tuple[int, int], ...]
COUNTS = "SELECT method, shots, count(*) FROM {} GROUP BY method, shots"


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
