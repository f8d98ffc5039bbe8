from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.evaluation.metrics.metric import Calibration, Judgement, by_confidence, calibration
from bottega.types import Answer, Example, Query

ITEM = Example(Query("Which?"), "a")
CONFIDENCES = st.none() | st.floats(0, 1)
ANSWERS = st.lists(st.tuples(CONFIDENCES, st.floats(0, 1)), min_size=1, max_size=40)


def judged(*pairs: tuple[float | None, float]) -> list[Judgement]:
    return [
        Judgement(ITEM, Answer("a", confidence=confidence), score) for confidence, score in pairs
    ]


def calibrated(*pairs: tuple[float | None, float], bins: int = 10) -> Calibration:
    result = calibration(judged(*pairs), seed=0, bins=bins)
    assert result is not None
    return result


def test_ece_of_a_worked_example() -> None:
    """Bin 0.9 to 1: confidence 0.95, accuracy 0.5; bin 0.5 to 0.6: confidence 0.6, accuracy 1."""
    result = calibrated((0.9 + 1e-9, 1), (1.0, 0), (0.6, 1), (0.6, 1))
    assert result.error.value == pytest.approx((2 * 0.45 + 2 * 0.4) / 4)
    assert [(b.low, b.high, b.n, b.score) for b in result.bins] == [
        (0.5, 0.6, 2, 1),
        (0.9, 1, 2, 0.5),
    ]
    assert result.name == "ece_10_equal_width_bins"


def test_calibrated_bins_have_no_error() -> None:
    eighty = [(0.8, 1.0)] * 8 + [(0.8, 0.0)] * 2
    fifty = [(0.5, 1.0)] * 5 + [(0.5, 0.0)] * 5
    result = calibrated(*eighty, *fifty)
    assert result.error.value == pytest.approx(0)
    assert result.error.low <= result.error.value <= result.error.high


def test_answers_without_confidence_are_excluded_and_counted() -> None:
    result = calibrated((None, 0), (None, 1), (1.0, 1))
    assert (result.n, result.without, result.error.value) == (1, 2, 0)
    assert calibration(judged((None, 1)), seed=0) is None


def test_zero_confidence_is_in_the_first_bin() -> None:
    assert calibrated((0.0, 0), (0.1, 0)).bins[0].n == 2


@given(ANSWERS, st.integers(1, 20))
def test_calibration_error_is_bounded_and_inside_its_interval(
    pairs: list[tuple[float | None, float]], bins: int
) -> None:
    result = calibration(judged(*pairs), seed=0, bins=bins)
    if result is None:
        assert all(confidence is None for confidence, _ in pairs)
        return
    error = result.error
    assert 0 <= error.low <= error.value <= error.high <= 1 + 1e-12
    assert sum(one.n for one in result.bins) == result.n == len(pairs) - result.without


def test_scores_of_the_answers_above_each_confidence() -> None:
    pairs = [(0.5, 0.0), (0.75, 1.0), (0.9, 1.0), (None, 0.0), (0.4, 1.0)]
    found = by_confidence(judged(*pairs), seed=0)
    assert [(one.confidence, one.n, one.share) for one in found] == [
        (0.5, 3, 0.6),
        (0.7, 2, 0.4),
        (0.8, 1, 0.2),
        (0.9, 1, 0.2),
    ]
    assert [one.value for one in found] == pytest.approx([2 / 3, 1, 1, 1])
    assert by_confidence(judged((None, 1.0)), seed=0) == ()


@given(ANSWERS)
def test_fewer_answers_reach_a_higher_confidence(pairs: list[tuple[float | None, float]]) -> None:
    found = by_confidence(judged(*pairs), seed=0)
    counts = [one.n for one in found]
    assert counts == sorted(counts, reverse=True)
    assert all(one.low - 1e-9 <= one.value <= one.high + 1e-9 for one in found)
