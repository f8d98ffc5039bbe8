"""Limits of the measurements, and the meters in a copy of the tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import meters.__main__
from meters.__main__ import ADVICE, LIMITS, failures, lowered
from meters.source import Measurement
from tests.paths import ROOT

NOT_COPIED = shutil.ignore_patterns("*.safetensors", "*.gz", "tokenizer.json")
EXTRA_FILE = """
def wrapped(call):
    async def wrapper(self, scope, receive, send):
        await call(self, scope, receive, send)
    return wrapper
"""
USE_OF_IT = """
from bottega.gateway import extra_file
App.__call__ = extra_file.wrapped(App.__call__)
"""
SECOND_MEANING = "\n\nclass Pipeline: ...\n"
LONG_FUNCTION = "\n\ndef long_function() -> None:\n" + "    x = 1\n" * 99
LINE = (
    "{name}: {value}, at most {limit}; {advice},"
    " or raise the limit in meters/limits.json with a decision in docs/decisions/"
)


@pytest.fixture
def limits() -> dict[str, int]:
    found: dict[str, int] = json.loads(LIMITS.read_text(encoding="utf-8"))
    return found


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy what the meters read, and compiled files: the copies keep their modification times."""
    for folder in ("src", "meters"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=NOT_COPIED)
    (tmp_path / "benchmarks").mkdir()
    shutil.copy2(ROOT / "benchmarks" / "files_per_request.py", tmp_path / "benchmarks")
    return tmp_path


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


def run_meters(copy: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meters", *options]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)


def exceeded(name: str, limits: dict[str, int], by: int = 1) -> str:
    limit = limits[name]
    return LINE.format(name=name, value=limit + by, limit=limit, advice=ADVICE[name])


def test_every_measurement_has_a_limit_and_advice(limits: dict[str, int]) -> None:
    assert sorted(limits) == sorted(ADVICE)
    assert LIMITS.read_text("utf-8") == json.dumps(limits, indent=2, sort_keys=True) + "\n"


def test_a_measurement_at_its_limit_passes_and_others_fail() -> None:
    limits = {"Python files": 10, "Python code lines": 1000}

    def failed(files: int, lines: int) -> list[str]:
        measured = {"Python files": files, "Python code lines": lines}
        return [
            line.partition(";")[0]
            for line in failures(limits, {name: Measurement(n) for name, n in measured.items()})
        ]

    assert failed(10, 1000) == failed(10, 900) == []
    assert failed(11, 1001) == [
        "Python files: 11, at most 10",
        "Python code lines: 1001, at most 1000",
    ]
    assert failed(9, 899) == [
        "Python files: 9, below its limit 10",
        "Python code lines: 899, below its limit 1000",
    ]


def test_limits_are_only_lowered() -> None:
    limits = {"Python files": 10, "files per chat completion": 5, "Python code lines": 1000}
    measured = {"Python files": Measurement(9), "files per chat completion": Measurement(6)}
    assert lowered(limits, measured) == limits | {"Python files": 9}
    assert lowered(limits, {"Python code lines": Measurement(950)}) == limits
    assert lowered(limits, {"Python code lines": Measurement(800)})["Python code lines"] == 800


def test_each_growth_fails_with_its_line(copy: Path, limits: dict[str, int]) -> None:
    """One run for all: it takes seconds. `make check` shows that an unchanged tree passes."""
    gateway = copy / "src" / "bottega" / "gateway"
    (gateway / "extra_file.py").write_text(EXTRA_FILE, encoding="utf-8")
    append(gateway / "asgi.py", USE_OF_IT)
    append(copy / "src" / "bottega" / "image.py", SECOND_MEANING + LONG_FUNCTION)
    done = run_meters(copy)
    measured = [line for line in done.stdout.splitlines() if "code lines" not in line]
    assert done.returncode == 1
    assert measured == [
        exceeded("files per chat completion", limits),
        exceeded("Python files", limits),
        exceeded("type names with several meanings", limits),
        exceeded("functions over 60 lines", limits),
        exceeded("lines beyond 60 of a function", limits, by=40),
    ]


def test_other_checkouts_and_lists(copy: Path) -> None:
    shutil.rmtree(copy / "src")
    package = copy / "other" / "src" / "bottega"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "a.py").write_text("class A: ...\n\n\nLIMIT = 1\n", encoding="utf-8")
    done = run_meters(copy, "--root", "other", "--list", "constants")
    assert done.stdout == "files with constants below a class: 1\n  bottega/a.py: LIMIT\n"
    done = run_meters(copy, "--root", "other")
    assert (done.returncode, done.stdout.splitlines()[0]) == (1, "Python files: 2")
    assert "files per request: not measured, ImportError: cannot import name" in done.stdout
    done = run_meters(copy)
    assert done.returncode == 2
    assert f"{copy} has no folder src/bottega: name the root of a checkout" in done.stderr


def test_lower_rewrites_the_limits_and_reports_higher_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "limits.json"
    path.write_text('{"files per chat completion": 5, "Python files": 10}', encoding="utf-8")
    monkeypatch.setattr(meters.__main__, "LIMITS", path)
    monkeypatch.setattr(meters.__main__, "measure", lambda _: {"Python files": Measurement(9)})
    requests = {"files per chat completion": Measurement(6)}
    monkeypatch.setattr(meters.__main__, "measure_requests", lambda _: requests)
    monkeypatch.setattr(sys, "argv", ["meters", "--lower"])
    assert meters.__main__.main() == 1
    assert path.read_text("utf-8") == (
        '{\n  "Python files": 9,\n  "files per chat completion": 5\n}\n'
    )
    assert capsys.readouterr().out.startswith("files per chat completion: 6, at most 5; merge")
