from __future__ import annotations

import json

import pytest

from bottega.evaluation.metrics.metric import Judgement
from bottega.evaluation.metrics.official_choices import MMMUAccuracy
from bottega.parsing import ChoiceParser
from bottega.types import Answer, Completion, Example, Query
from tests.paths import SHARED

REPLIES = SHARED / "data" / "mmmu"
CHOICES = ("Rome", "Paris")
parse = ChoiceParser()


def open_score(reply: str, *golds: str) -> float:
    item = Example(Query("?", id="q"), golds[0])
    return MMMUAccuracy({"q": golds}).score(item, parse(item.query, Completion(reply)))


def test_choice_must_match_the_option() -> None:
    item = Example(Query("?", choices=CHOICES), "Paris")
    scores = [MMMUAccuracy().score(item, parse(item.query, Completion(t))) for t in ("B", "A", "?")]
    assert scores == [1.0, 0.0, 0.0]
    assert MMMUAccuracy().score(item, Answer("Paris", valid=False)) == 0.0


@pytest.mark.parametrize(
    ("reply", "gold", "score"),
    [
        ("30", "30", 1.0),
        ("It is 30.001 degrees.", "30", 1.0),
        ("300", "30", 0.0),
        ("the answer is $1,249", "1249", 1.0),
        ("0.956", "0.963", 1.0),
        ("0.95", "0.963", 0.0),
        ("It runs on gasoline", "gas", 1.0),
        ("It runs on gas", "gasoline", 0.0),
        ("the answer is A", "A", 1.0),
        ("that", "A", 0.0),
        ("", "30", 0.0),
    ],
)
def test_open_answer_parsing(reply: str, gold: str, score: float) -> None:
    assert open_score(reply, gold) == score


def test_any_gold_answer_is_correct() -> None:
    assert open_score("3.43", "24/7", "3.429") == open_score("it is 24/7", "24/7", "3.429") == 1.0
    assert open_score("3.5", "24/7", "3.429") == 0.0


def test_name_states_the_fallback() -> None:
    assert [MMMUAccuracy().name, MMMUAccuracy(random_fallback=True).name] == [
        "mmmu_accuracy",
        "mmmu_accuracy_random",
    ]


def test_estimate_is_the_mean_score() -> None:
    right, wrong = Answer("x"), Answer("y")
    judged = [
        Judgement(Example(Query("?"), "x"), answer, float(answer is right))
        for answer in (right, right, wrong)
    ]
    assert MMMUAccuracy().estimate(judged, seed=0).value == pytest.approx(2 / 3)


def test_stored_open_replies_match_official_scores() -> None:
    if not REPLIES.is_dir():
        pytest.skip("needs ../shared/data/mmmu")
    rows = [
        row
        for file in sorted(REPLIES.glob("qwen_vl/[A-Z]*.json"))
        for row in json.loads(file.read_bytes())
        if row["question_type"] != "multiple-choice"
    ]
    golds = [row["answer"] if isinstance(row["answer"], list) else [row["answer"]] for row in rows]
    right = [
        row["id"]
        for row, ours in zip(rows, golds, strict=True)
        if open_score(row["response"], *ours)
    ]
    # Scores of eval_utils.py in MMMU-Benchmark/MMMU.
    official = "Computer_Science_9 Electronics_21 Manage_25 Marketing_11 Pharmacy_26 Physics_21"
    assert (len(rows), right) == (53, [f"validation_{name}" for name in official.split()])
