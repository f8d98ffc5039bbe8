"""Tests of `bottega classify --method knn|logreg`: answers from stored vectors without a model."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from bottega import KnowledgeBase
from bottega.cli import answer as answer_command
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.logistic import VectorClassifier
from bottega.evaluation.methods.planning import plan
from bottega.generation import ScriptedGenerator
from bottega.image import Image
from bottega.knowledge import PixelEmbedder, load_image_folder
from bottega.recipes import Classifier
from bottega.types import IMAGE_QUESTION, Query
from tests.cli.conftest import Run
from tests.evaluation.builders import episodic_benchmark

METHODS = pytest.mark.parametrize("method", ["knn", "logreg"])


def refuse_models(*_: object, **__: object) -> object:
    raise AssertionError("a model was opened")


@METHODS
def test_no_model_is_opened(
    run: Run, pets: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    run("add", "k.db", pets)
    by_model = orjson.loads(run("classify", "k.db", "query.jpg", "--shots", 4, "--json").out)[0]
    monkeypatch.setattr(answer_command, "open_model", refuse_models)
    done = run("classify", "k.db", "query.jpg", "--method", method, "--shots", 4, "--json")
    [answer] = orjson.loads(done.out)
    assert (answer["answer"], answer["valid"], answer["method"]) == ("leaf", True, method)
    assert 0 < answer["confidence"] <= 1
    nearest = sorted(by_model["demonstrations"], key=lambda one: -one["score"])
    assert [one["id"] for one in answer["demonstrations"]] == [one["id"] for one in nearest]
    assert answer.keys() - by_model.keys() == {"method"}
    assert by_model.keys() <= answer.keys()
    assert (answer["calls"], answer["cost_usd"], answer["trace"]) == (0, 0.0, None)


@METHODS
def test_the_table_has_label_confidence_and_neighbours(run: Run, pets: Path, method: str) -> None:
    run("add", "k.db", pets)
    lines = run("classify", "k.db", "query.jpg", pets / "sky", "--method", method).out.splitlines()
    assert lines[0].split("  ")[0] == "image"
    assert lines[0].endswith("agreeing neighbours")
    cells = lines[1].split()
    assert (cells[0], cells[1]) == ("query.jpg", "leaf")
    assert 0 < float(cells[2]) <= 1
    assert cells[3:] == ["4", "of", "10"]
    assert [line.split()[1] for line in lines[2:]] == ["sky"] * 4


def test_torch_is_not_imported_for_pixels(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    code = """
import sys
sys.argv = ["bottega", "classify", "k.db", "query.jpg", "--method", "logreg"]
from bottega.cli import main
try:
    main()
finally:
    print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, "leaf" in done.stdout) == (0, True), done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_options_of_a_model_are_rejected(run: Run, pets: Path) -> None:
    run("add", "k.db", pets)
    given = ("--model", "bundled", "--order", "shuffled", "--price", "1,1")
    done = run("classify", "k.db", "query.jpg", "--method", "knn", *given)
    assert done.code == 2
    assert "--method knn calls no model, got --model, --order, --price" in done.err
    assert run("classify", "k.db", "query.jpg", "--method", "knn", "--traces", "none").code == 0
    assert run("classify", "k.db", "query.jpg", "--method", "knn", "--traces", "t.db").code == 2


def test_an_unknown_method_has_a_suggestion(run: Run) -> None:
    done = run("classify", "k.db", "query.jpg", "--method", "logistic")
    assert done.code == 2
    assert "--method must be visual-rag, knn or logreg, got 'logistic'" in done.err


@METHODS
def test_a_namespace_is_answered_from_its_own_examples(run: Run, pets: Path, method: str) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    shutil.rmtree(pets / "leaf")
    run("add", "k.db", pets, "--embed", "pixels", "--namespace", "other")
    for namespace, labels in (("", {"leaf"}), ("other", {"sky", "ruby"})):
        command = ("classify", "k.db", "query.jpg", "--method", method, "--json")
        option = ("--namespace", namespace) if namespace else ()
        assert orjson.loads(run(*command, *option).out)[0]["answer"] in labels


@METHODS
def test_an_image_is_not_its_own_neighbour(run: Run, pets: Path, method: str) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    image = pets / "sky" / "1.png"
    done = run("classify", "k.db", image, "--method", method, "--shots", 12, "--json")
    assert len(orjson.loads(done.out)[0]["demonstrations"]) == 11


@METHODS
def test_passages_are_rejected(run: Run, method: str, pets: Path) -> None:
    Path("p.jsonl").write_text('{"text": "A passage about cats."}\n')
    run("add", "k.db", "p.jsonl", "--passages", "--embed", "words")
    done = run("classify", "k.db", "query.jpg", "--method", method)
    assert done.code != 0
    assert f"{method} needs labelled examples, got 1 passage " in done.err


@METHODS
def test_a_bad_image_does_not_stop_the_others(run: Run, pets: Path, method: str) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    Path("bad.jpg").write_bytes(b"no image")
    done = run("classify", "k.db", "bad.jpg", "query.jpg", "--method", method, "--json")
    bad, good = orjson.loads(done.out)
    assert done.code == 1
    assert "not a readable image" in bad["error"]
    assert good["answer"] == "leaf"


@METHODS
async def test_eval_and_classify_agree(pets: Path, method: str) -> None:
    """One implementation: equal labels and confidences for the same knowledge base."""
    data = episodic_benchmark(episodes=1, shots=4)
    config = RunConfig(methods=[method], shots=[3])
    with KnowledgeBase.open(":memory:", embed=PixelEmbedder()) as knowledge:
        knowledge.add(data.knowledge)
        [planned] = plan(config, data, knowledge, Classifier(ScriptedGenerator([]), []))
        classify = VectorClassifier(knowledge, method, 3)
        for item in data.items:
            expected = (await planned.answer(item.query)).answer
            assert (await classify(item.query)).answer == expected


async def test_the_event_loop_is_free_while_the_model_is_fitted(pets: Path) -> None:
    with KnowledgeBase.open(":memory:", embed=PixelEmbedder()) as knowledge:
        knowledge.add(load_image_folder(pets))
        classify = VectorClassifier(knowledge, "logreg", 3)
        query = Query(IMAGE_QUESTION, (Image.open(pets / "sky" / "1.png"),))
        task = asyncio.create_task(classify(query))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        assert task.result().answer.valid
        assert turns > 5
