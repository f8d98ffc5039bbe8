from __future__ import annotations

import re
import shlex
import sqlite3
import sys
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


def test_a_question_for_a_benchmark_with_its_own_is_rejected(run: Run) -> None:
    done = run("eval", "digits", "--question", "Which class?")
    assert done.code == 2
    assert "--question" in done.err and "image-folder" in done.err


def test_options_that_would_change_the_question_are_rejected(run: Run, pets: Path) -> None:
    benchmark = f"image-folder:{pets}"
    done = run("eval", benchmark, "--question", "Cat?", "--unparsable", "random")
    assert done.code == 2
    assert "--unparsable" in done.err and "mmmu" in done.err
    done = run("eval", f"{benchmark},question=Cat?", "--unparsable", "random")
    assert done.code == 2
    done = run("eval", f"{benchmark},question=Cat?", "--question", "Dog?")
    assert done.code == 2
    assert "question" in done.err and "Dog?" in done.err


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


@pytest.mark.parametrize("path", [".", "nowhere/f.json"])
def test_unwritable_outputs_are_rejected_before_the_run(run: Run, path: str) -> None:
    assert run("eval", "digits", "--json", path).code == 2
    assert run("demo", "--out", path).code == 2


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


def test_demo_needs_two_classes(run: Run, tmp_path: Path, pets: Path) -> None:
    (tmp_path / "one").mkdir()
    (pets / "leaf").rename(tmp_path / "one" / "leaf")
    done = run("demo", "--folder", tmp_path / "one")
    assert done.code == 1
    assert "has the label 'leaf' only" in done.err


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


def test_json_needs_a_file_name(run: Run) -> None:
    done = run("eval", "digits", "--json", "--limit", "5")
    assert (done.code, "--json needs a file name, got '--limit'" in done.err) == (2, True)


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


@pytest.mark.parametrize(("methods", "is_noted"), [("knn,logreg", False), ("knn,top-k", True)])
def test_the_model_is_noted_if_a_method_uses_it(
    run: Run, pets: Path, methods: str, is_noted: bool
) -> None:
    done = run("eval", f"image-folder:{pets}", "--methods", methods, "--dry-run")
    assert ("model bundled" in done.err) == is_noted


def test_eval_of_facts_reads_passages_by_default(run: Run, served: Server) -> None:
    served.answers = [ok("who knows")]
    done = run(
        "eval", "facts:episodes=1,queries=2", "--model", "openai:m", "--shots", 2, "--json", "f"
    )
    assert done.code == 0
    rows = orjson.loads(Path("f").read_bytes())["results"]
    assert [(row["method"], row["n"]) for row in rows] == [
        ("zero-shot", 2),
        ("random", 2),
        ("oracle", 2),
    ]


@pytest.mark.parametrize("retrieve", ["text", "dual", "keywords", "bm25", "hashtag"])
def test_eval_retrieves_examples_by_text(run: Run, served: Server, retrieve: str) -> None:
    served.answers = [ok("red")]
    task = ("eval", "attributes:examples=30,queries=5", "--model", "openai:m", "--embed", "pixels")
    method = ("--methods", "visual-rag,swap-question", "--shots", 3, "--json", "f")
    done = run(*task, *method, "--retrieve", retrieve)
    assert done.code == 0
    document = orjson.loads(Path("f").read_bytes())
    assert (document["retrieve"], document["labels"]) == (retrieve, 30)
    assert [row["n"] for row in document["results"]] == [5, 5]


@pytest.mark.parametrize("retrieve", ["keywords", "bm25", "hashtag"])
def test_eval_retrieves_passages_within_their_episode(
    run: Run, served: Server, retrieve: str
) -> None:
    served.answers = [ok("who knows")]
    task = ("eval", "facts:episodes=2,queries=3", "--model", "openai:m", "--embed", "pixels")
    done = run(
        *task, "--methods", "visual-rag", "--retrieve", retrieve, "--shots", 2, "--json", "f"
    )
    assert done.code == 0
    [row] = orjson.loads(Path("f").read_bytes())["results"]
    assert (row["n"], row["failed"]) == (6, 0)


