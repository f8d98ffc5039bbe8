"""The command of docs/experiments/rcts_codes.md, compared with the benchmark of its rows."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import orjson

from benchmarks.rcts_figures import CODES_COMMAND
from benchmarks.rcts_plan import SEARCHES, SETTINGS, Kind, MethodConfig, Rewarding
from benchmarks.rcts_searches import TaskSetup, model_of
from bottega.evaluation.config import RunConfig
from bottega.evaluation.runs.runner import evaluate
from bottega.pipeline import run_sync
from tests.cli.conftest import Run

PAGES = Path(__file__).resolve().parents[2] / "docs" / "experiments"
KINDS: tuple[Kind, ...] = (
    *("top-k", "rcts", "rcts-flat", "rcts-random"),
    *("best-of-n", "majority"),
)


def test_the_command_gives_the_results_of_the_benchmark(run: Run) -> None:
    _, *command = shlex.split(CODES_COMMAND.replace("\\\n", " "))
    assert run(*command, "--limit", 8, "--json", "f").code == 0
    results = orjson.loads(Path("f").read_bytes())["results"]
    found = {row["method"]: (row["value"], row["calls"]) for row in results}
    setting = replace(SETTINGS["codes"], items=8)
    task = TaskSetup(setting, 0, model_of(setting, None))
    expected = {}
    for kind in KINDS:
        reward: Rewarding = "mutual" if kind in SEARCHES else "none"
        method = task.method(MethodConfig(kind, reward, samples=36))
        result, _ = run_sync(evaluate(task.data, method, RunConfig(seed=0)))
        expected[kind] = (result.value, result.calls)
    task.close()
    assert found == expected
    assert found["rcts"] != found["rcts-flat"]


def test_the_pages_show_the_command() -> None:
    for name in ("rcts.md", "rcts_codes.md"):
        assert CODES_COMMAND in (PAGES / name).read_text("utf-8")
