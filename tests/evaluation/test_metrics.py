from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score

from bottega.evaluation.metrics.metric import Judgement, MacroF1, accuracy, macro_f1, mean
from bottega.types import Answer, Example, Query

LABELS = ("a", "b", "c")
LABEL_SETS = st.lists(st.sets(st.sampled_from(LABELS)), min_size=1, max_size=30)


def test_wilson_interval_matches_a_textbook_case() -> None:
    estimate = accuracy([True] * 8 + [False] * 2)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx(
        (0.8, 0.4902, 0.9433), abs=1e-4
    )


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_wilson_interval_contains_the_value_within_bounds(correct: list[bool]) -> None:
    estimate = accuracy(correct)
    assert 0 <= estimate.low <= estimate.value + 1e-12
    assert estimate.value - 1e-12 <= estimate.high <= 1


def test_graded_score_interval_is_95_percent() -> None:
    """For many items the interval is close to the normal one: 1.96 standard errors per side."""
    scores = np.random.default_rng(0).uniform(0, 1, 400)
    estimate, error = mean([*scores], seed=0), scores.std() / 20
    assert estimate.value == pytest.approx(scores.mean())
    assert estimate.value - estimate.low == pytest.approx(1.96 * error, rel=0.08)
    assert estimate.high - estimate.value == pytest.approx(1.96 * error, rel=0.08)


def test_macro_f1_interval_is_95_percent() -> None:
    """With equal accuracy for every label the interval is centred on that accuracy."""
    rng = np.random.default_rng(0)
    truth = [("a",)] * 400
    predicted = [("a",) if right else () for right in rng.uniform(0, 1, 400) < 0.5]
    estimate = macro_f1(truth, predicted, ("a",), seed=0)
    share = sum(map(bool, predicted)) / 400
    error = 2 / (1 + share) ** 2 * (share * (1 - share) / 400) ** 0.5  # F1 is 2s / (1 + s)
    assert estimate.value == pytest.approx(2 * share / (1 + share))
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * error, rel=0.08)


@given(st.data(), LABEL_SETS)
def test_macro_f1_agrees_with_scikit_learn(data: st.DataObject, truth: list[set[str]]) -> None:
    predicted = data.draw(
        st.lists(st.sets(st.sampled_from(LABELS)), min_size=len(truth), max_size=len(truth))
    )
    occurring = sorted(set().union(*truth, *predicted))
    estimate = macro_f1([*map(tuple, truth)], [*map(tuple, predicted)], LABELS, seed=0)
    if not occurring:
        assert estimate.value == 0
        return
    each = [
        f1_score([label in t for t in truth], [label in p for p in predicted], zero_division=0)
        for label in occurring
    ]
    assert estimate.value == pytest.approx(sum(each) / len(each))
    assert estimate.low <= estimate.high


def test_macro_f1_of_a_run_matches_its_answers() -> None:
    truth, predicted = [("a",), ("a", "b"), ("b",)], [("a",), ("a",), ("c",)]
    judged = [
        Judgement(Example(Query(str(i)), "", labels=gold), Answer("", labels=reply), 0.0)
        for i, (gold, reply) in enumerate(zip(truth, predicted, strict=True))
    ]
    estimate = MacroF1(LABELS).estimate(judged, seed=0)
    assert estimate == macro_f1(truth, predicted, LABELS, seed=0)
    assert estimate.value == pytest.approx(1 / 3)  # a: 1, b: 0, c: 0


def test_macro_f1_is_repeatable_for_a_seed() -> None:
    truth, predicted = [("a",), ("b",), ("a", "b")] * 5, [("a",), ("a",), ("b",)] * 5
    assert macro_f1(truth, predicted, LABELS, seed=3) == macro_f1(truth, predicted, LABELS, seed=3)
    assert macro_f1(truth, predicted, LABELS, seed=3) != macro_f1(truth, predicted, LABELS, seed=4)
