"""Results and notes of `bottega eval`."""

from __future__ import annotations

import re
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path

import orjson
import pytest
from PIL import Image

from bottega.naming import has_photos
from tests.cli.conftest import Run
from tests.server import Server, ok, refuse

UCMERCED = Path(__file__).resolve().parents[3] / "shared" / "data" / "ucmerced"
FIELDS = ["method", "shots", "n", "metric", "value", "low", "high"]


def test_eval_writes_every_method_at_every_number_of_shots(run: Run, pets: Path) -> None:
    done = run("eval", f"image-folder:{pets}", "--shots", "1,2", "--json", "out.json")
    assert done.code == 0
    document = orjson.loads(Path("out.json").read_bytes())
    assert document["benchmark"] == f"image-folder:{pets}"
    rows = document["results"]
    assert [(r["method"], r["shots"]) for r in rows] == [
        ("zero-shot", 0),
        *((name, k) for name in ("random", "balanced", "visual-rag", "vote") for k in (1, 2)),
        ("nearest", 1),
        *(("knn", k) for k in (1, 2)),
        ("logreg", 0),
    ]
    assert (document["paired"][0]["method"], document["paired"][0]["against"]) == (
        "visual-rag",
        "knn",
    )
    first = done.out.partition("\nmethod      baseline")[2].splitlines()[1]
    assert first.split()[:3] == ["visual-rag", "knn", "1"]
    for row in rows:
        assert list(row)[: len(FIELDS)] == FIELDS
        assert row["n"] == 3
        assert 0 <= row["low"] <= row["value"] <= row["high"] <= 1
        assert row["calls"] == (0 if row["method"] in ("vote", "nearest", "knn", "logreg") else 3)
    best = next(r for r in rows if (r["method"], r["shots"]) == ("visual-rag", 2))
    assert best["value"] == 1.0


NO_PHOTOS = "embedder bundled: the images do not look like photographs"
MODEL = "model bundled: for embedder"


@pytest.mark.parametrize(
    ("source", "options", "notes"),
    [
        ("image-folder:{pets}", [], [NO_PHOTOS, f"{MODEL} bundled"]),
        ("image-folder:{pets}", ["--embed", "pixels"], [f"{MODEL} pixels"]),
        ("image-folder:{pets}", ["--model", "openai:m"], [NO_PHOTOS]),
        ("image-folder:{pets},question=Which one?", [], [NO_PHOTOS, f"{MODEL} bundled"]),
        ("image-folder:{pets}", ["--embed", "pixels", "--model", "openai:m"], []),
        (
            "knowledge-base:k.db",
            [],
            ["embedder pixels: that of the knowledge base", f"{MODEL} pixels"],
        ),
        ("codes", [], [NO_PHOTOS, "model simulated:codes: that of codes"]),
    ],
)
def test_eval_notes_why_model_and_embedder_were_chosen(
    run: Run, pets: Path, source: str, options: list[str], notes: list[str]
) -> None:
    if source.startswith("knowledge-base"):
        assert run("add", "k.db", pets, "--embed", "pixels").code == 0
    benchmark = source.format(pets=pets)
    done = run("eval", benchmark, "--methods", "visual-rag", "--dry-run", *options)
    assert done.code == 0, done.err
    reasons = re.findall(r"^(?:note: )?((?:model|embedder) \S+: .*)", done.err, re.MULTILINE)
    assert [reason[: len(note)] for reason, note in zip(reasons, notes, strict=True)] == notes
    for reason in reasons:
        assert re.search(
            f"bottega eval {re.escape(shlex.quote(benchmark))} --(embed|model)", reason
        )


def test_eval_sends_the_given_question(run: Run, pets: Path, served: Server) -> None:
    served.answers = [ok("leaf")]
    evaluation = ("eval", f"image-folder:{pets}", "--methods", "zero-shot", "--model", "openai:m")
    done = run(*evaluation, "--question", "Which class, please?", "--json", "f")
    assert done.code == 0
    assert orjson.loads(Path("f").read_bytes())["benchmark"].endswith("Which class, please?")
    assert all("Which class, please?" in str(body) for body in served.bodies)


