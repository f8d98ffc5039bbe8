"""The command of docs/experiments/rcts_codes.md, compared with the benchmark of its rows."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import orjson

from benchmarks.rcts_plan import SEARCHES, SETTINGS, Kind, MethodConfig, Rewarding
from benchmarks.rcts_searches import TaskSetup, model_of
from bottega.evaluation.config import RunConfig
from bottega.evaluation.runs.runner import evaluate
from bottega.pipeline import run_sync
from tests.cli.conftest import Run

CODES_COMMAND = re.compile(r"^bottega eval codes [^`]*", re.M)
PAGES = Path(__file__).resolve().parents[2] / "docs" / "experiments"
KINDS: tuple[Kind, ...] = (
    *("top-k", "rcts", "rcts-flat", "rcts-random"),
    *("best-of-n", "majority"),
)


def published_command() -> str:
    """Return the command, which is the same on both pages."""
    pages = ((PAGES / name).read_text("utf-8") for name in ("rcts.md", "rcts_codes.md"))
    commands: set[str] = {one for text in pages for one in CODES_COMMAND.findall(text)}
    [command] = commands
    return command.replace("\\\n", " ")


def test_the_command_gives_the_results_of_the_benchmark(run: Run) -> None:
    _, *command = shlex.split(published_command())
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
