from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from bottega.evaluation.outcomes import ScoredAnswer
from bottega.evaluation.streams.growing_cache import StreamResult
from bottega.evaluation.streams.stream_plan import Curve, Stream
from bottega.evaluation.streams.stream_summary import (
    BY_RATE,
    BY_START,
    BY_THIRD,
    Trend,
    find_trends,
)
from bottega.types import Answer, Example
from tests.builders import example

RATE_VALUES = (0.2, 0.4, 0.6)
LENGTH = 12
Scores = Callable[[Stream, int], float]


def numbered(index: int) -> Example:
    made = example("a", index)
    return replace(made, query=replace(made.query, id=str(index)))


def result(stream: Stream, score: Scores) -> StreamResult:
    """Every second item goes to the master."""
    scored = tuple(
        ScoredAnswer(
            index=index,
            item=numbered(index),
            answer=Answer("a"),
            scores=(score(stream, index),),
            tier="master" if index % 2 else "apprentice",
        )
        for index in range(LENGTH)
    )
    return StreamResult(scored, LENGTH)


def results(score: Scores, *curves: Curve, orders: int = 3) -> dict[Stream, StreamResult]:
    planned = [
        Stream(curve, rate, order)
        for curve in curves
        for rate in RATE_VALUES
        for order in range(1, orders + 1)
    ]
    return {stream: result(stream, score) for stream in planned}


def trend(found: list[Trend], over: str) -> Trend:
    return next(one for one in found if one.over == over)


def test_score_that_rises_with_the_rate_in_every_order() -> None:
    found = find_trends(results(lambda stream, _: stream.rate, Curve()), "master")
    [rising] = found
    assert (rising.over, rising.curve, rising.orders) == (BY_RATE, "no start, image", 3)
    assert rising.conditions == ("0.2", "0.4", "0.6")
    assert rising.means == pytest.approx(RATE_VALUES)
    assert rising.p == pytest.approx(1 / math.factorial(3) ** 3)  # all orders agree


def test_falling_and_equal_scores_show_no_rise() -> None:
    scores: Mapping[str, Scores] = {"falling": lambda s, _: -s.rate, "equal": lambda s, _: 0.5}
    for score in scores.values():
        assert find_trends(results(score, Curve()), "master")[0].p > 0.5


def test_starts_are_compared_as_means_over_the_rates() -> None:
    level = {"none": 0.1, "cold": 0.2, "warm": 0.3}
    curves = [Curve("none"), Curve("cold"), Curve("warm")]
    found = find_trends(results(lambda s, _: level[s.curve.start] + s.rate, *curves), "master")
    started = trend(found, BY_START)
    assert started.curve == "image" and started.conditions == ("none", "cold", "warm")
    assert started.means == pytest.approx((0.5, 0.6, 0.7)) and started.p < 0.01
    without_cold = find_trends(results(lambda s, _: s.rate, curves[0], curves[2]), "master")
    assert BY_START not in {one.over for one in without_cold}


def test_gain_by_third_counts_only_the_apprentice() -> None:
    """The master's scores rise too, but the gain is 0, 0.5 and 1 on the apprentice's items."""
    without = Curve(control="no-cache")

    def score(stream: Stream, index: int) -> float:
        if stream.curve == without or index % 2:
            return index / LENGTH
        return index / LENGTH + index * 3 // LENGTH / 2

    found = find_trends(results(score, Curve(), without), "master")
    thirds = trend(found, BY_THIRD)
    assert thirds.means == pytest.approx((0, 0.5, 1)) and thirds.p < 0.01
    assert BY_THIRD not in {one.over for one in find_trends(results(score, Curve()), "master")}


def test_one_order_or_an_incomplete_stream_allows_no_test() -> None:
    def rising(stream: Stream, index: int) -> float:
        return stream.rate

    assert find_trends(results(rising, Curve(), orders=1), "master") == []
    some = results(rising, Curve(), orders=3)
    cut = Stream(Curve(), 0.4, 2)
    some[cut] = StreamResult(some[cut].scored[:-1], LENGTH)
    [left] = find_trends(some, "master")
    assert left.orders == 2
