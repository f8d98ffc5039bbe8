from __future__ import annotations

import subprocess
import sys

import pytest

from bottega.cli.eval_options import PANELS
from tests.cli.conftest import Run


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "bottega", "stats", "no.db"], capture_output=True)
    assert done.returncode == 1
    assert b"error: knowledge base no.db does not exist" in done.stderr


def test_help_has_no_line_breaks_within_a_paragraph(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "800")
    text = run("eval", "--help").out
    assert "vote-strict counts ties as wrong" in text
    assert "BENCHMARK" in text


def test_options_of_eval_are_in_panels_and_fit_80_columns(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("eval", "--help").out.splitlines()
    panels = [line.split()[1] for line in lines if line.startswith("╭─")]
    assert panels == ["Arguments", "Options", *(name.split()[0] for name in PANELS)]
    assert max(map(len, lines)) <= 80
    # The rows of the longest help text: half the lines of one wide table.
    start = next(i for i, line in enumerate(lines) if line.startswith("│ --retrieve "))
    end = next(i for i, line in enumerate(lines) if line.startswith("│ --embed-text "))
    assert end - start < 16
    assert not any("…" in line for line in lines)
