from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.evaluation.metrics.metric import Judgement
from bottega.evaluation.metrics.open_answers import (
    References,
    Variant,
    direct_answer,
    leave_one_out,
    normalised,
    vqa_accuracy,
)
from bottega.types import Answer, Example, Query

ITEM = Example(Query("Which colour?", id="7"), "red")
REPLIES = st.sampled_from(["red", "Red.", "a red", "blue", "2", "two", "dont", "don't", ""])
VARIANTS = st.sampled_from(("original", "always-normalised"))


def accuracy(reply: str, golds: list[str], variant: Variant = "original") -> float:
    return vqa_accuracy({"7": golds}, variant).score(ITEM, Answer(reply))


@pytest.mark.parametrize("same, score", [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0)])
def test_leave_one_out_uses_annotator_position(same: int, score: float) -> None:
    """Leave-one-out by answer text would score two matches 0.533 and three 0.7."""
    golds = ["red"] * same + [f"other {i}" for i in range(10 - same)]
    assert accuracy("red", golds) == pytest.approx(score)


def test_original_metric_skips_normalisation_on_full_agreement() -> None:
    assert accuracy("Red.", ["red"] * 10) == 0
    assert accuracy("Red.", ["red"] * 9 + ["blue"]) == 1
    assert accuracy("Red.", ["red"] * 10, "always-normalised") == 1


def test_metric_name_states_the_variant() -> None:
    assert vqa_accuracy({}).name == "vqa_accuracy_original"
    assert direct_answer({}, "always-normalised").name == "direct_answer_always-normalised"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("A  Dog, the\ncat.", "dog cat"),
        ("None of two", "0 of 2"),
        ("3.5 miles.", "3.5 miles"),
        ("1,000 men/women", "1000 menwomen"),
        ("men/women", "men women"),
        ("t-shirt", "t shirt"),
        ("dont; wouldnt've", "don't wouldn't've"),
        ("she'd've 'ow'sat", "she'd've 'ow's'at"),
    ],
)
def test_answers_are_normalised_as_published(text: str, expected: str) -> None:
    assert normalised(text) == expected


@given(REPLIES, st.lists(REPLIES, min_size=1, max_size=12), VARIANTS, st.randoms())
def test_annotator_order_does_not_matter(
    reply: str, golds: list[str], variant: Variant, rng: random.Random
) -> None:
    shuffled = rng.sample(golds, len(golds))
    for metric in (vqa_accuracy, direct_answer):
        score = metric({"7": golds}, variant).score(ITEM, Answer(reply))
        assert 0 <= score <= 1
        assert score == metric({"7": shuffled}, variant).score(ITEM, Answer(reply))


@given(st.text(max_size=20), VARIANTS, st.integers(4, 12))
def test_unanimous_answer_is_correct(reply: str, variant: Variant, annotators: int) -> None:
    references = {"7": [reply] * annotators}
    assert vqa_accuracy(references, variant).score(ITEM, Answer(reply)) == 1
    assert direct_answer(references, variant).score(ITEM, Answer(reply)) == 1


@given(st.integers(1, 20), st.data())
def test_more_agreement_never_lowers_the_score(annotators: int, data: st.DataObject) -> None:
    matches = data.draw(st.integers(1, annotators))
    assert leave_one_out(matches, annotators) >= leave_one_out(matches - 1, annotators)


def test_direct_answer_uses_all_annotators_and_exact_text() -> None:
    references: References = {"7": ["red"] * 2 + ["blue"] * 8}
    assert direct_answer(references).score(ITEM, Answer("red")) == pytest.approx(2 / 3)
    assert direct_answer(references).score(ITEM, Answer("Red")) == 0
    normal = direct_answer(references, "always-normalised")
    assert normal.score(ITEM, Answer("Red.")) == pytest.approx(2 / 3)


def test_invalid_answer_scores_zero() -> None:
    metric = vqa_accuracy({"7": ["red"] * 10})
    assert metric.score(ITEM, Answer("red", valid=False)) == 0


def test_item_without_annotations_raises() -> None:
    with pytest.raises(SettingError, match="'7'"):
        vqa_accuracy({"8": ["red"]}).score(ITEM, Answer("red"))


def test_estimate_is_the_mean_with_an_interval() -> None:
    metric = vqa_accuracy({"7": ["red"] * 2 + ["blue"] * 8})
    judged = [Judgement(ITEM, Answer(reply), metric.score(ITEM, Answer(reply))) for reply in "ab"]
    judged.append(Judgement(ITEM, Answer("red"), metric.score(ITEM, Answer("red"))))
    estimate = metric.estimate(judged, seed=0)
    assert estimate.value == pytest.approx(0.2)
    assert 0 <= estimate.low <= 0.2 <= estimate.high <= 0.6