@pytest.mark.parametrize(
    "task",
    [
        "attributes:examples=30,queries=4",
        "facts:episodes=2,queries=2",
        "rules:episodes=2,queries=2",
    ],
)
def test_eval_retrieves_by_late_interaction(run: Run, served: Server, task: str) -> None:
    served.answers = [ok("red")]
    options = ("--methods", "visual-rag,rcts", "--shots", 3, "--retrieve", "hybrid", "--json", "f")
    assert run("eval", task, "--model", "openai:m", *options).code == 0
    document = orjson.loads(Path("f").read_bytes())
    assert document["retrieve"] == "hybrid"
    assert [(row["n"], row["failed"]) for row in document["results"]] == [(4, 0), (4, 0)]


def test_the_bundled_model_searches_late_interaction_candidates(run: Run) -> None:
    options = ("--methods", "rcts", "--shots", 3, "--rollouts", 2, "--retrieve", "hybrid")
    assert run("eval", "attributes:examples=30,queries=2", *options, "--json", "f").code == 0
    [row] = orjson.loads(Path("f").read_bytes())["results"]
    assert (row["n"], row["failed"], row["calls"] >= 6) == (2, 0, True)


def test_search_uses_candidates_of_a_late_interaction_checkpoint(
    run: Run, served: Server, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from tests.knowledge import tiny_models

    folder = tiny_models.save_flmr(tmp_path / "flmr")
    served.answers = [ok("red")]
    task = (
        "eval",
        "attributes:examples=30,queries=2",
        "--model",
        "openai:m",
        "--methods",
        "top-k,rcts",
    )
    more = ("--shots", 3, "--rollouts", 2, "--embed", f"flmr:{folder}")
    done = run(*task, *more, "--retrieve", "hybrid", "--json", "f")
    assert done.code == 0, done.err
    rows = orjson.loads(Path("f").read_bytes())["results"]
    assert [(row["n"], row["failed"]) for row in rows] == [(2, 0), (2, 0)]
    assert "(retrieve or --retrieve) to hybrid" in run(*task, *more).err


def test_methods_without_retrieval_ignore_the_retriever(run: Run, served: Server) -> None:
    served.answers = [ok("3")]
    task = ("eval", "rules:episodes=1,queries=2", "--model", "openai:m", "--methods", "random")
    for retrieve in ("hybrid", "hashtag"):
        assert run(*task, "--shots", 1, "--retrieve", retrieve).code == 0


@pytest.mark.parametrize(
    "wrong",
    [
        ("glyphs:way=3",),
        ("rules", "--retrieve", "sound"),
        ("rules", "--retrieve", "hybrid", "--embed", "pixels"),
        ("rules", "--label-noise", "2"),
        ("facts:episodes=1", "--label-noise", "0.2"),
        ("glyphs:",),
        ("glyphs:ways=5,ways=10",),
        ("glyphs:ways=100,shots=50",),
        ("facts:episodes=1", "--methods", "visual-rag"),
        ("facts:episodes=1", "--methods", "vote"),
        ("digits", "--methods", "oracle"),
    ],
)
def test_eval_rejects_invalid_requests(run: Run, wrong: tuple[str, ...]) -> None:
    assert run("eval", *wrong).code == 2


def test_eval_compares_search_with_its_baselines(run: Run, served: Server) -> None:
    served.answers = [ok("Answer: 3")]
    task = (
        "eval",
        "rules:episodes=2,examples=4,queries=2",
        "--model",
        "openai:m",
        "--embed",
        "pixels",
    )
    names = ("top-k", "rcts", "rcts-random", "rcts-best-of-n", "majority")
    more = ("--methods", ",".join(names), "--shots", 2, "--rollouts", 3, "--json", "f")
    done = run(*task, *more)
    assert done.code == 0, done.out
    document = orjson.loads(Path("f").read_bytes())
    rows = {row["method"]: row for row in document["results"]}
    assert tuple(rows) == names
    baselines = [row["against"] for row in document["paired"] if row["method"] == "rcts"]
    assert baselines == ["top-k", "majority", "rcts-random", "rcts-best-of-n"]
    assert rows["majority"]["calls"] == 4 * (1 + 3 * 11)
    assert all(4 <= rows[name]["calls"] <= 4 * 34 for name in names[1:])
    assert all(row["n"] == 4 and row["prompt_tokens"] for row in rows.values())


def test_a_similar_benchmark_is_suggested(run: Run) -> None:
    done = run("eval", "imagefolder:pets")
    assert done.code == 2 and "did you mean image-folder:pets?" in done.err


def test_a_folder_with_one_split_gets_a_hint(run: Run, pets: Path) -> None:
    half = pets.parent / "half"
    half.mkdir()
    pets.rename(half / "train")
    done = run("eval", f"image-folder:{half}")
    assert done.code == 1 and f"run bottega eval image-folder:{half / 'train'}" in done.err


def test_rerank_covers_labels(run: Run, tmp_path: Path) -> None:
    """Of the nearest images two have the same label; `cover` shows one of each."""
    (tmp_path / "images").mkdir()
    rows = []
    for number, (shade, labels) in enumerate(
        [(100, "red"), (101, "red"), (104, "blue"), (105, "blue"), (102, "red")]
    ):
        Image.new("RGB", (16, 16), (shade, shade, shade)).save(tmp_path / f"images/{number}.png")
        rows.append({"image": f"images/{number}.png", "answer": labels, "question": "Which?"})
    (tmp_path / "train.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows[:4])))
    (tmp_path / "test.jsonl").write_bytes(orjson.dumps(rows[4]))
    shown = {}
    for rerank in ("none", "cover", "mmr"):
        done = run(
            *("eval", f"jsonl:{tmp_path}", "--embed", "pixels", "--methods", "visual-rag"),
            *("--shots", 2, "--rerank", rerank, "--out", rerank),
        )
        assert done.code == 0, done.err
        [(trace,)] = sqlite3.connect(f"{rerank}/run.db").execute("SELECT trace FROM answers")
        shown[rerank] = sorted(one["answer"] for one in orjson.loads(trace)["demonstrations"])
    assert (shown["none"], shown["cover"]) == (["red", "red"], ["blue", "red"])
    assert len(shown["mmr"]) == 2


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shots", "2,101"), "a search must select at most 100 demonstrations, got 101"),
        (("--exploration", "inf"), "exploration must be finite and at least 0, got inf"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_searches_are_checked_before_any_request(
    run: Run, served: Server, options: tuple[str, ...], message: str, dry: tuple[str, ...]
) -> None:
    common = ("--limit", 2, "--methods", "top-k,rcts", "--model", "openai:m")
    refused = run("eval", "codes:notebooks=5", *common, *options, *dry)
    assert (refused.code, message in refused.err) == (2, True), refused.err
    assert not served.bodies and "top-k" not in refused.out


def test_a_compressor_of_another_model_is_refused_before_any_answer(run: Run) -> None:
    refused = run(
        *("eval", "facts:episodes=1", "--limit", 2, "--methods", "concat,racc", "--shots", 2),
        *("--model", "bundled:master", "--retrieve", "text"),
    )
    assert "this compressor was trained with another model" in refused.err
    assert refused.code == 1 and "concat" not in refused.out


def test_another_setting_of_the_search_is_named(run: Run, served: Server) -> None:
    served.answers = [ok("Answer Choice: A")]
    common = (
        *("eval", "codes:notebooks=5", "--limit", 1, "--methods", "top-k,rcts", "--shots", 2),
        *("--model", "openai:m", "--out", "kept"),
    )
    assert run(*common).code == 0
    refused = run(*common, "--alpha", 0.9)
    assert "kept holds a run with --alpha unset, got 0.9" in refused.err


def test_codes_are_answered_by_their_simulated_model(run: Run) -> None:
    planned = run("eval", "codes:notebooks=5", "--limit", "3", "--dry-run")
    assert (planned.code, "; simulated:codes; " in planned.out) == (0, True)
    other = run("eval", "codes:notebooks=5", "--limit", "3", "--dry-run", "--model", "bundled")
    assert "; bundled:apprentice; " in other.out
    refused = run("eval", "codes", "--model", "simulated:code")
    assert (refused.code, "did you mean simulated:codes?" in refused.err) == (2, True)


def test_alpha_without_two_rewards_is_refused(run: Run) -> None:
    task = "rules:episodes=1,examples=4,queries=2"
    command = ("eval", task, "--methods", "rcts", "--alpha", "0.5", "--dry-run")
    for reward in ((), ("--reward", "mutual")):
        refused = run(*command, *reward)
        assert (refused.code, "set --reward both" in refused.err) == (2, True)
    assert run(*command, "--reward", "both").code == 0


def test_passages_are_not_counted_as_labelled_examples(run: Run) -> None:
    planned = run("eval", "facts:queries=2,episodes=1", "--limit", "2", "--dry-run")
    assert (planned.code, "2 items, 144 passages, no labels" in planned.out) == (0, True), (
        planned.out
    )


@pytest.mark.parametrize(
    ("methods", "options", "message"),
    [
        ("top-k", "--children 20", "--children needs rcts, got top-k"),
        ("rcts-flat", "--no-early-stop", "--no-early-stop needs rcts, got rcts-flat"),
        ("top-k,majority", "--fetch 30", "--fetch needs rcts or rcts-flat or"),
        ("zero-shot", "--preset released", "remove --preset, or add rcts to --methods"),
        ("rcts", "--samples 9", "--samples needs majority or best-of-n, got rcts"),
        (
            "rcts",
            "--reward self",
            "after demonstrations with rationales; those of codes:notebooks=5 show none",
        ),
        ("rcts", "--reward both --alpha 0.3", "set --reward ensemble or mutual"),
        ("rcts-flat", "--variant released", "got rcts-flat with the reward ensemble"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_options_without_effect_are_refused(
    run: Run, methods: str, options: str, message: str, dry: tuple[str, ...]
) -> None:
    refused = run(
        "eval", "codes:notebooks=5", "--limit", 1, "--methods", methods, *options.split(), *dry
    )
    assert (refused.code, message in refused.err) == (2, True), refused.err
    assert not refused.out


@pytest.mark.parametrize(
    ("task", "methods", "options"),
    [
        (
            "codes:notebooks=5",
            "rcts,majority",
            "--children 20 --no-early-stop --fetch 30 --samples 9",
        ),
        ("codes:notebooks=5", "rcts", "--variant released"),
        ("codes:notebooks=5", "rcts-flat", "--variant released --reward mutual"),
        ("rules:episodes=1", "rcts-random", "--reward self"),  # its examples have rationales
    ],
)
def test_options_with_an_effect_are_accepted(
    run: Run, task: str, methods: str, options: str
) -> None:
    planned = run("eval", task, "--limit", 1, "--methods", methods, *options.split(), "--dry-run")
    assert planned.code == 0, planned.err


def test_rationales_that_are_hidden_give_no_reward(run: Run) -> None:
    command = ("eval", "rules:episodes=1", "--methods", "rcts", "--reward", "self", "--dry-run")
    refused = run(*command, "--no-rationales")
    assert (refused.code, "the reward self needs rationales" in refused.err) == (2, True)


def test_searches_show_three_demonstrations(run: Run) -> None:
    command = ("eval", "codes:notebooks=5", "--limit", 2, "--rollouts", 1, "--json", "f")
    assert run(*command, "--methods", "top-k,rcts,majority").code == 0
    document = orjson.loads(Path("f").read_bytes())
    assert {row["shots"] for row in document["results"]} == {3}
    shown = document["shown"]
    assert shown["rcts"]["reward"] == "ensemble" and shown["rcts"]["variant"] == "paper"
    assert shown["majority"]["samples"] == str(1 + 1 + 15)
