from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.evaluation.report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Point,
    Series,
    by_cost,
    by_shots,
    pareto_front,
)

SHARES = st.floats(0, 1)
COSTS = st.one_of(st.just(0.0), st.floats(1e-7, 1e6))


def point(x: float, value: float, circled: bool = False) -> Point:
    return Point(x, value, max(value - 0.05, 0), min(value + 0.05, 1), "", circled)


@given(st.lists(st.tuples(COSTS, SHARES), min_size=1, max_size=12))
def test_every_mark_is_inside_the_frame(points: list[tuple[float, float]]) -> None:
    chart = by_cost([Series("a", tuple(point(x, value) for x, value in points))], "t", "x")
    for mark in chart.lines[0].marks:
        assert LEFT <= mark.x <= WIDTH - RIGHT
        assert TOP - 0.01 <= mark.high <= mark.value <= mark.low <= HEIGHT - BOTTOM + 0.01
    assert all(LEFT <= x <= WIDTH - RIGHT + 0.01 for _, x in chart.x_ticks)
    assert len(chart.y_ticks) <= 7


def test_higher_cost_is_further_right_on_both_scales() -> None:
    for costs in ((0.0, 1.0, 2.0), (0.0, 0.001, 5.0)):
        chart = by_cost([Series("a", tuple(point(x, 0.5) for x in costs))], "t", "x")
        positions = [mark.x for mark in chart.lines[0].marks]
        assert positions == sorted(set(positions))


def test_shots_are_evenly_spaced_and_zero_shot_lines_are_flat() -> None:
    series = [
        Series("zero", (point(0, 0.2),), flat=True),
        Series("top", tuple(point(k, 0.5) for k in (1, 5, 20))),
    ]
    flat, top = by_shots(series, "t").lines
    assert [mark.x for mark in flat.marks] == [LEFT, WIDTH - RIGHT]
    one, five, twenty = (mark.x for mark in top.marks)
    assert five - one == pytest.approx(twenty - five)


def test_front_contains_pareto_optimal_points() -> None:
    points = [(1.0, 0.5), (2.0, 0.4), (2.0, 0.7), (3.0, 0.7), (4.0, 0.9)]
    assert pareto_front(points) == {(1.0, 0.5), (2.0, 0.7), (4.0, 0.9)}
    assert pareto_front([(1.0, 0.5), (1.0, 0.6)]) == {(1.0, 0.6)}


def test_adjacent_lines_have_different_markers() -> None:
    series = [Series(str(i), (point(1, 0.5),)) for i in range(8)]
    assert len({line.shape for line in by_shots(series, "t").lines}) == 8
