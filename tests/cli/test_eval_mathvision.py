"""`bottega eval` on MathVision's published layout: costs, failures and interruptions."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from bottega import naming
from bottega.generation import OpenAIGenerator
from bottega.openai_api.client import RetryPolicy
from tests.cli.conftest import Run, no_sleep
from tests.evaluation.benchmarks.published import write_image
from tests.reasoner import Reasoner, storable_text
from tests.server import Server

MATHVISION = Path(__file__).resolve().parents[3] / "shared" / "data" / "mathvision"
NAMES = ("zero-shot", "random", "top-k", "rcts", "majority")
ROLLOUTS = 2
MAX_CALLS = 1 + ROLLOUTS * 11  # completions of one search
LABELLED, ITEMS = 20, 12
SAMPLE = pytest.mark.parametrize("sampled", [False, True], ids=["synthetic", "published"])


def evaluation(folder: Path, *options: object, methods: tuple[str, ...] = NAMES) -> tuple[str, ...]:
    search = ("--rollouts", str(ROLLOUTS)) if "rcts" in methods else ()
    return (
        "eval", f"mathvision:{folder}", "--methods", ",".join(methods), "--shots", "2", *search,
        "--model", "openai:m", "--embed", "pixels", *map(str, options),
    )  # fmt: skip


@pytest.fixture
def synthetic(tmp_path: Path) -> Path:
    """Return a folder of synthetic problems in MathVision's layout, half of them with options."""
    root = tmp_path / "math"
    rows = [problem(number) for number in range(LABELLED + ITEMS)]
    for row in rows:
        write_image(root / str(row["image"]), 40 * int(str(row["id"])))
    (root / "data").mkdir()
    for split, part in (("test", rows), ("testmini", rows[:ITEMS])):
        lines = b"\n".join(map(orjson.dumps, part))
        (root / "data" / f"{split}.jsonl").write_bytes(lines)
    return root


def problem(number: int) -> dict[str, object]:
    options = [str(number + i) for i in range(5)] if number % 2 else []
    return {
        "id": str(number),
        "question": f"How many are {number} and none?\n<image1>",
        "options": options,
        "answer": "A" if options else str(number),
        "solution": f"None adds nothing to {number}." if number % 3 else None,
        "level": 1,
        "subject": "arithmetic",
        "image": f"images/{number}.png",
    }


@pytest.fixture
def benchmark(synthetic: Path, sampled: bool) -> Path:
    if sampled and not MATHVISION.is_dir():
        pytest.skip("needs ../shared/data/mathvision")
    return MATHVISION if sampled else synthetic


@pytest.fixture
def reasoner(served: Server) -> Reasoner:
    served.answers = [reasoner := Reasoner()]
    return reasoner


def results(file: str = "f.json") -> dict[str, dict[str, Any]]:
    document = orjson.loads(Path(file).read_bytes())
    return {row["method"]: row | {"seconds": 0} for row in document["results"]}


@SAMPLE
def test_every_method_counts_its_calls_and_cost(
    run: Run, reasoner: Reasoner, benchmark: Path
) -> None:
    done = run(*evaluation(benchmark, "--limit", 6), "--price", "1,1", "--json", "f.json")
    assert done.code == 0, done.err
    rows = results()
    assert tuple(rows) == NAMES
    assert all((row["n"], row["failed"], row["invalid"]) == (6, 0, 0) for row in rows.values())
    # The calls of rcts include every request of its trees.
    assert sum(row["calls"] for row in rows.values()) == reasoner.samples
    assert sum(row["prompt_tokens"] for row in rows.values()) == reasoner.prompt_tokens
    assert sum(row["completion_tokens"] for row in rows.values()) == 2 * reasoner.samples
    assert [rows[name]["calls"] for name in NAMES if name != "rcts"] == [6, 6, 6, 6 * MAX_CALLS]
    assert 6 * 3 <= rows["rcts"]["calls"] <= 6 * MAX_CALLS
    for row in rows.values():
        spent = (row["prompt_tokens"] + row["completion_tokens"]) / 1e6
        assert row["cost_usd"] == pytest.approx(spent)
    assert "demonstrations of rcts, majority include rationales" in done.err


def test_rationale_options_select_the_prompts(
    run: Run, reasoner: Reasoner, synthetic: Path
) -> None:
    def prompts(*options: str) -> dict[str, set[bool]]:
        """Return by method whether its requests ask for reasons."""
        requested = {}
        for name in ("zero-shot", "top-k", "majority"):
            reasoner.order.clear()
            run(*evaluation(synthetic, "--limit", 2, *options, methods=(name,)))
            texts = [storable_text(orjson.loads(body)["messages"][-1]) for body in reasoner.order]
            requested[name] = {"BECAUSE" in text for text in texts}
        return requested

    assert prompts() == {"zero-shot": {False}, "top-k": {False}, "majority": {True}}
    assert prompts("--rationales") == {"zero-shot": {False}, "top-k": {True}, "majority": {True}}
    assert set(map(frozenset, prompts("--no-rationales").values())) == {frozenset({False})}
    kept = evaluation(synthetic, "--limit", 2, "--out", "kept", methods=("zero-shot",))
    assert run(*kept).code == 0
    assert "--rationales unset, got off" in run(*kept, "--no-rationales").err