@pytest.mark.skipif(not UCMERCED.exists(), reason="sample data are absent")
@pytest.mark.slow
def test_eval_on_aerial_images(run: Run) -> None:
    done = run(
        "eval", f"manyicl:{UCMERCED}", "--methods", "visual-rag,vote", "--shots", 1, "--json", "f"
    )
    assert done.code == 0
    rag, vote = orjson.loads(Path("f").read_bytes())["results"]
    assert (rag["n"], vote["n"], rag["invalid"]) == (21, 21, 0)


def test_eval_against_an_endpoint_counts_calls_tokens_and_cost(
    run: Run, pets: Path, served: Server
) -> None:
    served.answers = [ok("Answer Choice: leaf\nConfidence Score: 1")]
    evaluation = ("eval", f"image-folder:{pets}", "--methods", "visual-rag", "--shots", 2)
    done = run(*evaluation, "--model", "openai:m", "--price", "1,1", "--json", "f")
    assert done.code == 0
    [row] = orjson.loads(Path("f").read_bytes())["results"]
    assert (row["calls"], row["prompt_tokens"], row["completion_tokens"]) == (3, 30, 6)
    assert row["cost_usd"] == pytest.approx(36e-6)
    assert row["value"] == pytest.approx(1 / 3)
    assert len(served.bodies) == 3


def test_a_rejected_key_stops_the_run(run: Run, pets: Path, served: Server) -> None:
    served.answers = [refuse(401)]
    failed = run("eval", f"image-folder:{pets}", "--model", "openai:m", "--json", "f")
    assert failed.code == 1
    assert not Path("f").exists()


def test_finished_methods_are_kept_if_a_later_one_fails(
    run: Run, pets: Path, served: Server
) -> None:
    served.answers = [refuse(401)]
    evaluation = ("eval", f"image-folder:{pets}", "--model", "openai:m", "--shots", 1)
    failed = run(*evaluation, "--methods", "vote,zero-shot", "--json", "f")
    assert failed.code == 1
    assert [row["method"] for row in orjson.loads(Path("f").read_bytes())["results"]] == ["vote"]
    assert "vote" in failed.out


def test_a_rejected_item_counts_as_failed(run: Run, pets: Path, served: Server) -> None:
    good = ok("Answer Choice: leaf")
    served.answers = [good, refuse(400, "content filter"), good]
    evaluation = ("eval", f"image-folder:{pets}", "--model", "openai:m", "--concurrency", 1)
    failed = run(*evaluation, "--methods", "zero-shot", "--json", "f")
    [row] = orjson.loads(Path("f").read_bytes())["results"]
    assert (failed.code, row["n"], row["failed"], row["invalid"]) == (1, 2, 1, 0)


