from __future__ import annotations

import pytest

from bottega.evaluation.metrics.metric import Judgement
from bottega.evaluation.metrics.open_answers import Containment, ExactMatch, WholeMatch
from bottega.types import Answer, Example, Query

ITEM = Example(Query("shape: large", id="0"), "Three")


@pytest.mark.parametrize(
    "reply, exact, contained",
    [
        ("three", 1, 1),
        (" Three\nNext question", 1, 1),
        ("three. That is all.", 1, 1),
        ("three \nNext", 0, 1),
        ("It is three", 0, 1),
        ("four. Or three", 0, 1),
        ("four", 0, 0),
        (".three", 0, 1),
        ("", 0, 0),
    ],
)
def test_reply_is_truncated_as_published(reply: str, exact: int, contained: int) -> None:
    assert ExactMatch().score(ITEM, Answer(reply)) == exact
    assert Containment().score(ITEM, Answer(reply)) == contained


def test_containment_accepts_longer_answers() -> None:
    item = Example(Query("shape: large"), "3")
    assert Containment().score(item, Answer("13")) == 1
    assert ExactMatch().score(item, Answer("13")) == 0


def test_invalid_reply_scores_zero() -> None:
    for metric in (ExactMatch(), Containment()):
        assert metric.score(ITEM, Answer("three", valid=False)) == 0


def test_estimate_has_a_wilson_interval() -> None:
    judged = [Judgement(ITEM, Answer(""), float(score)) for score in (1, 1, 0, 0)]
    estimate = Containment().estimate(judged, seed=0)
    assert estimate.value == 0.5
    assert estimate.low == pytest.approx(0.15, abs=0.01)


@pytest.mark.parametrize(
    ("gold", "reply", "score"),
    [
        ("Three", "Three", 1),
        ("Three", "three.", 1),
        ("Three", "Three\nNext question", 1),
        ("Three", "Three. That is all.", 1),
        ("3.5", "3.5", 1),
        ("3", "3.5", 0),
        ("Three", "four\nThree", 0),
        ("Three", "four. Three", 0),
        ("?!", "?!", 1),
        ("?!", "!!", 0),
    ],
)
def test_exact_match_accepts_reply_first_line_or_first_sentence(
    gold: str, reply: str, score: float
) -> None:
    item = Example(Query("q"), gold)
    assert WholeMatch().score(item, Answer(reply)) == score
    assert WholeMatch().score(item, Answer(reply, valid=False)) == 0


def test_estimate_is_the_mean_of_the_scores() -> None:
    judged = [Judgement(ITEM, Answer("three"), score) for score in (1.0, 1.0, 0.0, 1.0)]
    for metric in (ExactMatch(), WholeMatch(), Containment()):
        estimate = metric.estimate(judged, seed=0)
        assert estimate.low < estimate.value == 0.75 < estimate.high
