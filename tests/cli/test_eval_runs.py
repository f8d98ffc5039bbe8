"""Interrupted runs of `bottega eval` resume without repeated requests; a real server answers."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
from pathlib import Path

import orjson
import pytest
from aiohttp import web

from bottega.evaluation.benchmarks.loading import load_benchmark
from tests.cli.conftest import Run
from tests.server import Server, ok, refuse, stall

METHODS = ("--methods", "zero-shot,top-k", "--shots", 1, "--model", "openai:m", "--concurrency", 1)
MATHVISION = Path(__file__).resolve().parents[3] / "shared" / "data" / "mathvision"
GOOD = ok("Answer Choice: leaf")


def results(run: Run, pets: Path, *options: object) -> list[dict[str, object]]:
    done = run("eval", f"image-folder:{pets}", *METHODS, "--json", "f.json", *options)
    assert done.code == 0, done.err
    rows: list[dict[str, object]] = orjson.loads(Path("f.json").read_bytes())["results"]
    return [row | {"seconds": 0} for row in rows]


def test_only_failed_items_are_repeated(run: Run, pets: Path, served: Server) -> None:
    served.answers = [GOOD]
    complete = results(run, pets)
    served.answers, served.bodies[:] = [GOOD, refuse(400, "filtered"), GOOD], []
    failed = run("eval", f"image-folder:{pets}", *METHODS, "--out", "kept")
    assert failed.code == 1
    assert "failed: zero-shot, item 1: " in failed.out
    assert len(served.bodies) == 6
    served.answers, served.bodies[:] = [GOOD], []
    assert results(run, pets, "--out", "kept") == complete
    assert len(served.bodies) == 1


async def interrupt(request: web.Request) -> web.StreamResponse:
    """Press Ctrl-C, as a person would while a request is in progress."""
    os.kill(os.getpid(), signal.SIGINT)
    return await stall()(request)


def test_an_interrupted_run_says_what_it_keeps(run: Run, pets: Path, served: Server) -> None:
    served.answers = [GOOD, GOOD, GOOD, GOOD, interrupt]
    stopped = run("eval", f"image-folder:{pets}", *METHODS, "--out", "kept")
    assert stopped.code == 130
    assert "interrupted: 4 answers in kept; repeat the command to resume" in stopped.err
    assert "zero-shot" in stopped.out  # the complete method
    served.answers, served.bodies[:] = [GOOD], []
    assert len(results(run, pets, "--out", "kept")) == 2
    assert len(served.bodies) == 2
    served.answers, served.bodies[:] = [interrupt], []
    lost = run("eval", f"image-folder:{pets}", *METHODS)
    assert (lost.code, "--out FOLDER stores each answer" in lost.err) == (130, True)


def test_an_unreachable_endpoint_scores_nothing(
    run: Run, pets: Path, served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.answers = [GOOD]
    complete = results(run, pets)
    with monkeypatch.context() as patched:
        patched.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
        dead = run("eval", f"image-folder:{pets}", *METHODS, "--out", "kept", "--json", "dead.json")
    assert dead.code == 1
    assert "item 0" in dead.out
    assert not Path("dead.json").exists()
    assert results(run, pets, "--out", "kept") == complete


def test_a_larger_budget_resumes_a_run(run: Run, pets: Path, served: Server) -> None:
    served.answers = [GOOD]
    priced = ("--price", "1,1", "--out", "kept")
    complete = results(run, pets, "--price", "1,1")
    served.bodies.clear()
    [zero, top] = results(run, pets, *priced, "--budget", "0.00005")
    assert (zero["n"], top["n"], top["missing"]) == (3, 1, 2)
    assert results(run, pets, *priced, "--budget", 1) == complete
    assert len(served.bodies) == 6
    refused = run("eval", f"image-folder:{pets}", *METHODS, "--budget", 1)
    assert refused.code == 2
    assert "price" in refused.err


def test_another_command_does_not_resume_a_run(run: Run, pets: Path, served: Server) -> None:
    served.answers = [GOOD]
    results(run, pets, "--out", "kept")
    other = run("eval", f"image-folder:{pets}", *METHODS, "--out", "kept", "--seed", 1)
    assert other.code == 2
    assert "--seed 0, got 1" in other.err


def test_stop_texts_belong_to_the_run(run: Run, pets: Path, served: Server) -> None:
    served.answers = [GOOD]
    results(run, pets, "--out", "without")
    assert "stop" not in served.bodies[0]
    stops = ("--stop", r"\n\n", "--stop", "Human:")
    results(run, pets, "--out", "kept", *stops)
    assert served.bodies[-1]["stop"] == ["\n\n", "Human:"]
    served.bodies.clear()
    results(run, pets, "--out", "kept", *stops)
    results(run, pets, "--out", "without")
    assert served.bodies == []
    for folder, options in (("kept", ()), ("without", stops)):
        other = run("eval", f"image-folder:{pets}", *METHODS, "--out", folder, *options)
        assert other.code == 2
        assert "with --stop" in other.err


def test_majority_requests_several_samples(run: Run, pets: Path, served: Server) -> None:
    served.answers = [ok("leaf", "sky", "leaf")]
    done = run(
        "eval", f"image-folder:{pets}", "--methods", "majority", "--shots", 2, "--samples", 3,
        "--model", "openai:m", "--json", "f",
    )  # fmt: skip
    assert done.code == 0
    [row] = orjson.loads(Path("f").read_bytes())["results"]
    assert (row["value"], row["calls"]) == (pytest.approx(1 / 3), 9)
    assert len(served.bodies) == 3
    assert {(body["n"], body["temperature"]) for body in served.bodies} == {(3, 0.7)}


def test_rounds_keep_the_order_of_the_items(run: Run, pets: Path, served: Server) -> None:
    served.answers = [GOOD]
    options = ("--methods", "zero-shot", "--round-size", 1, "--model", "openai:m")
    assert run("eval", f"image-folder:{pets}", *options).code == 0
    items = load_benchmark(f"image-folder:{pets}", seed=0).items
    shown = [body["messages"][0]["content"][0]["image_url"]["url"] for body in served.bodies]
    assert shown == [item.query.images[0].data_url for item in items]


@pytest.mark.skipif(not MATHVISION.exists(), reason="sample data are absent")
@pytest.mark.slow
def test_a_published_benchmark_is_evaluated(run: Run, served: Server) -> None:
    served.answers = [ok("Final answer: (B)")]
    done = run(
        "eval", f"mathvision:{MATHVISION}", "--methods", "zero-shot,random,top-k", "--shots", 2,
        "--model", "openai:m", "--json", "f",
    )  # fmt: skip
    assert done.code == 0, done.err
    document = orjson.loads(Path("f").read_bytes())
    assert (document["items"], document["knowledge_base"]) == (24, 72)
    assert [row["n"] for row in document["results"]] == [24, 24, 24]
    images = [orjson.dumps(body).count(b'"type":"image_url"') for body in served.bodies]
    assert images == [1] * 24 + [3] * 48


def test_custom_jsonl_data_are_evaluated(run: Run, served: Server) -> None:
    def line(i: int, **more: object) -> str:
        return orjson.dumps(
            {"question": f"What is {i} and {i}?", "answer": str(2 * i), **more}
        ).decode()

    choices = {"choices": ["2", "4", "6", "8", "10"]}
    for name, more in (("free", {}), ("choices", choices)):
        Path(name).mkdir()
        Path(name, "train.jsonl").write_text("\n".join(line(i, **more) for i in (1, 2)))
        Path(name, "test.jsonl").write_text("\n".join([line(3, **more), line(4, **more), "{}"]))
    served.answers = [ok("(C)")]
    options = ("--methods", "zero-shot", "--model", "openai:m", "--json", "f")
    done = run("eval", "jsonl:choices", *options)
    [row] = orjson.loads(Path("f").read_bytes())["results"]
    assert (done.code, row["value"], row["invalid"]) == (0, 0.5, 0)
    assert "choices of each question" in done.out
    assert "1 unreadable example is excluded" in done.out
    assert "(C) 6" in str(served.bodies[0])
    assert run("eval", "jsonl:free", *options).code == 0
    assert "short phrase" in str(served.bodies[-1])
    assert "Choices" not in str(served.bodies[-1])
    unsupported = run("eval", "jsonl:free", "--methods", "top-k", "--model", "openai:m")
    assert (unsupported.code, "(retrieve or --retrieve) to text" in unsupported.err) == (2, True)
    assert (
        run("eval", "jsonl:free", "--methods", "top-k", "--retrieve", "text", *options[2:]).code
        == 0
    )


REFUSAL = "Please upload an image of the cat, dog, bird or fish"


@pytest.fixture
def refused_questions() -> str:
    """Return a multiple-choice benchmark of files."""
    choices = ["cat", "dog", "bird", "fish"]
    rows = [
        {"question": f"Which animal is in picture {i}?", "answer": one, "choices": choices}
        for i, one in enumerate(choices * 3)
    ]
    Path("mcq").mkdir()
    for name, part in (("train", rows[:2]), ("test", rows[2:])):
        lines = [orjson.dumps(row).decode() for row in part]
        Path("mcq", f"{name}.jsonl").write_text("\n".join(lines))
    return "jsonl:mcq"


def test_refusals_are_invalid(run: Run, served: Server, refused_questions: str) -> None:
    served.answers = [ok(REFUSAL)]
    options = ("--methods", "zero-shot", "--model", "openai:m", "--json", "f")
    assert run("eval", refused_questions, *options).code == 0
    [row] = orjson.loads(Path("f").read_bytes())["results"]
    assert (row["n"], row["value"], row["invalid"]) == (10, 0, 10)


def test_a_stream_stores_no_refusals(run: Run, served: Server, refused_questions: str) -> None:
    served.answers = [ok(REFUSAL)]
    models = ("--master", "openai:large", "--apprentice", "openai:small")
    rates = ("--master-rate", "0.5", "--orders", 1, "--start", "none", "--retrieve", "text")
    order = ("--concurrency", 1, "--controls", "no-cache")
    done = run("stream", refused_questions, *models, *rates, *order)
    assert done.code == 0, done.err
    roles = [one["role"] for body in served.bodies for one in body["messages"]]
    assert roles and "assistant" not in roles  # no earlier answer is shown as a demonstration


RCTS = ("--methods", "top-k,rcts", "--shots", 1, "--rollouts", 2, "--model", "openai:m")


async def reasoner(request: web.Request) -> web.StreamResponse:
    """Give a reason that leads to the answer "leaf" only, where the prompt asks for reasons."""
    body = str((await request.json())["messages"])
    name = "leaf" if "Answer: leaf" in body else "sky"
    reply = f"It is green.\nAnswer: {name}" if "Explain your reasoning" in body else "leaf"
    return await ok(*[reply] * (await request.json()).get("n", 1))(request)


def test_rcts_rewards_the_reasons_for_its_answers(run: Run, pets: Path, served: Server) -> None:
    served.answers = [reasoner]
    evaluation = ("eval", f"image-folder:{pets}", *RCTS, "--out", "kept", "--json", "f")
    done = run(*evaluation, "--traces", "t.db")
    assert done.code == 0, done.err
    shown = orjson.loads(Path("f").read_bytes())["shown"]
    expected = {"rationales": "none", "prompt": "reasoned", "max_tokens": "512"}
    assert expected.items() < shown["rcts"].items()
    assert shown["rcts"]["reward"] == "both (alpha 0.2)"
    assert shown["top-k"] == {"rationales": "none"}
    noted = "the prompt of rcts asks for reasons (up to 512 tokens), but that of top-k does not"
    assert noted in done.err
    with sqlite3.connect("kept/run.db") as run_file:
        trees = run_file.execute("SELECT json_extract(trace, '$.tree') FROM answers").fetchall()
    rewards = set(re.findall(r'"self":([0-9.]+)', str(trees)))
    assert {float(reward) for reward in rewards} == {0.0, 1.0}
    # Labels need 64 tokens, reasons more.
    limits = {bool("Explain" in str(body)): body["max_tokens"] for body in served.bodies[:6]}
    assert limits == {False: 64, True: 512}
    run("report", "kept", "--out", "page")
    assert "rcts (rationales none, prompt reasoned" in Path("page/index.html").read_text()
    assert "top-k (rationales none)" in Path("page/results.md").read_text()


def test_methods_with_another_number_of_samples_are_not_resumed(run: Run) -> None:
    command = (
        *("eval", "codes:notebooks=5", "--limit", 2, "--methods", "rcts,majority", "--rollouts", 2),
        *("--out", "kept"),
    )
    assert run(*command).code == 0
    resumed = run(*command)
    assert (resumed.code, "stored answers in kept are reused" in resumed.err) == (0, True)
    refused = run(*command[:5], "majority", *command[6:], "--shots", 3)
    assert "answers of majority with samples 18, got 5" in refused.err


def test_answers_with_another_default_prompt_are_not_resumed(
    run: Run, pets: Path, served: Server
) -> None:
    served.answers = [reasoner]
    evaluation = ("eval", f"image-folder:{pets}", *RCTS, "--out", "kept")
    assert run(*evaluation).code == 0
    with sqlite3.connect("kept/run.db") as run_file:
        run_file.execute("DELETE FROM settings WHERE name = 'shown'")
    run_file.close()
    refused = run(*evaluation)
    assert refused.code == 2
    assert "kept holds answers of rcts with prompt unset, got reasoned" in refused.err
    others = ("--methods", "top-k", *RCTS[2:], "--out", "kept")
    assert run("eval", f"image-folder:{pets}", *others).code == 0
