from __future__ import annotations

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score

from bottega.evaluation.metrics.metric import Judgement
from bottega.evaluation.metrics.open_answers import Answerability, vizwiz_accuracy
from bottega.types import Answer, Example, Query


def item(id: str) -> Example:
    return Example(Query("What is this?", id=id), "soup")


def judged(metric: Answerability, answers: dict[str, Answer]) -> list[Judgement]:
    items = [(item(id), answer) for id, answer in answers.items()]
    return [Judgement(one, answer, metric.score(one, answer)) for one, answer in items]


def test_only_the_answer_is_normalised() -> None:
    metric = vizwiz_accuracy({"a": ["soup"] * 10, "b": ["Soup"] * 10})
    assert metric.score(item("a"), Answer("The soup!")) == 1
    assert metric.score(item("b"), Answer("Soup")) == 0


def test_answerability_from_answer_text() -> None:
    metric = Answerability({"a", "b"}, "f1")
    predictions = {"a": "Unanswerable.", "b": "soup", "c": "unanswerable", "d": "soup"}
    judgements = judged(metric, {id: Answer(text) for id, text in predictions.items()})
    assert [one.score for one in judgements] == [1, 0, 0, 1]
    assert metric.estimate(judgements, seed=0).value == pytest.approx(0.5)


def test_confidence_ranks_unanswerable_predictions() -> None:
    metric = Answerability({"a", "b"})
    answers = {
        "a": Answer("unanswerable", confidence=0.9),
        "c": Answer("unanswerable", confidence=0.2),
        "b": Answer("soup", confidence=0.1),
        "d": Answer("soup", confidence=0.8),
    }
    estimate = metric.estimate(judged(metric, answers), seed=0)
    assert estimate.value == pytest.approx((1 + 2 / 3) / 2)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1


def test_invalid_reply_counts_against_answerability() -> None:
    metric = Answerability({"a"}, "f1")
    judgements = judged(metric, {id: Answer("", valid=False) for id in "ab"})
    assert [one.score for one in judgements] == [0, 0]
    assert metric.estimate(judgements, seed=0).value == 0


def test_answerability_requires_unanswerable_items() -> None:
    for metric in (Answerability((), "ap"), Answerability((), "f1")):
        judgements = judged(metric, {"a": Answer("soup"), "b": Answer("unanswerable")})
        assert metric.estimate(judgements, seed=0).value == 0


CONFIDENCES = st.sampled_from((None, 0.0, 0.3, 1.0))
PREDICTIONS = st.lists(
    st.tuples(st.booleans(), st.booleans(), CONFIDENCES), min_size=1, max_size=20
)


@settings(max_examples=12)
@given(PREDICTIONS)
def test_answerability_agrees_with_scikit_learn(
    predictions: list[tuple[bool, bool, float | None]],
) -> None:
    """Unanswerable items are the positives, as in VizWiz's code."""
    truth = [unanswerable for unanswerable, _, _ in predictions]
    answers = {
        str(i): Answer("unanswerable" if unanswerable_reply else "soup", confidence=confidence)
        for i, (_, unanswerable_reply, confidence) in enumerate(predictions)
    }
    positives = {str(i) for i, positive in enumerate(truth) if positive}
    ranking = [
        (1 if unanswerable_reply else -1) * (1.0 if confidence is None else confidence or 1e-9)
        for _, unanswerable_reply, confidence in predictions
    ]
    for kind, expected in (
        ("ap", average_precision_score(truth, ranking) if any(truth) else 0),
        ("f1", f1_score(truth, [s > 0 for s in ranking], zero_division=0)),
    ):
        metric = Answerability(positives, "ap" if kind == "ap" else "f1")
        with warnings.catch_warnings(action="error"):
            value = metric.estimate(judged(metric, answers), seed=0).value
        assert value == pytest.approx(expected)
