"""Progress without a terminal: lines on standard error."""

from __future__ import annotations

import time

import pytest

from bottega.cli import progress as module
from bottega.cli.progress import ProgressLines, progress


def test_short_work_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("adding", 3) as step:
        step(3)
    assert capsys.readouterr().err == ""


def test_long_work_writes_lines_even_before_its_first_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = ProgressLines("rcts 3", 8, first=0.01)
    time.sleep(0.1)
    lines.close()
    written = capsys.readouterr().err.splitlines()
    assert 1 <= len(written) <= 4  # after 0.01, 0.03 and 0.07 seconds
    assert set(written) == {"rcts 3: 0 of 8 after 0:00"}


def test_lines_estimate_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "note", lambda text: None)
    lines = ProgressLines("streams", 2000)
    lines.step(500, 0.25)
    assert lines.line(90) == "streams: 500 of 2,000 after 1:30, 0.2500 USD, about 4:30 left"
    lines.step(1500)
    assert lines.line(7200) == "streams: 2,000 of 2,000 after 2:00:00, 0.2500 USD, about 0:00 left"
    lines.close()
    unknown = ProgressLines("adding", None)
    unknown.step(7)
    assert unknown.line(61) == "adding: 7 after 1:01"
    unknown.close()
