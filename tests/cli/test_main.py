from __future__ import annotations

import subprocess
import sys

import pytest

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