def test_a_damaged_image_is_reported_and_excluded(run: Run, pets: Path) -> None:
    data = (pets / "leaf" / "0.png").read_bytes()
    (pets / "leaf" / "cut.png").write_bytes(data[: len(data) // 2])
    done = run("eval", f"image-folder:{pets}", "--methods", "vote", "--shots", 1, "--json", "f")
    document = orjson.loads(Path("f").read_bytes())
    assert done.code == 0
    assert "cut.png" in done.err
    assert document["knowledge_base"] + document["items"] == 12


@pytest.mark.slow
def test_demo_shows_handwriting_and_photographs(run: Run) -> None:
    done = run("demo", "--limit", 8, "--out", "page.html")
    assert done.code == 0
    parts = [line.split(":")[0] for line in done.out.splitlines() if line[0] != " "]
    photographs = ["Photographs"] * has_photos()
    assert parts == ["Handwriting", *photographs, "page"]
    assert len(done.out.splitlines()) <= 15
    page = Path("page.html").read_text("utf-8")
    assert page.count("data:image/png;base64,") >= 6 * 8
    assert ("CC BY 2.0" in page) == has_photos()
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page


@pytest.mark.slow
def test_demo_shows_the_users_images(run: Run, pets: Path) -> None:
    done = run("demo", "--folder", pets, "--out", "page.html")
    assert "visual-rag minus knn" in done.out
    assert f"<h2>{pets.name}</h2>" in Path("page.html").read_text("utf-8")
    document = run("demo", "--folder", pets, "--out", "page.html", "--json").json
    assert isinstance(document, dict)
    assert document["page"] == "page.html"
    assert {row["part"] for row in document["results"]} == {pets.name}


def test_eval_of_a_synthetic_task_compares_retrieval_with_vote(run: Run, served: Server) -> None:
    served.answers = [ok("add 1 2\nAnswer: 3")]
    task = (
        "eval",
        "rules:episodes=2,examples=4,queries=3",
        "--model",
        "openai:m",
        "--embed",
        "pixels",
    )
    noise = ("--label-noise", 0.5, "--methods", "visual-rag,vote,in-context", "--shots", "1,2")
    done = run(*task, *noise, "--json", "f")
    assert done.code == 0
    assert "free answers" in done.out
    document = orjson.loads(Path("f").read_bytes())
    assert (document["retrieve"], document["label_noise"]) == ("image", 0.5)
    rows = [(row["method"], row["shots"]) for row in document["results"]]
    assert rows == [
        *((name, k) for name in ("visual-rag", "vote") for k in (1, 2)),
        ("in-context", 4),
    ]
    paired = document["paired"]
    assert [(p["method"], p["against"], p["shots"], p["n"]) for p in paired] == [
        ("visual-rag", "vote", k, 6) for k in (1, 2)
    ]
    assert all(p["low"] <= p["value"] <= p["high"] and p["p_value"] <= 1 for p in paired)
    assert "McNemar" in done.out
    assert re.search(r"method +baseline +shots +n +difference", done.out)
    assert "p_value" in done.out
    assert (document["made_wrong"], document["knowledge_base"]) == (4, 8)
    assert "4 of 8 answers corrupted" in done.out
    assert "vote is the majority" in done.err


def test_a_repeated_run_notes_the_stored_answers(run: Run, pets: Path, served: Server) -> None:
    served.answers = [ok("Answer Choice: leaf")]
    evaluation = ("eval", f"image-folder:{pets}", "--methods", "zero-shot", "--model", "openai:m")
    assert "reused" not in run(*evaluation, "--out", "kept").err
    sent = len(served.bodies)
    assert "3 stored answers in kept are reused" in run(*evaluation, "--out", "kept").err
    assert len(served.bodies) == sent
    other = [*evaluation[:3], "vote", *evaluation[4:]]
    assert (
        "reused" not in run(*other, "--shots", 1, "--out", "kept").err
    )  # answers of another method


def test_notes_describe_only_the_methods_that_ran(run: Run, pets: Path) -> None:
    done = run("eval", f"image-folder:{pets}", "--methods", "random", "--shots", 1, "--json", "f")
    assert "Invalid replies count as wrong" in done.err
    assert "vote" not in done.err
    assert "wrong" not in done.out
    assert orjson.loads(Path("f").read_bytes())["made_wrong"] is None


def test_traces_of_a_control_show_its_question(run: Run, served: Server) -> None:
    served.answers = [ok("red")]
    task = ("eval", "attributes:examples=9,queries=3", "--model", "openai:m", "--embed", "pixels")
    assert run(*task, "--methods", "swap-question", "--shots", 2).code == 0
    log = run("log", "--json").json
    assert isinstance(log, dict)
    for trace in log["traces"]:
        assert trace["tier"] == "swap-question, 2 shots, attributes:examples=9,queries=3"
        assert trace["question"] in trace["messages"][-1]["parts"][-1]["text"]
    text = run("log", log["traces"][0]["id"]).out
    assert "swap-question, 2 shots, attributes:examples=9,queries=3" in text
    assert f"image:    {log['traces'][0]['images'][0]}" in text


def test_the_trees_of_a_run_are_explained(run: Run) -> None:
    task = ("eval", "codes:notebooks=5", "--limit", 2, "--methods", "top-k,rcts", "--out", "kept")
    assert run(*task, "--traces", "none").code == 0
    before = Path("kept/run.db").read_bytes()
    for traces in ("kept", "kept/run.db"):
        head, *rows = run("log", "--traces", traces).out.splitlines()
        assert "tier" in head.split() and len(rows) == 4
        _, *rows = run("log", "--traces", traces, "--tier", "rcts").out.splitlines()
        assert len(rows) == 2 and all("rcts, 3 shots, codes" in row for row in rows)
        id = rows[0].split()[0]
        assert "● no demonstrations" in run("explain", id, "--traces", traces).out
    assert run("log", "--traces", "kept", "--text", "NOWHERE").out.count("\n") == 1
    assert Path("kept/run.db").read_bytes() == before
    assert run(*task, "--traces", "none").code == 0  # the run is still complete
    Path("empty").mkdir()
    refused = run("explain", id, "--traces", "empty")
    assert (refused.code, "empty holds no run" in refused.err) == (1, True)


def test_the_page_of_an_answer_of_a_run_has_its_images(run: Run, pets: Path) -> None:
    task = ("eval", f"image-folder:{pets}", "--methods", "top-k", "--shots", 2, "--limit", 1)
    assert run(*task, "--embed", "pixels", "--out", "kept").code == 0
    [row] = run("log", "--traces", "kept").out.splitlines()[1:]
    explain = ("explain", row.split()[0], "--traces", "kept", "--out", "page.html")
    done = run(*explain)
    page = Path("page.html").read_text("utf-8")
    assert done.code == 0 and page.count("data:image/") == 3  # the question and two examples
    assert "images are missing" not in page
    with closing(sqlite3.connect("kept/run.db")) as stored, stored:
        stored.execute("DELETE FROM thumbnails")
    assert run(*explain).code == 0
    page = Path("page.html").read_text("utf-8")
    assert page.count("data:image/") == 0 and "--kb to a knowledge base" in page


@pytest.mark.parametrize(("methods", "is_noted"), [("knn,logreg", False), ("knn,top-k", True)])
def test_the_model_is_noted_if_a_method_uses_it(
    run: Run, pets: Path, methods: str, is_noted: bool
) -> None:
    done = run("eval", f"image-folder:{pets}", "--methods", methods, "--dry-run")
    assert ("model bundled" in done.err) == is_noted


@pytest.mark.parametrize(("model", "noted"), [("openai:m", True), ("bundled", False)])
def test_eval_recommends_logreg_only_if_it_is_clearly_better(
    run: Run, tmp_path: Path, served: Server, model: str, noted: bool
) -> None:
    served.answers = [ok("no label")]
    for colour in ("red", "blue"):
        folder = tmp_path / "colours" / colour
        folder.mkdir(parents=True)
        for size in range(24):
            image = Image.new("RGB", (64, 64), "white")
            image.paste(colour, (5, 5, 30 + size, 30 + size))
            image.save(folder / f"{size}.png")
    methods = ("--methods", "visual-rag,logreg", "--shots", "1", "--model", model)
    done = run("eval", "image-folder:colours", *methods)
    assert done.code == 0
    assert ("bottega classify --method logreg" in done.err) == noted


def test_paired_differences_of_eval_fit_in_80_columns(run: Run, pets: Path) -> None:
    done = run("eval", f"image-folder:{pets}", "--shots", "1")
    paired = done.out.partition("\npaired differences")[2].splitlines()
    assert paired and all(len(line) <= 80 for line in paired)


def test_codes_are_answered_by_their_simulated_model(run: Run) -> None:
    planned = run("eval", "codes:notebooks=5", "--limit", "3", "--dry-run")
    assert (planned.code, "; simulated:codes; " in planned.out) == (0, True)
    other = run("eval", "codes:notebooks=5", "--limit", "3", "--dry-run", "--model", "bundled")
    assert "; bundled:apprentice; " in other.out
    refused = run("eval", "codes", "--model", "simulated:code")
    assert (refused.code, "did you mean simulated:codes?" in refused.err) == (2, True)
