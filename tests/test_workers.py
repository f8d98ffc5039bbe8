from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.paths import ROOT
from tests.workers import Schedule

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="libraries do not survive a fork")

TESTS = """
import os
import pytest

@pytest.fixture(scope="session", autouse=True)
def ended(tmp_path_factory):
    (tmp_path_factory.getbasetemp() / "begun").touch()  # a folder of each worker
    yield
    print("fixture ended", file=open(f"ended-{os.getpid()}", "w"))

def test_ends_its_process():
    os._exit(7)

@pytest.mark.parametrize("number", range(20))
def test_passes(number, tmp_path):
    print("unseen output")

def test_prints_and_fails(capfd):
    os.system("echo captured")
    assert capfd.readouterr().out == "captured\\n"
    print("output of the failure")
    assert False

@pytest.mark.skip(reason="not now")
def test_skipped():
    pass
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    (folder / "test_sample.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.workers", "--workers", "2", "-ra"]
    done = subprocess.run(
        [*command, *("-p", "no:cacheprovider", "--rootdir", str(folder)), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DEBUG_TEMPROOT": str(folder)},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout


def test_results_are_those_of_one_process(tmp_path: Path) -> None:
    code, output = run(tmp_path)
    assert code == 1 and "2 failed, 20 passed, 1 skipped" in output, output
    assert "output of the failure" in output and "unseen output" not in output
    assert "test_ends_its_process ended with status 7" in output
    assert "SKIPPED [1] test_sample.py" in output and "not now" in output
    # Two workers ended their fixtures, one of them instead of the process that ended itself.
    assert len([*tmp_path.glob("ended-*")]) == 2
    begun = tmp_path.glob("pytest-of-*/pytest-*/worker*/begun")
    assert len({file.resolve() for file in begun}) == 3


def test_a_failure_can_stop_the_run(tmp_path: Path) -> None:
    code, output = run(tmp_path, "-x", "--deselect", "test_sample.py::test_ends_its_process")
    assert code == 1 and "stopping after 1 failures" in output and "1 failed" in output, output
    # The other worker may be interrupted before its fixture begins.
    assert len([*tmp_path.glob("ended-*")]) in (1, 2)


def test_one_worker_has_all_tests_of_a_server() -> None:
    fixtures = [["tmp_path"], ["postgres"], ["browser"], [], ["redis", "tmp_path"]] * 10
    items: list[Any] = [SimpleNamespace(fixturenames=names) for names in fixtures]
    parameters = SimpleNamespace(params={"vector": np.zeros(2), "store": "redis"})
    items.append(SimpleNamespace(fixturenames=[], callspec=parameters))
    schedule, begun = Schedule(items, 3), {0: list[int](), 1: [], 2: []}
    # The first worker is the slowest, so others take over its tests.
    for worker in [1, 2] * len(items) + [0] * len(items):
        index = schedule.next(worker)
        if index is not None:
            begun[worker].append(index)
    assert sorted(begun[0] + begun[1] + begun[2]) == [*range(len(items))]
    assert [items[index].fixturenames for index in begun[0]] == [["browser"]] * 10
    stateful = {n for n, names in enumerate(fixtures) if {"postgres", "redis"} & {*names}}
    assert begun[1][:21] == sorted(stateful | {50})
    assert not {*begun[2]} & {*begun[1][:21]}
