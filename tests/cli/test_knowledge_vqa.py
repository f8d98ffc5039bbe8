"""Training and evaluation on OK-VQA and A-OKVQA with passages, in the published layouts."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.evaluation.benchmarks import test_aokvqa as aokvqa
from tests.evaluation.benchmarks import test_okvqa as okvqa
from tests.evaluation.benchmarks.published import write_image, write_json
from tests.generation.tiny_models import fast_vlm

METHODS = ("concat", "racc", "racc-flat", "racc-swapped")
CONFIG = """
passages = "PASSAGES"
retrieve = "bm25"
layer = 1
shots = 2
batch = 2
calibrate = 4
out = "compressor"
[compressor]
document_prompts = 4
query_prompts = 4
prompting = "reading"
[training]
steps = 2
warmup_steps = 1
prdb = true
answer_weight = 1.0
cache_weight = 1.0
"""
TEXTS = ("Surfers swim in the sea.", "Boards are made of foam.", "A train needs tracks.")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one thread: several threads wait for each other on a busy machine."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)


def train(run: Run, benchmark: str, passages: str, model: str = "bundled") -> str:
    """Train, and return the output."""
    top = f'benchmark = "{benchmark}"\nmodel = "{model}"'
    Path("c.toml").write_text(top + CONFIG.replace("PASSAGES", passages))
    done = run("compress", "train", "c.toml")
    assert done.code == 0, done.err
    assert "step 2: loss" in done.err
    return done.out + done.err


def evaluate(run: Run, benchmark: str, passages: str, *more: object) -> dict[str, Any]:
    done = run(
        *("eval", benchmark, "--passages", passages, "--retrieve", "bm25", "--shots", 2),
        *("--methods", ",".join(METHODS), "--compressor", "compressor", "--max-tokens", 4),
        *("--json", "out.json", *more),
    )
    assert done.code == 0, done.err
    document: dict[str, Any] = json.loads(Path("out.json").read_text())
    return document


@pytest.mark.slow
def test_okvqa_trains_and_evaluates_with_a_search_corpus(run: Run, tmp_path: Path) -> None:
    okvqa.published(tmp_path / "vqa", train2014=[1, 2, 3, 4], val2014=[7, 8])
    notes = okvqa.noted([7, 8])
    notes["annotations"][1]["answers"] = okvqa.noted([8], ["ski"] * 10)["annotations"][0]["answers"]  # type: ignore[index]
    write_json(tmp_path / "vqa" / "mscoco_val2014_annotations.json", notes)
    with (tmp_path / "okvqa_full_corpus.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["kid", "text"], *enumerate(f"{t} What is done" for t in TEXTS)]
        )

    output = train(run, "okvqa:vqa", "okvqa_full_corpus.csv")
    assert "4 training questions, 0 validation questions, 3 passages" in output
    assert "4 of the first 4 examples have a relevant passage" in output
    document = evaluate(run, "okvqa:vqa", "okvqa_full_corpus.csv")
    # Training questions are excluded.
    assert (document["knowledge_base"], document["items"]) == (3, 2)
    assert document["shown"]["racc-swapped"]["relevance"] == "stems"
    assert [row["method"] for row in document["results"]] == list(METHODS)
    for row in document["results"]:
        assert (row["metric"], row["n"], row["calls"]) == ("vqa_accuracy_original", 2, 2)
        assert row["also"][0]["metric"] == "vqa_accuracy_always-normalised"

    passages = "okvqa_full_corpus.csv"
    run("add", "gs.db", passages, "--passages", "--embed", "words")
    racc = ("okvqa:vqa", passages, "--methods", "racc", "--store", "gs.racc")
    with pytest.raises(AssertionError, match="no compressed passages"):
        evaluate(run, *racc)
    built = run("compress", "build", "gs.db", "--compressor", "compressor", "--store", "gs.racc")
    assert built.code == 0, built.err
    stored = evaluate(run, *racc)["results"]
    assert [(row["method"], row["n"], row["failed"]) for row in stored] == [("racc", 2, 0)]


def test_aokvqa_trains_and_evaluates_with_image_passages(run: Run, tmp_path: Path) -> None:
    questions = [aokvqa.question(7), aokvqa.question(8, direct_answers=["cab"] * 10)]
    aokvqa.published(tmp_path / "vqa", [aokvqa.question(n) for n in (1, 2, 3)], questions)
    rows = [
        {"text": f"{text} What does it await?", "id": f"WIT_{i}"} for i, text in enumerate(TEXTS)
    ]
    write_image(tmp_path / "train.png", 5)
    rows[2]["image"] = "train.png"
    (tmp_path / "wit.jsonl").write_text("\n".join(map(json.dumps, rows)))

    model = str(fast_vlm(tmp_path / "model"))  # bundled models do not read passage images
    output = train(run, "aokvqa:vqa", "wit.jsonl", model)
    assert "3 training questions, 0 validation questions, 3 passages" in output
    assert "4 of the first 4 examples have a relevant passage" in output
    # Nearly every passage contains "a" or "b", answers of one annotator each.
    words = ("--relevance", "words")
    document = evaluate(run, "aokvqa:vqa", "wit.jsonl", "--model", model, *words)
    assert [row["method"] for row in document["results"]] == list(METHODS)
    assert {(row["metric"], row["n"]) for row in document["results"]} == {
        ("direct_answer_original", 2)
    }
    assert document["shown"]["racc-swapped"]["relevance"] == "words"
