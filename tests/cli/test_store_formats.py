"""Commands on files of a development version print one line and leave the files unchanged."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from bottega._util.sqlite import FileKind
from bottega.evaluation.runs.run_store import RUN_FILE
from bottega.knowledge.sqlite.schema import KNOWLEDGE_BASE
from bottega.recording.traces import TRACE_STORE
from tests.cli.conftest import Run


@pytest.mark.parametrize(
    ("kind", "file", "command"),
    [
        (KNOWLEDGE_BASE, "old.db", "ls old.db"),
        (KNOWLEDGE_BASE, "old.db", "verify old.db --repair"),
        (KNOWLEDGE_BASE, "old.db", "migrate old.db new.db"),
        (KNOWLEDGE_BASE, "old.db", "ui old.db"),
        (TRACE_STORE, "traces.db", "log"),
        (TRACE_STORE, "traces.db", "log --traces traces.db"),
        (RUN_FILE, "old/run.db", "log --traces old"),
        (RUN_FILE, "old/run.db", "report old"),
        (RUN_FILE, "old/run.db", "eval digits --methods vote --limit 2 --out old"),
    ],
)
def test_command_names_the_formats_and_the_way_out(
    run: Run, tmp_path: Path, kind: FileKind, file: str, command: str
) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    kind.open(path, busy_seconds=1).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("DROP TABLE bottega_schema; PRAGMA user_version = 8")
    before = path.read_bytes()
    done = run(*command.split())
    *_, problem, hint = done.err.splitlines()  # after notes on the defaults
    assert (done.code, done.out) == (1, "")
    assert problem.startswith("error: ")
    assert problem.endswith(
        f"{file} has development format 8 of the {kind.name}; this version of bottega reads"
        " release format 1"
    )
    assert hint.strip() == f"hint: {kind.way_out}; it was not changed"
    assert path.read_bytes() == before
    assert not (tmp_path / "new.db").exists()
