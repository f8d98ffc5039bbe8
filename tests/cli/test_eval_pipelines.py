"""A pipeline of the user in `bottega eval`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.server import Server, ok

CUSTOM = """
from dataclasses import replace
from bottega.retrieval import UniformSampler

def shuffled(pipeline, examples):
    return replace(pipeline, retrieve=UniformSampler(examples, seed=7))

def nothing(pipeline, examples):
    return None

def fails(pipeline):
    return pipeline

async def _broken(query, k):
    return {}["nothing"]

def breaks(pipeline, examples):
    return replace(pipeline, retrieve=_broken)

def orders(pipeline, examples):
    async def rerank(query, candidates, k):
        raise ValueError("no order")
    return replace(pipeline, rerank=rerank)

def parses(pipeline, examples):
    return replace(pipeline, parse=lambda reply, choices: 1 / 0)
"""


def write_own_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a module of the user, which no earlier test has imported."""
    monkeypatch.syspath_prepend(".")
    monkeypatch.delitem(sys.modules, "own_methods", raising=False)
    Path("own_methods.py").write_text(CUSTOM)


OWN_TASK = ("--model", "openai:m", "--shots", 2, "--embed", "pixels")


def test_a_pipeline_of_the_user_is_compared(
    run: Run, pets: Path, served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.answers = [ok("Answer Choice: leaf")]
    write_own_methods(monkeypatch)
    task = ("eval", f"image-folder:{pets}", *OWN_TASK, "--methods", "top-k", "--out", "kept")
    done = run(*task, "--pipeline", "own_methods:shuffled")
    assert done.code == 0, done.err
    scores = []
    for name in ("custom", "top-k"):
        found = run("log", "--traces", "kept", "--tier", name, "--json").json
        assert isinstance(found, dict)
        shown = [one for trace in found["traces"] for one in trace["demonstrations"]]
        assert len(shown) == 2 * len(found["traces"]) > 0
        scores.append({one["score"] for one in shown})
    assert scores[0] == {0.0} != scores[1]  # of the sampler, and of the search
    assert run(*task, "--pipeline", "own_methods:shuffled").code == 0  # all answers are stored
    with Path("own_methods.py").open("a") as file:
        file.write("# changed\n")
    again = run(*task, "--pipeline", "own_methods:shuffled")
    assert "kept holds a run with --pipeline own_methods:shuffled (file " in again.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--methods", "custom"), "custom needs a function"),
        (("--pipeline", "own_methods:nothing"), "own_methods:nothing returned no Pipeline"),
        (("--pipeline", "own_methods:fails"), "takes 1 positional argument but 2 were given"),
        (("--pipeline", "own_methods:missing"), "has no attribute 'missing'"),
        (("--pipeline", "absent_module:f"), "module 'absent_module' does not exist"),
        (("--pipeline", "own_methods"), "the import path is incomplete"),
    ],
)
def test_faults_of_the_users_pipeline_are_named(
    run: Run,
    pets: Path,
    served: Server,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    message: str,
) -> None:
    write_own_methods(monkeypatch)
    done = run("eval", f"image-folder:{pets}", *OWN_TASK, *options)
    assert done.code != 0 and message in done.err and "hint" in done.err and not served.bodies


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("breaks", "KeyError: 'nothing'"),
        ("orders", "ValueError: no order"),
        ("parses", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_part_of_the_user_that_fails_is_named(
    run: Run,
    pets: Path,
    served: Server,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    problem: str,
) -> None:
    served.answers = [ok("Answer Choice: leaf")]
    write_own_methods(monkeypatch)
    task = (*OWN_TASK, "--methods", "custom", "--pipeline", f"own_methods:{name}")
    done = run("eval", f"image-folder:{pets}", *task)
    assert done.code == 2 and "Traceback" not in done.err
    assert re.search(rf"error: own_methods:{name}, item \d+, failed: {problem} \(own_met", done.err)
