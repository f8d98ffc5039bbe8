from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from bottega.errors import StoreError
from bottega.evaluation.config import RunConfig
from bottega.evaluation.outcomes import Method
from bottega.evaluation.report.runs import file_state, read_progress, read_run
from bottega.evaluation.runs.run_store import FILE, RunStore
from bottega.evaluation.runs.runner import RunState, evaluate
from tests.evaluation.report.builders import (
    HOSTILE,
    benchmark,
    simulated_answers,
    store_run,
    three_methods,
)

# Drop privileges: root can write to read-only files.
READER = """
import os, sys
from pathlib import Path
from bottega.evaluation.report.runs import read_run
if os.getuid() == 0:
    os.setuid(65534)
print(len(read_run(Path(sys.argv[1])).methods))
"""
DATA = benchmark(8, examples=6, side=8)


async def test_run_is_read_as_stored(tmp_path: Path) -> None:
    run = read_run(await store_run(tmp_path, DATA, three_methods(DATA)))
    assert run.settings["benchmark"] == "animals"
    assert run.methods == (("zero-shot", 0), ("random", 3), ("top-k", 3))
    assert [item.example.answer for item in run.items] == [item.answer for item in DATA.items]
    assert run.items[0].example.tags == {"subject": HOSTILE}
    assert run.items[1].images == (DATA.items[1].query.images[0].sha256,)
    assert run.failures == {("random", 3): {2: f"the endpoint was too slow {HOSTILE}"}}
    given = run.answers["top-k", 3][5]
    assert (given.trace, len(given.shown), given.seconds) == (f"{5:016x}", 3, 0.6)
    assert given.replies[0].endswith(f"Answer: {given.scored.answer.text}")
    example_images = {one.query.images[0].sha256 for one in DATA.knowledge}
    assert {
        image for one in given.shown for image in one.images
    } <= example_images & run.thumbnails.keys()


async def test_reading_does_not_change_the_folder(tmp_path: Path) -> None:
    folder = await store_run(tmp_path, DATA, three_methods(DATA))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    read_run(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


async def test_active_run_is_readable(tmp_path: Path) -> None:
    settings = {"benchmark": "animals", "model": "m", "metrics": ["accuracy"]}
    with closing(RunStore.open(tmp_path, settings, DATA.items)) as ledger:
        assert read_run(tmp_path).methods == ()
        method = Method("top-k", 2, simulated_answers(DATA, 1.0, 2))
        await evaluate(DATA, method, state=RunState(ledger))
        assert len(read_run(tmp_path).answers["top-k", 2]) == 8


def test_read_only_folder_is_readable() -> None:
    with tempfile.TemporaryDirectory() as open_to_others:
        Path(open_to_others).chmod(0o755)
        folder = asyncio.run(store_run(Path(open_to_others) / "run", DATA, three_methods(DATA)))
        for file in folder.iterdir():
            file.chmod(0o444)
        folder.chmod(0o555)
        command = [sys.executable, "-c", READER, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        folder.chmod(0o755)
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_folder_without_a_run_raises(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no run"):
        read_run(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE)) as other:
        other.execute("CREATE TABLE mine (a)")
    with pytest.raises(StoreError, match="another program"):
        read_run(tmp_path)


def test_run_without_items_raises(tmp_path: Path) -> None:
    with closing(RunStore(tmp_path / FILE)), pytest.raises(StoreError, match="no run yet"):
        read_run(tmp_path)


async def test_damaged_row_is_reported(tmp_path: Path) -> None:
    folder = await store_run(tmp_path, DATA, three_methods(DATA)[:1])
    with closing(sqlite3.connect(folder / FILE)) as connection, connection:
        connection.execute("UPDATE answers SET scores = 'x' WHERE place = 3")
    with pytest.raises(StoreError, match=r"run\.db is damaged"):
        read_run(folder)


async def test_progress_counts_answers_of_planned_methods(tmp_path: Path) -> None:
    data = benchmark(8)
    settings = {"benchmark": "animals", "model": "m", "seed": 0, "metrics": ["accuracy"]}
    methods = three_methods(data)
    with closing(RunStore.open(tmp_path, settings, data.items)) as store:
        store.plan([method.key for method in methods])
        before, state = read_progress(tmp_path), file_state(tmp_path)
        assert (before.done, before.planned, before.state) == (0, 24, "running")
        await evaluate(data, methods[1], RunConfig(), RunState(store))
        during = read_progress(tmp_path)
        assert (during.done, during.failures, during.state) == (7, 1, "running")
        assert file_state(tmp_path) != state
    assert read_progress(tmp_path).state == "incomplete"
    assert read_progress(tmp_path).methods == (("zero-shot", 0), ("random", 3), ("top-k", 3))
    assert "planned" not in read_run(tmp_path).settings


async def test_a_run_without_a_plan_is_finished_when_its_methods_are(tmp_path: Path) -> None:
    data = benchmark(6)
    await store_run(tmp_path, data, three_methods(data)[:1])
    assert read_progress(tmp_path).state == "finished"


def test_missing_run_has_no_state(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist any more"):
        file_state(tmp_path / "deleted")
