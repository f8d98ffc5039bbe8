"""The commands of the Cache-of-Thought benchmark plan their runs."""

from __future__ import annotations

import pytest

from benchmarks import cache_of_thought
from tests.cli.conftest import Run, run
from tests.cli.test_reproduce import write_answers

__all__ = ["run"]


@pytest.mark.slow
def test_commands_plan_their_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_of_thought, "RETRIEVE", ("probe",))
    planned = []
    for command in cache_of_thought.commands(quick=True):
        if command[0] == "report":
            continue
        done = run(*command, "--dry-run")
        assert done.code == 0, (command, done.err)
        if command[0] == "answer":
            write_answers(command[1], command[2], command[command.index("--model") + 1])
        planned.append(command[0])
    assert {name: planned.count(name) for name in set(planned)} == {
        "answer": 2,
        "eval": 16,
        "stream": 8,
    }
