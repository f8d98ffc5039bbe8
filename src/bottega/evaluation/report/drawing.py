"""The two curves of a section: what more demonstrations bring, and what quality costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bottega.evaluation.curves import Point, Series, best_for_their_cost
from bottega.evaluation.report.figures import Row, Section

PER = 1000


def shot_series(section: Section) -> list[Series]:
    """One line for each method of each run; flat where nothing is shown."""
    return [
        Series(name, tuple(_point(row, row.result.shots) for row in rows), not rows[0].result.shots)
        for name, rows in _lines(section)
    ]


def cost_series(section: Section) -> list[Series]:
    """Points at `cost_axis` an item; those on the Pareto front are ringed."""
    cost = _cost(section.rows)
    lines = [
        (name, [_point(row, cost(row)) for row in sorted(rows, key=cost)])
        for name, rows in _lines(section)
    ]
    front = best_for_their_cost((point.x, point.value) for _, points in lines for point in points)
    return [
        Series(
            name,
            tuple(replace(point, ringed=(point.x, point.value) in front) for point in points),
        )
        for name, points in lines
    ]


def cost_axis(section: Section) -> str:
    return f"US dollars for {PER:,} items" if _priced(section.rows) else "tokens for one item"


def _lines(section: Section) -> list[tuple[str, list[Row]]]:
    """Rows with a figure, by rising numbers of shots."""
    named: dict[str, list[Row]] = {}
    for row in section.rows:
        if row.result.value is not None:
            named.setdefault(f"{row.prefix}{row.result.method}", []).append(row)
    return list(named.items())


def _point(row: Row, x: float) -> Point:
    value, low, high = row.result.value or 0.0, row.result.low or 0.0, row.result.high or 0.0
    text = f"{row.title}: {value:.3f} [{low:.3f}, {high:.3f}], n = {row.result.n}"
    return Point(x, value, low, high, text)


def _priced(rows: Sequence[Row]) -> bool:
    """Whether all costs are known and somebody had to pay."""
    costs = [row.result.cost_usd for row in rows if row.result.n]
    return None not in costs and any(costs)


def _cost(rows: Sequence[Row]) -> Callable[[Row], float]:
    if _priced(rows):
        return lambda row: PER * (row.each(row.result.cost_usd) or 0.0)
    return lambda row: row.each(row.tokens) or 0.0
