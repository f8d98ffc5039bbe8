"""MathVision in its published layout against a real endpoint: killed, failing, counted."""

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
from tests.cli.conftest import Run, at_once
from tests.evaluation.benchmarks.published import write_image
from tests.reasoner import Reasoner, text_of
from tests.server import Server

MATHVISION = Path(__file__).resolve().parents[3] / "shared" / "data" / "mathvision"
NAMES = ("zero-shot", "random", "top-k", "rcts", "majority")
ROLLOUTS = 2
MOST = 1 + ROLLOUTS * 11  # completions that a search may ask for
KNOWN, ITEMS = 20, 12
SAMPLE = pytest.mark.parametrize("sampled", [False, True], ids=["drawn", "published"])


def asked(place: Path, *options: object) -> tuple[str, ...]:
    return (
        "eval", f"mathvision:{place}", "--methods", ",".join(NAMES), "--shots", "2", "--rollouts",
        str(ROLLOUTS), "--model", "openai:m", "--embed", "pixels", *map(str, options),
    )  # fmt: skip


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """Problems of our own in MathVision's layout, every other one with options."""
    root = tmp_path / "math"
    rows = [problem(number) for number in range(KNOWN + ITEMS)]
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
def place(drawn: Path, sampled: bool) -> Path:
    if sampled and not MATHVISION.is_dir():
        pytest.skip("needs ../shared/data/mathvision")
    return MATHVISION if sampled else drawn


@pytest.fixture
def reasoner(served: Server) -> Reasoner:
    served.answers = [reasoner := Reasoner()]
    return reasoner


def results(file: str = "f.json") -> dict[str, dict[str, Any]]:
    document = orjson.loads(Path(file).read_bytes())
    return {row["method"]: row | {"seconds": 0} for row in document["results"]}


@SAMPLE
def test_every_method_counts_its_calls_and_cost(run: Run, reasoner: Reasoner, place: Path) -> None:
    done = run(*asked(place, "--limit", 6), "--price", "1,1", "--json", "f.json")
    assert done.code == 0, done.err
    rows = results()
    assert tuple(rows) == NAMES
    assert all((row["n"], row["failed"], row["invalid"]) == (6, 0, 0) for row in rows.values())
    # Of rcts all that its trees have asked, not the chosen branch's reply alone.
    assert sum(row["calls"] for row in rows.values()) == reasoner.samples
    assert sum(row["prompt_tokens"] for row in rows.values()) == reasoner.prompt_tokens
    assert sum(row["completion_tokens"] for row in rows.values()) == 2 * reasoner.samples
    assert [rows[name]["calls"] for name in NAMES if name != "rcts"] == [6, 6, 6, 6 * MOST]
    assert 6 * 3 <= rows["rcts"]["calls"] <= 6 * MOST
    for row in rows.values():
        spent = (row["prompt_tokens"] + row["completion_tokens"]) / 1e6
        assert row["cost_usd"] == pytest.approx(spent)
    assert "demonstrations of rcts, majority include rationales" in done.err


def test_rationale_options_select_the_prompts(run: Run, reasoner: Reasoner, drawn: Path) -> None:
    def shown(*options: str) -> dict[str, set[bool]]:
        """By method whether its requests ask for reasons."""
        found = {}
        for name in ("zero-shot", "top-k", "majority"):
            reasoner.order.clear()
            run(*asked(drawn, "--limit", 2, "--methods", name, *options))
            texts = [text_of(orjson.loads(one)["messages"][-1]) for one in reasoner.order]
            found[name] = {"BECAUSE" in text for text in texts}
        return found

    assert shown() == {"zero-shot": {False}, "top-k": {False}, "majority": {True}}
    assert shown("--rationales") == {"zero-shot": {False}, "top-k": {True}, "majority": {True}}
    assert set(map(frozenset, shown("--no-rationales").values())) == {frozenset({False})}
    kept = asked(drawn, "--limit", 2, "--methods", "zero-shot", "--out", "kept")
    assert run(*kept).code == 0
    assert "rationales null, not false" in run(*kept, "--no-rationales").err


