"""Charts of all pages as SVG shapes: lines of scores with intervals, and stacked bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bottega.evaluation.outcomes import method_title
from bottega.evaluation.report.sections import ReportRow, Section
from bottega.evaluation.runs.runner import MethodResult

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 330, 62, 58, 14, 20
STYLES = 8
# SVG paths around (0, 0), one for each style.
SHAPES = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
    "M-3.6 -3.6h7.2v7.2h-7.2z",
    "M0 -4.8L4.6 3.6H-4.6z",
    "M0 -5.2L5 0L0 5.2L-5 0z",
    "M0 4.8L4.6 -3.6H-4.6z",
    "M-1.4 -4.6h2.8v3.2h3.2v2.8h-3.2v3.2h-2.8v-3.2h-3.2v-2.8h3.2z",
    "M-5 -2.5h10v5h-10z",
    "M-2.5 -5h5v10h-5z",
)
# Steps between ticks of a share; the first one with at most MAX_TICKS ticks is used.
STEPS = (0.02, 0.05, 0.1, 0.2, 0.25)
MAX_TICKS = 6
# Offset between methods, which keeps their intervals visible.
OFFSET = 5.0
PER = 1000  # items of a cost in dollars
# Bars are stretched to the width of the page; their labels are HTML.
BARS_WIDTH, BARS_HEIGHT = 720, 150
GAP = 0.15  # share of a bar's width
# Series of bars with a style of their own; the others share `STYLES` styles by rank.
FIXED = {"failed": "failed", "replayed": "replayed"}


@dataclass(frozen=True)
class Point:
    """Share with its 95 % interval at `x`; in a `ChartLine`, all four are in pixels."""

    x: float
    value: float
    low: float
    high: float
    text: str
    circled: bool = False


@dataclass(frozen=True)
class Series:
    """Points of one method; a `flat` series has no x value and spans the axis. `style` defaults to
    the position among the series."""

    name: str
    points: tuple[Point, ...]
    flat: bool = False
    style: int | None = None


class Scale(NamedTuple):
    """Axis in pixels; `ticks` have a text and a position."""

    position: Callable[[float], float]
    ticks: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class ChartLine:
    """Series in pixels with its style."""

    name: str
    style: int
    flat: bool
    marks: tuple[Point, ...]

    @property
    def points(self) -> str:
        return " ".join(f"{mark.x:.1f},{mark.value:.1f}" for mark in self.marks)

    @property
    def shape(self) -> str:
        return SHAPES[self.style]


@dataclass(frozen=True)
class Chart:
    """Chart in pixels; `front` is the polyline of the Pareto front, as "x,y x,y"."""

    title: str
    x_title: str
    lines: tuple[ChartLine, ...]
    x_ticks: tuple[tuple[str, float], ...]
    y_ticks: tuple[tuple[str, float], ...]
    front: str = ""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT


def by_shots(series: Sequence[Series], title: str) -> Chart:
    """Return a chart by number of shots, at equal distances: 1, 5, 10, 20 crowd a linear axis."""
    shots = sorted({point.x for one in series if not one.flat for point in one.points})
    step = (WIDTH - RIGHT - LEFT) / max(len(shots), 1)
    positions = {k: LEFT + step * (i + 0.5) for i, k in enumerate(shots)}
    ticks = tuple((f"{k:g}", positions[k]) for k in shots)
    scale = Scale(positions.__getitem__, ticks)
    return _chart(series, title, "demonstrations (not to scale)", scale, OFFSET)


def by_category(
    series: Sequence[Series], title: str, x_title: str, categories: Sequence[str]
) -> Chart:
    """Return a chart over categories; the x of a point is the index of its category."""
    step = (WIDTH - RIGHT - LEFT) / len(categories)
    positions = [LEFT + step * (i + 0.5) for i in range(len(categories))]
    ticks = tuple(zip(categories, positions, strict=True))
    return _chart(series, title, x_title, Scale(lambda x: positions[int(x)], ticks), OFFSET / 2)


def by_value(series: Sequence[Series], title: str, x_title: str) -> Chart:
    """Return a chart with a linear x axis from 0."""
    highest = max(point.x for one in series for point in one.points) or 1.0
    return _chart(series, title, x_title, _linear_scale(highest), OFFSET / 2)


def by_cost(series: Sequence[Series], title: str, x_title: str) -> Chart:
    """Return a chart by cost per item.

    Costs over several orders of magnitude use a logarithmic axis, with zero at its left end.
    """
    points = [point for one in series for point in one.points]
    chart = _chart(series, title, x_title, _cost_scale([point.x for point in points]), 0.0)
    front = [mark for line in chart.lines for mark in line.marks if mark.circled]
    front.sort(key=lambda mark: mark.x)
    return replace(chart, front=" ".join(f"{mark.x:.1f},{mark.value:.1f}" for mark in front))


def _chart(
    series: Sequence[Series], title: str, x_title: str, scale: Scale, offset: float
) -> Chart:
    """Return a chart. Its lines are `offset` pixels apart."""
    height, y_ticks = _share_scale(series)
    lines = []
    for i, one in enumerate(series):
        aside = offset * (i % STYLES - (min(len(series), STYLES) - 1) / 2)
        points = one.points[:1] * 2 if one.flat else one.points
        ends = (float(LEFT), float(WIDTH - RIGHT))
        xs = ends if one.flat else [scale.position(point.x) + aside for point in points]
        marks = tuple(_mark(point, x, height) for point, x in zip(points, xs, strict=True))
        style = i if one.style is None else one.style
        lines.append(ChartLine(one.name, style % STYLES, one.flat, marks))
    return Chart(title, x_title, tuple(lines), scale.ticks, y_ticks)


def pareto_front(points: Iterable[tuple[float, float]]) -> set[tuple[float, float]]:
    """Return the Pareto front of (cost, value) points."""
    front: set[tuple[float, float]] = set()
    best = -math.inf
    for cost, value in sorted(points, key=lambda point: (point[0], -point[1])):
        if value > best:
            front.add((cost, value))
            best = value
    return front


def _mark(point: Point, x: float, height: Callable[[float], float]) -> Point:
    value, low, high = height(point.value), height(point.low), height(point.high)
    return replace(point, x=x, value=value, low=low, high=high)


def _share_scale(series: Sequence[Series]) -> Scale:
    """Return the y scale, over the part up to 1 that the intervals need."""
    points = [point for one in series for point in one.points]
    low, high = min(point.low for point in points), max(point.high for point in points)
    step = next((step for step in STEPS if (high - low) / step <= MAX_TICKS - 1), STEPS[-1])
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(min(high, 1.0) / step - 1e-9), first + 1)

    def height(share: float) -> float:
        return TOP + (last * step - share) / ((last - first) * step) * (HEIGHT - TOP - BOTTOM)

    return Scale(
        height, tuple((f"{i * step:.2f}", height(i * step)) for i in range(first, last + 1))
    )


def _linear_scale(highest: float) -> Scale:
    step = round_up(highest / 5, (1, 2, 2.5, 5))
    ticks = (step * i for i in range(math.floor(highest / step + 1e-9) + 1))
    return _inner_scale(lambda x: x / highest, ticks)


def _cost_scale(costs: Sequence[float]) -> Scale:
    positive = [cost for cost in costs if cost > 0]
    if not positive:
        return _inner_scale(lambda cost: 0.0, [0.0])
    if max(positive) / min(positive) < 30:
        return _linear_scale(max(positive))
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    free = 1 if len(positive) < len(costs) else 0

    def part(cost: float) -> float:
        above = math.log10(cost) - low + free if cost > 0 else 0.0
        return above / (high - low + free)

    return _inner_scale(part, [0.0] * free + [10.0**power for power in range(low, high + 1)])


def _inner_scale(part: Callable[[float], float], ticks: Iterable[float]) -> Scale:
    """Return the x scale that has `part` of the width, inside margins, on the left of a value."""

    def position(x: float) -> float:
        return LEFT + 24 + part(x) * (WIDTH - RIGHT - LEFT - 48)

    return Scale(position, tuple((_tick(tick), position(tick)) for tick in ticks))


def round_up(value: float, parts: Sequence[float]) -> float:
    """Return the smallest product of one of `parts` and a power of ten that is at least `value`; 1
    for values up to 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * part for part in (*parts, 10) if power * part >= value)


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def shot_series(results: Sequence[tuple[str, MethodResult]]) -> list[Series]:
    """Return one series for each name; a method without shots is flat. Results without a value are
    skipped."""
    named: dict[str, list[MethodResult]] = {}
    for name, result in results:
        if result.value is not None:
            named.setdefault(name, []).append(result)
    return [
        Series(
            name,
            tuple(
                result_point(name, row, row.shots)
                for row in sorted(rows, key=lambda row: row.shots)
            ),
            not rows[0].shots,
        )
        for name, rows in named.items()
    ]


