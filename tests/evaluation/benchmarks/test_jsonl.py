from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from bottega.errors import BottegaError, LoadError
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.types import Answer, Completion
from tests.evaluation.benchmarks.published import write_image


def lines(path: Path, *rows: Mapping[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return path


def test_rows_with_one_question_are_a_classification(tmp_path: Path) -> None:
    for shade in range(3):
        write_image(tmp_path / f"{shade}.png", shade)
    lines(
        tmp_path / "train.jsonl", {"image": "0.png", "label": "a"}, {"image": "1.png", "label": "b"}
    )
    lines(tmp_path / "test.jsonl", {"image": "2.png", "label": "a"})
    data = load_benchmark(f"jsonl:{tmp_path}", seed=0)
    assert (len(data.knowledge), len(data.items), data.labels) == (2, 1, ("a", "b"))
    assert data.metrics[0].name == "accuracy"


def test_multi_label_rows_use_multi_label_metrics(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", {"question": "x?", "labels": ["a", "b"]})
    lines(tmp_path / "test.jsonl", {"question": "y?", "labels": []})
    data = load_benchmark(f"jsonl:{tmp_path}", seed=0)
    assert (data.multi_label, data.metrics[0].name) == (True, "macro_f1")


def test_given_choices_are_kept(tmp_path: Path) -> None:
    row = {"question": "Hue?", "answer": "red", "choices": ["red", "blue"]}
    lines(tmp_path / "train.jsonl", row)
    lines(tmp_path / "test.jsonl", {**row, "question": "Colour?"})
    data = load_benchmark(f"jsonl:{tmp_path}", seed=0)
    (item,) = data.items
    assert (item.query.choices, data.labels) == (("red", "blue"), ())
    assert data.metrics[0].score(item, data.parse(item.query, Completion("Red."))) == 1


def test_open_answers_from_two_files(tmp_path: Path) -> None:
    shown = lines(
        tmp_path / "a" / "examples.jsonl", {"question": "Capital of Italy?", "answer": "Rome"}
    )
    queries = lines(tmp_path / "b" / "queries.jsonl", {"question": "Of France?", "answer": "Paris"})
    data = load_benchmark(f"jsonl:{shown},{queries}", seed=0)
    (item,) = data.items
    answer = data.parse(item.query, Completion("Answer: paris."))
    scores = {metric.name: metric.score(item, answer) for metric in data.metrics}
    assert scores == {"same_answer": 1, "undecided": 0, "containment": 1}
    assert data.metrics[0].score(item, Answer("Rome")) == 0


@pytest.mark.parametrize(
    ("question", "gold", "reply", "score"),
    [
        ("How many people live there?", "1234", "1,234", 1),
        ("How long is it?", "12 cm", "The length is 12 cm.", 1),
        ("How long is it in cm?", "12", "12 cm", 1),
        ("How long is it?", "12 cm", "120 mm", 1),
        ("How many apples are there?", "7", "Seven", 1),
        ("How many apples are there?", "7", "Answer: 7 apples", 1),
        ("How many apples are there?", "7", "There are eight.", 0),
        ("What is it?", "sofa", "couch", None),
        ("What is it?", "sofa", "A sofa. It is red.", 1),
        ("What is it?", "sofa", "I cannot see the image.", 0),
        ("What is it?", "sofa", "A sofa. Wait, it is a bed.", None),
    ],
)
def test_open_answers_are_compared_by_meaning(
    tmp_path: Path, question: str, gold: str, reply: str, score: float | None
) -> None:
    """`None` is an undecided answer, which scores 0 and is counted."""
    lines(tmp_path / "train.jsonl", {"question": "Capital of Italy?", "answer": "Rome"})
    lines(tmp_path / "test.jsonl", {"question": question, "answer": gold})
    data = load_benchmark(f"jsonl:{tmp_path}", seed=0)
    (item,) = data.items
    answer = data.parse(item.query, Completion(reply))
    same, undecided, _ = (metric.score(item, answer) for metric in data.metrics)
    assert (same, undecided) == (score or 0, float(score is None))


def test_unknown_scoring_is_an_error(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", {"question": "Capital of Italy?", "answer": "Rome"})
    with pytest.raises(BottegaError, match="scoring is unknown, got 'strict'"):
        load_benchmark(f"jsonl:{tmp_path},scoring=strict", seed=0)


@pytest.mark.parametrize(
    ("gold", "reply", "score"),
    [
        ("3.5", "Answer: 3.5", 1),
        ("3.5", "3", 0),
        ("Dr. No", "dr. no", 1),
        ("(b)", "(b)", 1),
        ("Yes.", "Yes. It is.", 1),
        ("?", "?!", 0),
        ("3", "3.5", 0),
    ],
)
def test_open_answers_keep_periods(tmp_path: Path, gold: str, reply: str, score: float) -> None:
    lines(tmp_path / "train.jsonl", {"question": "Half of 5?", "answer": "2.5"})
    lines(tmp_path / "test.jsonl", {"question": "Half of it?", "answer": gold})
    data = load_benchmark(f"jsonl:{tmp_path},scoring=exact", seed=0)
    (item,) = data.items
    answer = data.parse(item.query, Completion(reply))
    assert data.metrics[0].score(item, answer) == score


def test_invalid_lines_and_missing_files_are_reported(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", {"question": "x?", "answer": "a"}, {"question": "y?"})
    with pytest.raises(LoadError, match=r"test\.jsonl does not exist") as raised:
        load_benchmark(f"jsonl:{tmp_path}", seed=0, on_error=lambda error: None)
    assert "TRAIN.jsonl,TEST.jsonl" in raised.value.hint
    lines(tmp_path / "test.jsonl", {"question": "z?", "answer": "b"})
    bad: list[BottegaError] = []
    assert len(load_benchmark(f"jsonl:{tmp_path}", seed=0, on_error=bad.append).knowledge) == 1
    assert ["line 2" in str(error) for error in bad] == [True]
