"""Bar charts as SVG shapes that pages stretch to their width; their labels are HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 720, 150
GAP = 0.15  # share of a bar's width
MAX_SERIES = 8
# Series with a style of their own; the others share `MAX_SERIES` styles by rank.
FIXED = {"failed": "failed", "replayed": "replayed"}


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
    width: int = WIDTH
    height: int = HEIGHT

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
    style = FIXED | {name: f"s{i % MAX_SERIES}" for i, name in enumerate(styled)}
    # Series with a style of their own are on top of the bars.
    names = [name for name in (*styled, *FIXED) if name in sums]
    totals = [sum(values.get((p, name), 0.0) for name in names) for p in positions]
    top = nice_limit(max(totals, default=0.0))
    slot = WIDTH / max(1, len(positions))
    bars = []
    for number, position in enumerate(positions):
        below = 0.0
        for name in names:
            value = values.get((position, name), 0.0)
            if value <= 0:
                continue
            height = value / top * HEIGHT
            below += height
            bars.append(
                Bar(
                    round(number * slot + slot * GAP / 2, 2),
                    round(HEIGHT - below, 2),
                    round(slot * (1 - GAP), 2),
                    round(height, 2),
                    style[name],
                    f"{name}: {value:,.6g}",
                )
            )
    lines = [(top * part, HEIGHT * (1 - part)) for part in (0, 0.5, 1)]
    legend = [(style[name], name, sums[name]) for name in names]
    return StackedBars(bars, legend, lines, positions)


def nice_limit(value: float) -> float:
    """Return the smallest number of the form 1, 2 or 5 times a power of ten that is at least
    `value`; 1 for values up to 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** len(str(int(value)))
    while power / 10 >= value:
        power /= 10
    for part in (0.1, 0.2, 0.5):
        if power * part >= value:
            return power * part
    return power