def shots_of(section: Section) -> list[Series]:
    """Return one series for each method of each run; flat without demonstrations."""
    return shot_series([(f"{row.prefix}{row.result.method}", row.result) for row in section.rows])


def cost_series(section: Section) -> list[Series]:
    """Return points by cost per item (`cost_axis`); those on the Pareto front are circled."""
    cost = _cost(section.rows)
    lines = [
        (name, [result_point(name, row.result, cost(row)) for row in sorted(rows, key=cost)])
        for name, rows in _lines(section)
    ]
    front = pareto_front((point.x, point.value) for _, points in lines for point in points)
    return [
        Series(
            name,
            tuple(replace(point, circled=(point.x, point.value) in front) for point in points),
        )
        for name, points in lines
    ]


def cost_axis(section: Section) -> str:
    return f"US dollars for {PER:,} items" if _priced(section.rows) else "tokens for one item"


def _lines(section: Section) -> list[tuple[str, list[ReportRow]]]:
    """Group rows with a value by method."""
    named: dict[str, list[ReportRow]] = {}
    for row in section.rows:
        if row.result.value is not None:
            named.setdefault(f"{row.prefix}{row.result.method}", []).append(row)
    return list(named.items())


def _priced(rows: Sequence[ReportRow]) -> bool:
    """Return whether all costs are known and some are not zero."""
    costs = [row.result.cost_usd for row in rows if row.result.n]
    return None not in costs and any(costs)


