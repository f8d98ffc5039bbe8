"""Progress without a terminal: lines on standard error."""

from __future__ import annotations

import time

import pytest

from bottega._util.tracing import use_tracer
from bottega.cli.shown_progress import CallCounter, ProgressLines, ProgressStatus, progress
from bottega.generation import ScriptedGenerator
from bottega.types import Prompt, Sampling


def test_short_work_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("adding", 3) as step:
        step(3)
    assert capsys.readouterr().err == ""


def test_long_work_writes_lines_even_before_its_first_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = ProgressLines("rcts 3", ProgressStatus(8), first=0.01)
    end = time.monotonic() + 20
    while not (written := capsys.readouterr().err) and time.monotonic() < end:
        time.sleep(0.005)
    lines.close()
    assert written.splitlines()[0] == "rcts 3: 0 of 8, 0:00"


def test_the_time_left_is_estimated() -> None:
    status = ProgressStatus(2000)
    assert status.text(9) == "0:09"
    status(500, 0.25)
    assert status.text(90) == "0.2500 USD, 1:30, about 4:30 left"
    status(1500)
    assert status.text(7200) == "0.2500 USD, 2:00:00, about 0:00 left"
    unknown = ProgressStatus(None)
    unknown(7)
    assert unknown.text(61) == "1:01"


async def test_calls_estimate_the_time_before_the_first_item() -> None:
    calls = CallCounter(limit=40)
    status = ProgressStatus(8, calls)
    model = ScriptedGenerator(lambda prompt: "cat")
    with use_tracer(calls):
        await model.generate(Prompt(()), Sampling(n=9))
        await model.generate(Prompt(()), Sampling())
    assert status.text(5) == "10 calls, 0:05, at most about 0:15 left"
    status(1)
    assert status.text(5) == "10 calls, 0:05, about 0:35 left"
