"""Tests of `bottega stream` and `bottega answer` against a server on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import typer
from aiohttp import web

from bottega.cli import stream as stream_command
from tests.cli.conftest import Run
from tests.server import Server, ok, refuse, running

MODELS = ("--master", "openai:large", "--apprentice", "openai:small")
PRICES = ("--master-price", "3,5", "--apprentice-price", "1,2")


async def by_model(request: web.Request) -> web.StreamResponse:
    """Answer as the model named in the body: the large one knows, the small one repeats."""
    body = orjson.loads(await request.read())
    shown = [m["content"] for m in body["messages"] if m["role"] == "assistant"]
    known = "because\nAnswer: leaf" if body["model"] == "large" else "ruby"
    return await ok(shown[-1] if shown else known)(request)


def stream(run: Run, pets: Path, *options: object) -> dict[str, Any]:
    done = run("stream", f"image-folder:{pets}", *MODELS, *PRICES, "--json", "f.json", *options)
    assert done.code == 0, done.err
    figures: dict[str, Any] = orjson.loads(Path("f.json").read_bytes())
    return figures


@pytest.mark.parametrize("agrees", [True, False])
def test_a_terminal_user_confirms_many_paid_requests(
    run: Run, pets: Path, served: Server, monkeypatch: pytest.MonkeyPatch, agrees: bool
) -> None:
    questions: list[str] = []

    def confirm(text: str, **options: object) -> bool:
        questions.append(text)
        return agrees

    served.answers = [by_model]
    monkeypatch.setattr(typer, "confirm", confirm)
    monkeypatch.setattr(stream_command, "at_terminal", lambda: True)
    command = ("stream", f"image-folder:{pets}", *MODELS, "--master-rate", "0.5", "--orders", 2)
    few = run(*command, *PRICES, "--controls", "none")  # three items
    assert "about 6 paid requests for 0.0" in few.err
    assert (few.code, questions, bool(served.bodies)) == (0, [], True)
    served.bodies.clear()
    monkeypatch.setattr(stream_command, "MOST_UNCONFIRMED", 5)
    many = run(*command, *PRICES, "--controls", "none", "--out", "kept")
    assert (many.code, len(questions), bool(served.bodies)) == (not agrees, 1, agrees)
    assert run(*command, *PRICES, "--controls", "none", "--yes", "--out", "kept").code == 0
    done = run(*command, *PRICES, "--controls", "none", "--out", "kept")  # nothing is left
    assert (done.code, len(questions)) == (0, 1)
    unknown = run(*command, "--controls", "none")
    assert "about 6 paid requests for an unknown price" in unknown.err
    assert len(questions) == 2
    free = ("--master-price", "0,0", "--apprentice-price", "0,0")
    ran = run(*command, *free, "--controls", "none")
    assert (len(questions), "paid requests" in ran.err) == (2, False)


def test_many_paid_requests_without_a_terminal_need_an_option(
    run: Run, pets: Path, served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.answers = [by_model]
    monkeypatch.setattr(stream_command, "MOST_UNCONFIRMED", 5)
    command = ("stream", f"image-folder:{pets}", *MODELS, "--master-rate", "0.5", "--orders", 2)
    refused = run(*command, *PRICES, "--controls", "none", "--out", "kept")
    assert (refused.code, served.bodies, "add --yes" in refused.err) == (2, [], True)
    assert run(*command, *PRICES, "--controls", "none", "--out", "kept", "--yes").code == 0
    assert run(*command, *PRICES, "--controls", "none", "--out", "kept").code == 0  # nothing left


def test_stream_costs_equal_the_servers_count(run: Run, pets: Path, served: Server) -> None:
    served.answers = [by_model]
    figures = stream(
        run, pets, "--master-rate", "0.5", "--orders", 2, "--start", "none,warm", "--out", "kept"
    )
    large = sum(body["model"] == "large" for body in served.bodies)
    small = len(served.bodies) - large
    assert large and small
    assert figures["requests"] == len(served.bodies)
    assert figures["cost_usd"] == pytest.approx((large * 40 + small * 14) / 1e6)
    for body in served.bodies:
        assert "step by step" in body["messages"][-1]["content"][-1]["text"]
    assert any("because" in m["content"] for b in served.bodies for m in b["messages"][1:-1])
    master = next(one for one in figures["curves"] if one["rate"] == 1)
    assert master["cost_usd"] == pytest.approx(master["n"] * 40 / 1e6)
    # The same command sends nothing.
    served.bodies.clear()
    again = stream(
        run, pets, "--master-rate", "0.5", "--orders", 2, "--start", "none,warm", "--out", "kept"
    )
    assert (served.bodies, again) == ([], figures)
    done = run("report", "kept")
    assert done.code == 0, done.err
    page = Path("kept/report/index.html").read_text("utf-8")
    assert "Accuracy of all answers (Fig. 5)" in page and "warm start, image" in page
    lines = Path("kept/report/streams.csv").read_text("utf-8").splitlines()
    assert len(lines) == 1 + len(figures["curves"])


def test_dead_master_leaves_a_run_that_resumes(
    run: Run, pets: Path, served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.answers = [by_model]
    options = ("--master-rate", "0.5", "--orders", 1, "--concurrency", 1)
    complete = stream(run, pets, *options)
    command = ("stream", f"image-folder:{pets}", *MODELS, *PRICES, *options, "--out", "kept")
    with monkeypatch.context() as patched:
        patched.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
        dead = run(*command)
    assert dead.code == 1 and "error: " in dead.err
    served.answers = [by_model, by_model, refuse(401, "wrong key")]
    served.bodies.clear()
    refused = run(*command)
    assert refused.code == 1 and "wrong key" in refused.err
    served.answers = [by_model]
    resumed = stream(run, pets, *options, "--out", "kept")
    assert resumed["curves"] == complete["curves"]
    other = run(*command, "--shots", 2)
    assert other.code == 2 and "holds a run" in other.err


def test_failed_item_is_repeated(run: Run, pets: Path, served: Server) -> None:
    options = ("--master-rate", "0.5", "--orders", 1, "--concurrency", 1, "--out", "kept")
    served.answers = [refuse(400, "filtered"), by_model]
    failed = run("stream", f"image-folder:{pets}", *MODELS, *options)
    assert failed.code == 1 and "1 answer failed; repeat the command" in failed.out
    served.answers = [by_model]
    assert run("stream", f"image-folder:{pets}", *MODELS, *options).code == 0


def test_budget_ends_a_stream(run: Run, pets: Path, served: Server) -> None:
    served.answers = [by_model]
    options = ("--master-rate", "0.5", "--orders", 1, "--out", "kept")
    command = ("stream", f"image-folder:{pets}", *MODELS, *PRICES, *options)
    ended = run(*command, "--budget", "0.0001")
    assert ended.code == 0 and "could exceed the budget" in ended.out
    large = sum(body["model"] == "large" for body in served.bodies)
    assert (large * 40 + (len(served.bodies) - large) * 14) / 1e6 <= 0.0001
    assert "could exceed the budget" not in run(*command, "--budget", "1").out


def test_apprentice_has_an_endpoint_and_a_key_of_its_own(
    run: Run, pets: Path, served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-master")
    command = ("--master-rate", "0.5", "--orders", 1, "--stop", "\\n\\n")
    served.answers = [by_model]
    with running() as local:
        local.answers = [by_model]
        stream(run, pets, *command, "--apprentice-url", local.url)
        monkeypatch.setenv("APPRENTICE_API_KEY", "of-the-apprentice")
        stream(run, pets, *command, "--apprentice-url", local.url)
    assert {body["model"] for body in served.bodies} == {"large"}
    assert {one["Authorization"] for one in served.headers} == {"Bearer of-the-master"}
    assert {body["model"] for body in local.bodies} == {"small"}
    keys = [one.get("Authorization") for one in local.headers]
    assert keys[0] is None and keys[-1] == "Bearer of-the-apprentice"
    assert set(keys) == {None, "Bearer of-the-apprentice"}
    assert all(body["stop"] == ["\n\n"] for body in (*served.bodies, *local.bodies))


@pytest.mark.slow
def test_trends_and_phases_are_reported(run: Run, pets: Path, served: Server) -> None:
    served.answers = [by_model]
    options = ("--master-rate", "0.2,0.5,0.8", "--orders", 2, "--phases", 2, "--out", "kept")
    figures = stream(run, pets, *options)
    assert figures["phases"] == 2
    assert [one["over"] for one in figures["trends"]][:1] == ["master's rate"]
    assert run("report", "kept").code == 0
    page = Path("kept/report/index.html").read_text("utf-8")
    assert "<h3>Trends</h3>" in page
    assert "Page's trend test" in Path("kept/report/results.md").read_text("utf-8")
    many = run("stream", f"image-folder:{pets}", *MODELS, "--phases", 9, "--dry-run")
    assert many.code == 2 and "--phases must not exceed the 3 different answers" in many.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--router", "dice"), "--router must be one of coin, coverage, half-first, got 'dice'"),
        (("--master-rate", "10"), "--master-rate must be shares between 0 and 1, got '10'"),
        (("--evict", "lru"), "--evict lru needs a capacity"),
        (("--start", "hot"), "--start must be one of none, cold, warm, got 'hot'"),
        (("--tiers", "bundled,bundled:master"), "--tiers replaces --master and --apprentice"),
    ],
)
def test_wrong_options(run: Run, pets: Path, options: tuple[str, ...], message: str) -> None:
    done = run("stream", f"image-folder:{pets}", *MODELS, *options)
    assert done.code == 2 and message in done.err


def test_stream_needs_a_master(run: Run, pets: Path) -> None:
    done = run("stream", f"image-folder:{pets}")
    assert done.code == 2 and "a stream needs a master" in done.err


def test_answers_replace_the_gold_ones(run: Run, pets: Path, served: Server) -> None:
    """The master answers every labelled question with `leaf`."""
    served.answers = [by_model]
    part = run("answer", "m.db", f"image-folder:{pets}", "--model", "openai:large", "--limit", 4)
    assert part.code == 0 and "answers to 4 of 9 labelled questions" in part.out
    assert len(served.bodies) == 4
    rest = run("answer", "m.db", f"image-folder:{pets}", "--model", "openai:large")
    assert "answers to 9 of 9" in rest.out and "3 of 9 equal the gold answer" in rest.out
    assert len(served.bodies) == 9
    assert "step by step" in served.bodies[0]["messages"][-1]["content"][-1]["text"]
    other = run("answer", "m.db", f"image-folder:{pets}", "--model", "openai:other")
    assert other.code == 2 and "m.db holds the answers of openai:large" in other.err
    served.bodies.clear()
    shown = run(
        *("eval", f"image-folder:{pets}", "--answers-from", "m.db", "--model", "openai:small"),
        *("--methods", "knn,top-k", "--shots", 3, "--json", "f.json", "--out", "kept"),
    )
    assert shown.code == 0, shown.err
    texts = orjson.dumps(served.bodies).decode()
    assert "Answer Choice: leaf" in texts and "Answer Choice: ruby" not in texts
    assert orjson.loads(Path("f.json").read_bytes())["answers_from"] == "m.db"
    gold = run("eval", f"image-folder:{pets}", "--methods", "knn,top-k", "--out", "kept")
    assert gold.code == 2 and "holds a run" in gold.err


def test_missing_answers_are_left_out(run: Run, pets: Path, served: Server) -> None:
    served.answers = [by_model]
    run("answer", "m.db", f"image-folder:{pets}", "--model", "openai:large", "--limit", 4)
    some = run(
        *("eval", f"image-folder:{pets}", "--answers-from", "m.db"),
        *("--methods", "knn", "--shots", 3),
    )
    assert some.code == 0 and "m.db lacks answers to 5 labelled questions" in some.err
    run("add", "gold.db", pets)
    mixed = run("answer", "gold.db", f"image-folder:{pets}", "--model", "openai:large")
    assert mixed.code == 2 and "without a master's answer" in mixed.err
    digits = run("eval", "digits", "--answers-from", "m.db", "--limit", 5, "--methods", "knn")
    assert digits.code == 2 and "the answers belong to other questions" in digits.err


def test_other_names_of_labels_are_read(run: Run, pets: Path, served: Server) -> None:
    """The large model says `foliage` where the label is leaf."""

    async def foliage(request: web.Request) -> web.StreamResponse:
        return await ok("It is green.\nAnswer: foliage")(request)

    served.answers = [foliage]
    Path("names.json").write_text('{"leaf": ["foliage", "grass"]}')
    spec = f"image-folder:{pets}"
    done = run("answer", "m.db", spec, "--model", "openai:large", "--synonyms", "names.json")
    assert done.code == 0 and "answers to 9 of 9" in done.out, done.err
    assert "3 of 9 equal the gold answer" in done.out
    figures = stream(run, pets, "--synonyms", "names.json", "--orders", 1, "--master-rate", "0.5")
    master = next(one for one in figures["curves"] if one["rate"] == 1)
    assert master["accuracy"]["value"] == pytest.approx(1 / 3)
    Path("names.json").write_text('{"fish": ["trout"]}')
    wrong = run("eval", spec, "--synonyms", "names.json", "--methods", "knn")
    assert wrong.code == 2 and "names of 'fish', which is not a label" in wrong.err
    Path("names.json").write_text('["leaf"]')
    broken = run("eval", spec, "--synonyms", "names.json", "--methods", "knn")
    assert broken.code == 2 and "is not a JSON object of lists" in broken.err


def test_changed_answers_of_the_master_start_warm_streams_again(
    run: Run, pets: Path, served: Server
) -> None:
    served.answers = [by_model]
    answer = ("answer", "m.db", f"image-folder:{pets}", "--model", "openai:large")
    run(*answer, "--limit", 2)
    options = ("--start", "none,warm", "--answers", "m.db", "--master-rate", "0", "--orders", 1)
    stream(run, pets, *options, "--out", "kept")
    run(*answer)
    again = stream(run, pets, *options, "--out", "kept")
    assert again["curves"] == stream(run, pets, *options)["curves"]


def test_failed_question_of_a_warm_start_ends_the_run(run: Run, pets: Path, served: Server) -> None:
    served.answers = [by_model, refuse(400), by_model]
    command = ("stream", f"image-folder:{pets}", *MODELS, "--start", "warm", "--out", "kept")
    ended = run(*command, "--master-rate", "0", "--orders", 1)
    assert ended.code == 1 and "repeat the command to ask the failed questions" in ended.out
    served.answers = [by_model]
    assert run(*command, "--master-rate", "0", "--orders", 1).code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--answers", "gold.db", "--start", "warm"), "holds 12 examples without a master"),
        (("--answers", "none.db", "--start", "warm"), "none.db does not exist"),
        (("--answers", "none.db"), "--answers has no effect"),
        (("--cold", 5), "--cold has no effect"),
        (("--capacity", 5, "--evict", "none"), "--capacity has no effect"),
        (("--groups", 5), "--groups has no effect on --retrieve image"),
        (("--embed-text", "bundled", "--retrieve", "dual"), "text embedder must embed texts"),
        (("--controls", "none,vote"), "--controls none excludes the others"),
        (("--budget", 1), "a budget needs the price of"),
    ],
)
def test_options_without_an_effect(
    run: Run, pets: Path, served: Server, options: tuple[Any, ...], message: str
) -> None:
    run("add", "gold.db", pets)
    done = run("stream", f"image-folder:{pets}", *MODELS, *options)
    assert done.code == 2 and message in done.err, done.err
    assert served.bodies == []


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ((), "3 answers"),
        (("--start", "warm"), "12 answers"),
        (("--start", "none,cold", "--cold", 2), "5 answers"),
        (("--capacity", 1), "1 answer"),
        (("--capacity", 1, "--evict", "lru,none"), "3 answers"),
    ],
)
def test_a_stream_says_that_shots_are_limited(
    run: Run, pets: Path, options: tuple[object, ...], most: str
) -> None:
    command = ("stream", f"image-folder:{pets}", *MODELS, "--dry-run", *options, "--shots")
    noted = run(*command, 5000)
    note = f"5000 shots requested; a cache holds at most {most}\n"
    assert (noted.code, noted.err) == (0, note)
    assert run(*command, 1).err == ""
