from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bottega.errors import BottegaError, LoadError, SettingError
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.types import Answer, Completion
from tests.builders import solid_image
from tests.evaluation.benchmarks.published import image_cell, write_image, write_json, write_table

CHOICES = ["skateboarder", "train", "delivery", "cab"]


def question(number: int, **others: object) -> dict[str, object]:
    """Return a row of `aokvqa_v1p0_*.json`."""
    return {
        "split": "val",
        "image_id": number,
        "question_id": f"q{number}",
        "question": f"What does {number} await?",
        "choices": CHOICES,
        "correct_choice_idx": 3,
        "direct_answers": ["train"] * 2 + ["taxi"] * 5 + ["a", "b", "c"],
        "difficult_direct_answer": False,
        "rationales": ["No tracks.", "It is a street.", "A cab fits."],
        **others,
    }


def published(root: Path, train: Sequence[object], val: Sequence[object]) -> Path:
    for split, rows in (("train", train), ("val", val)):
        write_json(root / f"aokvqa_v1p0_{split}.json", rows)
        for number in range(1, 10):
            write_image(root / f"{split}2017" / f"{number:012}.jpg", number)
    return root


def test_direct_answers_skip_difficult_questions(tmp_path: Path) -> None:
    hard = question(8, difficult_direct_answer=True)
    published(
        tmp_path, [question(1), question(2, difficult_direct_answer=True)], [question(7), hard]
    )
    data = load_benchmark(f"aokvqa:{tmp_path}", seed=0)
    assert (len(data.knowledge), len(data.items)) == (2, 1)
    (item,) = data.items
    assert (item.query.id, item.query.choices, item.answer) == ("q7", (), "taxi")
    assert (item.query.images, item.rationale) == ((solid_image(7),), None)
    assert data.metrics[0].name == "direct_answer_original"
    assert data.metrics[0].score(item, Answer("train")) == pytest.approx(2 / 3)
    assert [metric.score(item, Answer("Taxi.")) for metric in data.metrics] == [0, 1]


def test_choices_are_answered_by_letter(tmp_path: Path) -> None:
    published(tmp_path, [question(1)], [question(7), question(8, difficult_direct_answer=True)])
    data = load_benchmark(f"aokvqa:{tmp_path},answers=choices,rationales=yes", seed=0)
    assert (len(data.items), data.labels) == (2, ())
    item = data.items[0]
    assert (item.query.choices, item.answer) == (tuple(CHOICES), "cab")
    assert data.knowledge[0].rationale == "No tracks."
    right, wrong = (data.parse(item.query, Completion(reply)) for reply in ("(D)", "B"))
    assert [data.metrics[0].score(item, answer) for answer in (right, wrong)] == [1, 0]
    assert data.metrics[0].name == "accuracy"


def test_hub_table_lists_are_parsed_from_text(tmp_path: Path) -> None:
    def row(number: int, answers: str) -> dict[str, object]:
        return question(number, image=image_cell(number), direct_answers=answers)

    write_table(tmp_path / "data" / "train-00000-of-00001.parquet", [row(1, "['taxi'] ")])
    queries = [row(7, "['taxi', 'cab', 'taxi']"), row(8, "['taxi', __import__('os')]")]
    write_table(tmp_path / "data" / "validation-00000-of-00001.parquet", queries)
    bad: list[BottegaError] = []
    data = load_benchmark(f"aokvqa:{tmp_path}", seed=0, on_error=bad.append)
    assert [item.query.images for item in data.items] == [(solid_image(7),)]
    assert data.metrics[0].score(data.items[0], Answer("taxi")) == pytest.approx(2 / 3)
    assert ["direct_answers is not a list" in str(error) for error in bad] == [True]


@pytest.mark.parametrize("answers", ["direct", "choices"])
def test_questions_without_answers_are_not_scored(tmp_path: Path, answers: str) -> None:
    published(tmp_path, [question(1)], [])
    row = question(7)
    for name in ("correct_choice_idx", "direct_answers", "rationales"):
        del row[name]
    hard = {**row, "question_id": "q8", "difficult_direct_answer": True}
    write_json(tmp_path / "aokvqa_v1p0_test.json", [row, hard])
    write_image(tmp_path / "test2017" / f"{7:012}.jpg", 7)
    spec = f"aokvqa:{tmp_path},split=test,answers={answers},rationales=yes"
    data = load_benchmark(spec, seed=0)
    by_choice = answers == "choices"
    assert [one.rationale for one in data.knowledge] == ["No tracks."]
    # A leaderboard for direct answers excludes the difficult question too.
    assert {item.query.id for item in data.items} == ({"q7", "q8"} if by_choice else {"q7"})
    item = data.items[0]
    assert item.query.choices == (tuple(CHOICES) if by_choice else ())
    answer = data.parse(item.query, Completion("(D)" if by_choice else "taxi"))
    assert (answer.valid, answer.text) == (True, "cab" if by_choice else "taxi")
    [metric] = data.metrics
    assert (metric.name, metric.estimate([], seed=0)) == ("not_scored", None)


def test_a_missing_test_file_is_named(tmp_path: Path) -> None:
    published(tmp_path, [question(1)], [question(7)])
    with pytest.raises(LoadError, match="aokvqa_v1p0_test"):
        load_benchmark(f"aokvqa:{tmp_path},split=test", seed=0)


def test_invalid_choice_is_reported(tmp_path: Path) -> None:
    published(tmp_path, [question(1)], [question(7), question(8, correct_choice_idx=4)])
    bad: list[BottegaError] = []
    spec = f"aokvqa:{tmp_path},answers=choices"
    assert len(load_benchmark(spec, seed=0, on_error=bad.append).items) == 1
    assert ["not one of the 4 choices" in str(error) for error in bad] == [True]


def test_unknown_options_and_missing_files_raise(tmp_path: Path) -> None:
    published(tmp_path, [question(1)], [question(7)])
    with pytest.raises(SettingError):
        load_benchmark(f"aokvqa:{tmp_path},answers=both", seed=0)
    (tmp_path / "aokvqa_v1p0_train.json").unlink()
    with pytest.raises(LoadError, match=r"has no aokvqa_v1p0_train\.json") as raised:
        load_benchmark(f"aokvqa:{tmp_path}", seed=0)
    assert "train2017" in raised.value.hint