def test_written_rationales_become_demonstrations(
    run: Run, reasoner: Reasoner, synthetic: Path
) -> None:
    added = run("add", "kb.db", f"mathvision:{synthetic}", "--embed", "pixels", "--json").json
    assert added["examples"] == LABELLED  # type: ignore[index]  # no evaluated items
    writing = ("rationales", "kb.db", "--model", "openai:m", "--again", "--candidates", 2)
    made = run(*writing, "--predictions", 4, "--json")
    assert made.code == 0, made.err
    kept = made.json["rows"]["this run"]["kept"]["n"]  # type: ignore[index]
    assert 0 < kept < LABELLED
    reasoner.order.clear()
    command = evaluation(synthetic, "--rationales", "--json", "f.json", methods=("random",))
    done = run(*command, "--rationales-from", "kb.db")
    assert done.code == 0, done.err
    assert "labelled examples from kb.db" in done.err
    document = orjson.loads(Path("f.json").read_bytes())
    assert document["explained"] == ["random"]
    assert document["shown"] == {"random": {"rationales": "from kb.db"}}
    messages = [message for body in reasoner.order for message in orjson.loads(body)["messages"]]
    shown = [storable_text(message) for message in messages if message["role"] == "assistant"]
    assert len(shown) == 24
    assert 0 < sum("BECAUSE: Way " in text for text in shown) < 24
    other = run("eval", "attributes:examples=30,queries=2", "--rationales-from", "kb.db")
    assert other.code == 2
    assert "bottega rationales" in other.err


@pytest.mark.slow
def test_a_killed_run_resumes_with_equal_results(
    run: Run, reasoner: Reasoner, tmp_path: Path, synthetic: Path
) -> None:
    """Kill the run at random times; answered items are not requested again."""
    options = evaluation(synthetic, "--limit", 4, "--concurrency", 1)
    assert run(*options, "--out", "uninterrupted", "--json", "uninterrupted.json").code == 0
    expected = list(reasoner.order)
    sizes = [requests(answer) for answer in answers(tmp_path / "uninterrupted").values()]
    assert sum(sizes) == len(expected)

    def remaining() -> Counter[bytes]:
        """Return the requests of the items without an answer."""
        return Counter(expected[sum(sizes[: len(answers(tmp_path / "killed"))]) :])

    command = [sys.executable, "-m", "bottega", *options, "--out", "killed"]
    rng = random.Random()
    for _ in range(2):
        reasoner.order.clear()
        before = remaining()
        stop = rng.randrange(1, max(2, before.total() - 5))
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 60
            while len(reasoner.order) < stop and time.monotonic() < deadline:
                assert process.poll() is None
                time.sleep(0.002)
            os.kill(process.pid, signal.SIGKILL)
        assert len(reasoner.order) >= stop
        assert not Counter(reasoner.order) - before
    missing = remaining()
    reasoner.order.clear()
    assert run(*options, "--out", "killed", "--json", "killed.json").code == 0
    assert Counter(reasoner.order) == missing
    assert results("killed.json") == results("uninterrupted.json")
    reasoner.order.clear()
    assert run(*options, "--out", "killed").code == 0
    assert reasoner.order == []


@SAMPLE
def test_failed_requests_are_excluded_and_repeated(
    run: Run, reasoner: Reasoner, benchmark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_short_timeout = partial(
        OpenAIGenerator, timeout=0.5, retries=RetryPolicy(2, sleep=no_sleep)
    )
    options = evaluation(benchmark, "--limit", 12)
    assert run(*options, "--json", "complete.json").code == 0
    reasoner.failing = 0.06
    with monkeypatch.context() as patch:
        patch.setattr(naming, "OpenAIGenerator", with_short_timeout)
        done = run(*options, "--out", "kept", "--json", "kept.json")
    assert done.code == 1
    assert len(reasoner.failure_kinds) > 1
    rows, kept = results("kept.json"), answers(Path("kept"))
    assert rows["rcts"]["failed"] > 0 and rows["rcts"]["n"] > 0
    assert sum(row["failed"] for row in rows.values()) == 5 * 12 - len(kept)
    for name, row in rows.items():
        assert row["n"] == 12 - row["failed"] == sum(method == name for method, _ in kept)
    reasoner.failing = 0.0
    reasoner.order.clear()
    again = run(*options, "--out", "kept", "--json", "again.json")
    assert again.code == 0, again.err
    # Results equal those of a run without failures; answers and their trees are not repeated.
    assert results("again.json") == results("complete.json")
    completed = answers(Path("kept"))
    assert kept.items() <= completed.items()
    repeated = [completed[key] for key in completed.keys() - kept.keys()]
    assert len(reasoner.order) == sum(map(requests, repeated)) > 0


Answers = dict[tuple[str, int], tuple[str, str]]


def answers(folder: Path) -> Answers:
    """Return answer and trace by method and item, in the order of sequential requests."""
    if not (folder / "run.db").exists():
        return {}
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        stored = connection.execute("SELECT method, place, answer, trace FROM answers").fetchall()
    rows = {(method, item): (answer, trace) for method, item, answer, trace in stored}
    return dict(sorted(rows.items(), key=lambda row: (NAMES.index(row[0][0]), row[0][1])))


def requests(kept: tuple[str, str]) -> int:
    tree = orjson.loads(kept[1])["tree"]
    return tree["requests"] if tree else 1
