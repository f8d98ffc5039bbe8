"""`bottega rationales` against a real server and a real file."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import typer
from aiohttp import web

from bottega import naming
from bottega.cli import rationales
from bottega.generation import OpenAIGenerator
from bottega.knowledge import KnowledgeBase
from bottega.rationales import ACCURACY
from bottega.types import Example
from tests.cli.conftest import Run
from tests.knowledge.doubles import SeededEmbedder, text_example
from tests.server import Server, ok, raw, refuse

COMMAND = ("rationales", "kb.db", "--model", "openai:m", "--candidates", 3, "--predictions", 2)


async def reasoning_endpoint(request: web.Request) -> web.StreamResponse:
    """Answer every question correctly except q1, and reject q2."""
    body = await request.json()
    text = str(body["messages"][-1]["content"])
    if "q2" in text:
        return await refuse(400, "filtered")(request)
    reply = "Think." if "**Answer:**" in text else "no" if "q1" in text else "yes"
    texts = [f"{reply}{i}" if reply == "Think." else reply for i in range(body["n"])]
    return await ok(*texts)(request)


@pytest.fixture
def kb(tmp_path: Path, run: Run, served: Server) -> Path:
    served.answers = [reasoning_endpoint]
    with KnowledgeBase.open(tmp_path / "kb.db", SeededEmbedder()) as kb:
        kb.add([text_example(f"q{i}") for i in range(4)])
        kb.add([text_example("explained", rationale="By heart."), text_example("passage", "")])
        kb.pin([kb.ids()[0]])
    return tmp_path / "kb.db"


def examples(path: Path) -> dict[str, Example]:
    with KnowledgeBase.open(path, None) as kb:
        return {e.query.text: e for e in kb}


def test_a_dry_run_counts_the_calls_and_sends_none(run: Run, kb: Path, served: Server) -> None:
    done = run(*COMMAND, "--fresh", 1, "--limit", 2, "--dry-run")
    plan = "kb.db: 2 examples to explain, 1 with a rationale; openai:m; at most 20 calls\n"
    assert (done.code, done.out, served.bodies) == (0, plan, [])


def test_the_table_counts_entries_kept_and_candidates(run: Run, kb: Path, served: Server) -> None:
    before = examples(kb)
    done = run(*COMMAND, "--price", "1,1")
    assert done.code == 1
    # q0 and q3 take two requests, q1 verifies all three candidates, q2 is refused.
    rows = [" ".join(line.split()) for line in done.out.split("\n")[1:4]]
    assert rows == [
        "this run entries 3 0.667 0.208 0.939",
        "this run kept 2 1.000 0.342 1.000",
        "this run candidates 3 0.667 0.208 0.939",
    ]
    assert "2 kept, 1 rejected, 1 failed; 8 requests, 19 calls, 80 tokens in, 38 out" in done.out
    assert "for 0.0001 USD" in done.out
    assert f"skipped: {before['q2'].id}: " in done.err
    assert "1 example left (without --limit), 1 came with a rationale, 1 have no answer" in done.err
    after = examples(kb)
    assert (after["q0"].rationale, after["q3"].rationale) == ("Think.0", "Think.0")
    assert (after["q1"].rationale, after["q1"].tags) == (None, {ACCURACY: "0"})
    assert [after[q] for q in ("q2", "explained", "passage")] == [
        before[q] for q in ("q2", "explained", "passage")
    ]
    with KnowledgeBase.open(kb, SeededEmbedder()) as knowledge:
        assert knowledge.metadata(str(after["q0"].id)).pinned
        assert knowledge.verify(deep=True).sound
    assert {body.get("n") for body in served.bodies} == {2, 3}
    assert {body["temperature"] for body in served.bodies} == {0.7}


def test_a_repeated_command_skips_finished_examples(run: Run, kb: Path, served: Server) -> None:
    first = run(*COMMAND, "--limit", 2, "--json")
    assert first.code == 0
    assert first.json["rows"] == {  # type: ignore[index]
        "this run": {
            "entries": figure(2, 0.5, 0.0945, 0.9055),
            "kept": figure(1, 1.0, 0.2065, 1.0),
            "candidates": figure(2, 0.5, 0.0945, 0.9055),
        }
    }
    assert first.json["cost_usd"] is None  # type: ignore[index]
    served.bodies.clear()
    second = run(*COMMAND)
    assert "with earlier ones" in second.out
    assert not any("q0" in str(body) or "q1" in str(body) for body in served.bodies)
    served.answers = [ok("yes", "yes", "yes")]
    last = run(*COMMAND, "--json")
    assert (last.code, last.json["left"]) == (0, 0)  # type: ignore[index]
    served.bodies.clear()
    assert run(*COMMAND).code == 0
    assert served.bodies == []
    assert run(*COMMAND, "--again", "--limit", 1).code == 0
    assert served.bodies != []


def figure(n: int, value: float, low: float, high: float) -> dict[str, object]:
    numbers = {"accuracy": value, "low": low, "high": high}
    return {"n": n, **{name: pytest.approx(number, abs=1e-4) for name, number in numbers.items()}}


# Right predictions out of four, for each of two candidates; q2 and q3 fail at first.
RIGHT_COUNTS = {"q0": (2, 4), "q1": (3, 1), "q2": (3, 2), "q3": (0, 0), "q4": (0, 0)}


class RightPredictions:
    """Endpoint that writes rationales, and answers correctly as often as `RIGHT_COUNTS` states."""

    def __init__(self) -> None:
        self.failures = {"q2": refuse(500, "overloaded"), "q3": raw(b'{"choices": [')}

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text = str(body["messages"][-1]["content"])
        question = next(name for name in RIGHT_COUNTS if name in text)
        if question in self.failures and "**Answer:**" not in text:
            return await self.failures[question](request)
        if "**Answer:**" in text:
            return await ok("Way 0: look.", "Way 1: count.")(request)
        right = RIGHT_COUNTS[question]["Way 1" in text]
        return await ok(*["Answer: yes"] * right, *["Answer: no"] * (4 - right))(request)


def test_table_6_counts_rejected_but_not_failed_examples(
    run: Run, served: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(naming, "OpenAIGenerator", partial(OpenAIGenerator, retries=0))
    served.answers = [predictions := RightPredictions()]
    with KnowledgeBase.open(tmp_path / "kb.db", SeededEmbedder()) as kb:
        kb.add([text_example(name) for name in RIGHT_COUNTS])
    counts = ("--candidates", 2, "--predictions", 4, "--all-candidates")
    command = ("rationales", "kb.db", "--model", "openai:m", *counts, "--json")
    first = run(*command)
    assert (first.code, first.json["failed"], first.json["left"]) == (1, 2, 2)  # type: ignore[index]
    rows = first.json["rows"]["this run"]  # type: ignore[index]
    assert {of: (row["n"], row["accuracy"]) for of, row in rows.items()} == {
        "entries": (3, pytest.approx((1 + 0.75 + 0) / 3)),
        "kept": (2, pytest.approx((1 + 0.75) / 2)),
        "candidates": (3, pytest.approx((0.75 + 0.5 + 0) / 3)),
    }
    assert all(row["low"] < row["accuracy"] < row["high"] for row in rows.values())
    kept = examples(tmp_path / "kb.db")
    assert [kept[q].rationale for q in RIGHT_COUNTS] == [
        "Way 1: count.",
        "Way 0: look.",
        *[None] * 3,
    ]
    assert [ACCURACY in kept[q].tags for q in RIGHT_COUNTS] == [True, True, False, False, True]
    predictions.failures = {}
    second = run(*command)
    assert (second.code, second.json["failed"], second.json["left"]) == (0, 0, 0)  # type: ignore[index]
    rows = second.json["rows"]["with earlier ones"]  # type: ignore[index]
    assert {of: (row["n"], row["accuracy"]) for of, row in rows.items()} == {
        "entries": (5, pytest.approx((1 + 0.75 + 0 + 0.75 + 0) / 5)),
        "kept": (3, pytest.approx((1 + 0.75 + 0.75) / 3)),
    }


def test_a_budget_holds_even_if_all_candidates_are_needed(
    run: Run, kb: Path, served: Server
) -> None:
    # A request costs 14 to 16 micro-USD; the first example takes two, the next one up to four.
    priced = (*COMMAND, "--price", "1,1", "--json", "--concurrency", 1)
    done = run(*priced, "--budget", "0.00004")
    assert (done.code, len(served.bodies)) == (0, 2)
    assert "a larger one to resume" in done.err
    more = run(*priced, "--budget", "0.0002")
    assert more.json["cost_usd"] <= 0.0002  # type: ignore[index]
    assert more.json["rows"]["this run"]["entries"]["n"] == 2  # type: ignore[index]
    unpriced = run(*COMMAND, "--again", "--budget", 1)
    assert unpriced.code == 2
    assert "price" in unpriced.err


def test_the_most_expensive_example_bounds_the_next_ones(
    run: Run, kb: Path, served: Server
) -> None:
    """The first example costs 2 of at most 4 cents, the second 6 of at most 12. The remaining 7 of
    15 cents do not cover another 12, although the third would cost 6."""

    async def varying_cost(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text = str(body["messages"][-1]["content"])
        used = {"prompt_tokens": 1 if "q0" in text else 3, "completion_tokens": 0}
        reply = "Think." if "**Answer:**" in text else "yes"
        choice = {"message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice] * body["n"], "usage": used})

    served.answers = [varying_cost]
    done = run(*COMMAND, "--price", "10000,0", "--json", "--concurrency", 1, "--budget", "0.15")
    assert done.json["cost_usd"] == pytest.approx(0.08)  # type: ignore[index]


def test_rejected_examples_are_reported(run: Run, kb: Path, served: Server) -> None:
    served.answers = [ok("no", "no", "no")]
    assert run(*COMMAND, "--limit", 3).code == 0
    last = run(*COMMAND, "--limit", 1)
    assert "no right rationale for 4 examples; retry with --again" in last.err
    assert "0 examples left" in last.err
    nothing = run(*COMMAND)
    assert "no right rationale for 4 examples" in nothing.err
    assert run(*COMMAND, "--json").json["rejected"] == 4  # type: ignore[index]


def test_an_unreachable_endpoint_changes_nothing(
    run: Run, kb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    before = kb.read_bytes()
    done = run(*COMMAND, "--json")
    assert done.code == 1
    assert "error: " in done.err
    assert (done.json["failed"], done.json["left"]) == (1, 4)  # type: ignore[index]
    assert kb.read_bytes() == before


@pytest.mark.parametrize("agrees", [True, False])
def test_a_terminal_user_confirms_the_cost(
    run: Run, kb: Path, served: Server, monkeypatch: pytest.MonkeyPatch, agrees: bool
) -> None:
    questions: list[str] = []

    def confirm(text: str, **options: object) -> bool:
        questions.append(text)
        return agrees

    monkeypatch.setattr(typer, "confirm", confirm)
    monkeypatch.setattr(rationales, "at_terminal", lambda: True)
    done = run(*COMMAND, "--price", "1,1")
    assert "3 more: about 0.0001 USD, up to 0.0002 USD" in done.err
    assert len(questions) == 1
    assert len(served.bodies) == (9 if agrees else 2)
    run(*COMMAND, "--yes", "--again", "--price", "1,1")
    run(*COMMAND, "--again", "--price", "0,0")
    run(*COMMAND, "--again", "--price", "1,1", "--limit", 1)  # no other examples to confirm
    assert len(questions) == 1
    run(*COMMAND, "--again")  # an unknown price may be more than zero
    assert len(questions) == 2


def test_the_bundled_model_cannot_reason(run: Run, kb: Path) -> None:
    done = run("rationales", "kb.db", "--model", "bundled")
    assert done.code == 2
    assert "bundled:apprentice answers in a word or two" in done.err
    assert "hint: use a model that reasons" in done.err


def test_a_missing_file_is_reported(run: Run, kb: Path) -> None:
    done = run("rationales", "no.db", "--model", "openai:m")
    assert done.code == 1
    assert "no.db" in done.err


async def luckier_at_first(request: web.Request) -> web.StreamResponse:
    """Predict the right answer twice in requests for two predictions, once in those for three."""
    body = await request.json()
    if "**Answer:**" in str(body["messages"][-1]["content"]):
        return await ok("Think.")(request)
    return await ok(*(["yes", "yes"] if body["n"] == 2 else ["yes", "no", "no"]))(request)


def test_fresh_predictions_stand_beside_the_optimistic_ones(
    run: Run, kb: Path, served: Server
) -> None:
    served.answers = [luckier_at_first]
    done = run(*COMMAND, "--candidates", 1, "--limit", 2, "--fresh", 3, "--json")
    assert done.code == 0, done.err
    row = done.json["rows"]["this run"]  # type: ignore[index]
    assert {of: (figure["n"], figure["accuracy"]) for of, figure in row.items()} == {
        "entries": (2, 1.0),
        "kept": (2, 1.0),
        "candidates": (2, 1.0),
        "fresh entries": (2, pytest.approx(1 / 3)),
        "fresh kept": (2, pytest.approx(1 / 3)),
    }
    assert "fresh" in run(*COMMAND, "--candidates", 1, "--again", "--fresh", 3, "--limit", 1).out
