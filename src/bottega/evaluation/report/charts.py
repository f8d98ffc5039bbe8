"""Chart engine: SVG line charts of accuracy by number of shots or by cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from bottega.evaluation.outcomes import method_title
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
    height, y_ticks = _heights(series)
    lines: list[ChartLine] = []
    for i, one in enumerate(series):
        offset = OFFSET * (i % STYLES - (min(len(series), STYLES) - 1) / 2)
        xs = (
            [float(LEFT), float(WIDTH - RIGHT)]
            if one.flat
            else [positions[point.x] + offset for point in one.points]
        )
        points = one.points[:1] * 2 if one.flat else one.points
        marks = tuple(_mark(point, x, height) for point, x in zip(points, xs, strict=True))
        lines.append(ChartLine(one.name, i % STYLES, one.flat, marks))
    ticks = tuple((f"{k:g}", positions[k]) for k in shots)
    return Chart(title, "demonstrations (not to scale)", tuple(lines), ticks, y_ticks)


def by_category(
    series: Sequence[Series], title: str, x_title: str, categories: Sequence[str]
) -> Chart:
    """Return a chart over categories; the x of a point is the index of its category."""
    step = (WIDTH - RIGHT - LEFT) / len(categories)
    positions = [LEFT + step * (i + 0.5) for i in range(len(categories))]
    ticks = tuple(zip(categories, positions, strict=True))
    return _chart(series, title, x_title, lambda x: positions[int(x)], ticks)


def by_value(series: Sequence[Series], title: str, x_title: str) -> Chart:
    """Return a chart with a linear x axis from 0."""
    points = [point for one in series for point in one.points]
    highest = max(point.x for point in points) or 1.0
    inner, wide = LEFT + 24, WIDTH - RIGHT - LEFT - 48

    def position(x: float) -> float:
        return inner + x / highest * wide

    ticks = tuple((_tick(tick), position(tick)) for tick in _round_steps(highest))
    return _chart(series, title, x_title, position, ticks)


def _chart(
    series: Sequence[Series],
    title: str,
    x_title: str,
    position: Callable[[float], float],
    ticks: tuple[tuple[str, float], ...],
) -> Chart:
    height, y_ticks = _heights(series)
    lines = []
    for i, one in enumerate(series):
        offset = OFFSET / 2 * (i % STYLES - (min(len(series), STYLES) - 1) / 2)
        marks = tuple(_mark(point, position(point.x) + offset, height) for point in one.points)
        style = i if one.style is None else one.style
        lines.append(ChartLine(one.name, style % STYLES, False, marks))
    return Chart(title, x_title, tuple(lines), ticks, y_ticks)


def by_cost(series: Sequence[Series], title: str, x_title: str) -> Chart:
    """Return a chart by cost per item.

    Costs over several orders of magnitude use a logarithmic axis, with zero at its left end.
    """
    points = [point for one in series for point in one.points]
    x_of, x_ticks = _costs([point.x for point in points])
    height, y_ticks = _heights(series)
    lines = tuple(
        ChartLine(
            one.name,
            i % STYLES,
            False,
            tuple(_mark(point, x_of(point.x), height) for point in one.points),
        )
        for i, one in enumerate(series)
    )
    front = sorted((point for point in points if point.circled), key=lambda point: point.x)
    polyline = " ".join(f"{x_of(point.x):.1f},{height(point.value):.1f}" for point in front)
    return Chart(title, x_title, lines, x_ticks, y_ticks, polyline)


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


def _heights(
    series: Sequence[Series],
) -> tuple[Callable[[float], float], tuple[tuple[str, float], ...]]:
    """Return the y scale and its ticks, over the part up to 1 that the intervals need."""
    points = [point for one in series for point in one.points]
    low, high = min(point.low for point in points), max(point.high for point in points)
    step = next((step for step in STEPS if (high - low) / step <= MAX_TICKS - 1), STEPS[-1])
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(min(high, 1.0) / step - 1e-9), first + 1)

    def height(share: float) -> float:
        return TOP + (last * step - share) / ((last - first) * step) * (HEIGHT - TOP - BOTTOM)

    return height, tuple((f"{i * step:.2f}", height(i * step)) for i in range(first, last + 1))


def _costs(
    costs: Sequence[float],
) -> tuple[Callable[[float], float], tuple[tuple[str, float], ...]]:
    positive = [cost for cost in costs if cost > 0]
    inner, wide = LEFT + 24, WIDTH - RIGHT - LEFT - 48
    if not positive:
        return lambda cost: float(inner), (("0", float(inner)),)
    lowest, highest = min(positive), max(positive)
    if highest / lowest < 30:
        ticks = _round_steps(highest)
        return (
            lambda cost: inner + cost / highest * wide,
            tuple((_tick(tick), inner + tick / highest * wide) for tick in ticks),
        )
    low, high = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    free = 1 if len(positive) < len(costs) else 0

    def position(cost: float) -> float:
        above = math.log10(cost) - low + free if cost > 0 else 0.0
        return inner + above / (high - low + free) * wide

    decades = [10.0**power for power in range(low, high + 1)]
    ticks = [0.0] * free + decades
    return position, tuple((_tick(tick), position(tick)) for tick in ticks)


def _round_steps(highest: float) -> list[float]:
    """Return round ticks from 0 to about `highest`."""
    power = 10.0 ** math.floor(math.log10(highest / 4))
    step = next(power * n for n in (1, 2, 2.5, 5, 10) if power * n * 5 >= highest)
    return [step * i for i in range(math.floor(highest / step + 1e-9) + 1)]


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


def result_point(name: str, result: MethodResult, x: float) -> Point:
    """Return the main figure of a result that has a value, as a point at `x`."""
    value, low, high = result.value or 0.0, result.low or 0.0, result.high or 0.0
    figure = f"{value:.3f} [{low:.3f}, {high:.3f}], n = {result.n}"
    return Point(x, value, low, high, f"{method_title(name, result.shots)}: {figure}")