def _cost(rows: Sequence[ReportRow]) -> Callable[[ReportRow], float]:
    if _priced(rows):
        return lambda row: PER * (row.per_item(row.result.cost_usd) or 0.0)
    return lambda row: row.per_item(row.tokens) or 0.0


def result_point(name: str, result: MethodResult, x: float) -> Point:
    """Return the main figure of a result that has a value, as a point at `x`."""
    value, low, high = result.value or 0.0, result.low or 0.0, result.high or 0.0
    figure = f"{value:.3f} [{low:.3f}, {high:.3f}], n = {result.n}"
    return Point(x, value, low, high, f"{method_title(name, result.shots)}: {figure}")


@dataclass(frozen=True)
class Bar:
    """Rectangle in units of the viewBox. `text` is its tooltip."""

    x: float
    y: float
    width: float
    height: float
    style: str
    text: str


@dataclass(frozen=True)
class StackedBars:
    """Chart with a bar for each position, stacked by series. `legend` has the style, name and sum
    of each series, `ticks` the value and the y coordinate of each grid line, at equal distances."""

    bars: Sequence[Bar]
    legend: Sequence[tuple[str, str, float]]
    ticks: Sequence[tuple[float, float]]
    positions: Sequence[float]
    width: int = BARS_WIDTH
    height: int = BARS_HEIGHT

    @property
    def first(self) -> float:
        return self.positions[0]

    @property
    def last(self) -> float:
        return self.positions[-1]


def stacked_bars(
    positions: Sequence[float],
    values: Mapping[tuple[float, str], float],
    order: Sequence[str] = (),
) -> StackedBars:
    """Return the chart of `values` by position and series; values at other positions are omitted.
    The series in `order` come first, so charts with the same order have the same styles; the
    others are sorted by their sums."""
    known = set(positions)
    sums: dict[str, float] = {}
    for (position, name), value in values.items():
        if position in known:
            sums[name] = sums.get(name, 0.0) + value
    others = [name for name in sorted(sums, key=lambda name: -sums[name]) if name not in order]
    styled = [name for name in (*order, *others) if name not in FIXED]
    style = FIXED | {name: f"s{i % STYLES}" for i, name in enumerate(styled)}
    # Series with a style of their own are on top of the bars.
    names = [name for name in (*styled, *FIXED) if name in sums]
    totals = [sum(values.get((p, name), 0.0) for name in names) for p in positions]
    top = round_up(max(totals, default=0.0), (1, 2, 5))
    slot = BARS_WIDTH / max(1, len(positions))
    bars = []
    for number, position in enumerate(positions):
        below = 0.0
        for name in names:
            value = values.get((position, name), 0.0)
            if value <= 0:
                continue
            height = value / top * BARS_HEIGHT
            below += height
            bars.append(
                Bar(
                    round(number * slot + slot * GAP / 2, 2),
                    round(BARS_HEIGHT - below, 2),
                    round(slot * (1 - GAP), 2),
                    round(height, 2),
                    style[name],
                    f"{name}: {value:,.6g}",
                )
            )
    lines = [(top * part, BARS_HEIGHT * (1 - part)) for part in (0, 0.5, 1)]
    legend = [(style[name], name, sums[name]) for name in names]
    return StackedBars(bars, legend, lines, positions)
