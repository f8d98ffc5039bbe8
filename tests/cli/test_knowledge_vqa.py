"""OK-VQA and A-OKVQA with passages, from training to figures, in the published layouts."""

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
[shape]
document_prompts = 4
query_prompts = 4
prompting = "reading"
[course]
steps = 2
warm_up = 1
prdb = true
answer = 1.0
cache = 1.0
"""
TEXTS = ("Surfers swim in the sea.", "Boards are made of foam.", "A train needs tracks.")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would wait for each other wherever tests run beside other work."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)


def trained(run: Run, benchmark: str, passages: str, model: str = "bundled") -> str:
    """What the command says."""
    top = f'benchmark = "{benchmark}"\nmodel = "{model}"'
    Path("c.toml").write_text(top + CONFIG.replace("PASSAGES", passages))
    done = run("compress", "train", "c.toml")
    assert done.code == 0, done.err
    assert "step 2: loss" in done.err
    return done.out + done.err


def judged(run: Run, benchmark: str, passages: str, *more: object) -> dict[str, Any]:
    done = run(
        *("eval", benchmark, "--passages", passages, "--retrieve", "bm25", "--shots", 2),
        *("--methods", ",".join(METHODS), "--compressor", "compressor", "--max-tokens", 4),
        *("--json", "out.json", *more),
    )
    assert done.code == 0, done.err
    told: dict[str, Any] = json.loads(Path("out.json").read_text())
    return told


def test_okvqa_trains_and_evaluates_with_a_search_corpus(run: Run, tmp_path: Path) -> None:
    okvqa.published(tmp_path / "vqa", train2014=[1, 2, 3, 4], val2014=[7, 8])
    notes = okvqa.noted([7, 8])
    notes["annotations"][1]["answers"] = okvqa.noted([8], ["ski"] * 10)["annotations"][0]["answers"]  # type: ignore[index]
    write_json(tmp_path / "vqa" / "mscoco_val2014_annotations.json", notes)
    with (tmp_path / "okvqa_full_corpus.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["kid", "text"], *enumerate(f"{t} What is done" for t in TEXTS)]
        )

    said = trained(run, "okvqa:vqa", "okvqa_full_corpus.csv")
    assert "4 training questions, 0 validation questions, 3 passages" in said
    assert "4 of the first 4 lessons have a relevant passage" in said
    found = judged(run, "okvqa:vqa", "okvqa_full_corpus.csv")
    assert (found["knowledge_base"], found["items"]) == (3, 2)  # without the questions of training
    assert [one["method"] for one in found["results"]] == list(METHODS)
    for one in found["results"]:
        assert (one["metric"], one["n"], one["calls"]) == ("vqa_accuracy_original", 2, 2)
        assert one["also"][0]["metric"] == "vqa_accuracy_always-normalised"

    passages = "okvqa_full_corpus.csv"
    run("add", "gs.db", passages, "--passages", "--embed", "words")
    racc = ("okvqa:vqa", passages, "--methods", "racc", "--store", "gs.racc")
    with pytest.raises(AssertionError, match="no compressed passages"):
        judged(run, *racc)
    built = run("compress", "build", "gs.db", "--compressor", "compressor", "--store", "gs.racc")
    assert built.code == 0, built.err
    stored = judged(run, *racc)["results"]
    assert [(one["method"], one["n"], one["failed"]) for one in stored] == [("racc", 2, 0)]


def test_aokvqa_trains_and_evaluates_with_image_passages(run: Run, tmp_path: Path) -> None:
    asked = [aokvqa.question(7), aokvqa.question(8, direct_answers=["cab"] * 10)]
    aokvqa.published(tmp_path / "vqa", [aokvqa.question(n) for n in (1, 2, 3)], asked)
    rows = [
        {"text": f"{text} What does it await?", "id": f"WIT_{i}"} for i, text in enumerate(TEXTS)
    ]
    write_image(tmp_path / "train.png", 5)
    rows[2]["image"] = "train.png"
    (tmp_path / "wit.jsonl").write_text("\n".join(map(json.dumps, rows)))

    model = str(fast_vlm(tmp_path / "model"))  # the bundled ones show no picture of a passage
    said = trained(run, "aokvqa:vqa", "wit.jsonl", model)
    assert "3 training questions, 0 validation questions, 3 passages" in said
    assert "4 of the first 4 lessons have a relevant passage" in said
    found = judged(run, "aokvqa:vqa", "wit.jsonl", "--model", model)
    assert [one["method"] for one in found["results"]] == list(METHODS)
    assert {(one["metric"], one["n"]) for one in found["results"]} == {
        ("direct_answer_original", 2)
    }