def test_written_rationales_become_demonstrations(
    run: Run, reasoner: Reasoner, drawn: Path
) -> None:
    added = run("add", "kb.db", f"mathvision:{drawn}", "--embed", "pixels", "--json").json
    assert added["examples"] == KNOWN  # type: ignore[index]  # nothing of what is asked
    written = ("rationales", "kb.db", "--model", "openai:m", "--again", "--candidates", 2)
    made = run(*written, "--predictions", 4, "--json")
    assert made.code == 0, made.err
    kept = made.json["rows"]["this run"]["kept"]["n"]  # type: ignore[index]
    assert 0 < kept < KNOWN
    reasoner.order.clear()
    command = asked(drawn, "--methods", "random", "--rationales", "--json", "f.json")
    done = run(*command, "--rationales-from", "kb.db")
    assert done.code == 0, done.err
    assert "labelled examples from kb.db" in done.err
    assert orjson.loads(Path("f.json").read_bytes())["explained"] == ["random"]
    shown = [message for one in reasoner.order for message in orjson.loads(one)["messages"]]
    said = [text_of(message) for message in shown if message["role"] == "assistant"]
    assert len(said) == 24
    assert 0 < sum("BECAUSE: Way " in text for text in said) < 24
    other = run("eval", "attributes:examples=30,queries=2", "--rationales-from", "kb.db")
    assert other.code == 2
    assert "bottega rationales" in other.err


def test_a_killed_run_resumes_with_equal_results(
    run: Run, reasoner: Reasoner, tmp_path: Path, drawn: Path
) -> None:
    """Killed at random moments; a question that was answered is never asked again."""
    options = asked(drawn, "--limit", 4, "--concurrency", 1)
    assert run(*options, "--out", "whole", "--json", "whole.json").code == 0
    whole = list(reasoner.order)
    sizes = [requests(one) for one in answers(tmp_path / "whole").values()]
    assert sum(sizes) == len(whole)

    def left() -> Counter[bytes]:
        """What is still to be sent, after all questions that were answered."""
        return Counter(whole[sum(sizes[: len(answers(tmp_path / "killed"))]) :])

    command = [sys.executable, "-m", "bottega", *options, "--out", "killed"]
    rng = random.Random()
    for _ in range(2):
        reasoner.order.clear()
        before = left()
        stop = rng.randrange(1, max(2, before.total() - 5))
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 60
            while len(reasoner.order) < stop and time.monotonic() < deadline:
                assert process.poll() is None
                time.sleep(0.002)
            os.kill(process.pid, signal.SIGKILL)
        assert len(reasoner.order) >= stop
        assert not Counter(reasoner.order) - before
    missing = left()
    reasoner.order.clear()
    assert run(*options, "--out", "killed", "--json", "killed.json").code == 0
    assert Counter(reasoner.order) == missing
    assert results("killed.json") == results("whole.json")
    reasoner.order.clear()
    assert run(*options, "--out", "killed").code == 0
    assert reasoner.order == []


@SAMPLE
def test_failed_requests_are_excluded_and_repeated(
    run: Run, reasoner: Reasoner, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = partial(OpenAIGenerator, timeout=0.5, retries=RetryPolicy(2, sleep=at_once))
    monkeypatch.setattr(naming, "OpenAIGenerator", brief)
    options = asked(place, "--limit", 12)
    assert run(*options, "--json", "whole.json").code == 0
    reasoner.failing = 0.06
    done = run(*options, "--out", "kept", "--json", "kept.json")
    assert done.code == 1
    assert len(reasoner.ways) > 1
    rows, kept = results("kept.json"), answers(Path("kept"))
    assert rows["rcts"]["failed"] > 0 and rows["rcts"]["n"] > 0
    assert sum(row["failed"] for row in rows.values()) == 5 * 12 - len(kept)
    for name, row in rows.items():
        assert row["n"] == 12 - row["failed"] == sum(method == name for method, _ in kept)
    reasoner.failing = 0.0
    reasoner.order.clear()
    again = run(*options, "--out", "kept", "--json", "again.json")
    assert again.code == 0, again.err
    # As if nothing had ever failed; and what was answered stays, with its whole tree, unasked.
    assert results("again.json") == results("whole.json")
    now = answers(Path("kept"))
    assert kept.items() <= now.items()
    fresh = [now[key] for key in now.keys() - kept.keys()]
    assert len(reasoner.order) == sum(map(requests, fresh)) > 0


Kept = dict[tuple[str, int], tuple[str, str]]


def answers(folder: Path) -> Kept:
    """Answer and trace, by method and item, in the order in which they are asked one by one."""
    if not (folder / "run.db").exists():
        return {}
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        found = connection.execute("SELECT method, place, answer, trace FROM answers").fetchall()
    rows = {(method, place): (said, trace) for method, place, said, trace in found}
    return dict(sorted(rows.items(), key=lambda row: (NAMES.index(row[0][0]), row[0][1])))


def requests(kept: tuple[str, str]) -> int:
    tree = orjson.loads(kept[1])["tree"]
    return tree["requests"] if tree else 1
