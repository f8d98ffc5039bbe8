from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score

from bottega.evaluation.metrics.intervals import accuracy
from bottega.evaluation.metrics.labels import macro_f1

LABELS = ("a", "b", "c")
LABEL_SETS = st.lists(st.sets(st.sampled_from(LABELS)), min_size=1, max_size=30)


def test_wilson_interval_of_a_textbook_case() -> None:
    estimate = accuracy([True] * 8 + [False] * 2)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx(
        (0.8, 0.4902, 0.9433), abs=1e-4
    )


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_the_interval_holds_the_value_and_stays_within_bounds(correct: list[bool]) -> None:
    estimate = accuracy(correct)
    assert 0 <= estimate.low <= estimate.value + 1e-12
    assert estimate.value - 1e-12 <= estimate.high <= 1


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


def test_macro_f1_is_repeatable_for_a_seed() -> None:
    truth, said = [("a",), ("b",), ("a", "b")] * 5, [("a",), ("a",), ("b",)] * 5
    assert macro_f1(truth, said, LABELS, seed=3) == macro_f1(truth, said, LABELS, seed=3)
    assert macro_f1(truth, said, LABELS, seed=3) != macro_f1(truth, said, LABELS, seed=4)
