"""One self-contained HTML page that shows what a run did: examples, table, curve."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image as Pillow

from bottega.evaluation.labels import labels_of
from bottega.evaluation.outcomes import ScoredAnswer
from bottega.evaluation.runner import Result
from bottega.image import Image
from bottega.types import Candidate

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 330, 62, 58, 14, 20
LOOKS = 8
# Drawn around (0, 0), in the order of the looks.
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
# Ticks of a share between 0 and 1; the first step that gives few enough is taken.
STEPS = (0.02, 0.05, 0.1, 0.2, 0.25)
MOST_TICKS = 6
# Methods stand a little beside each other, so that no interval hides another.
ASIDE = 5.0


@dataclass(frozen=True)
class Point:
    """A share with its 95 % interval, at x in whatever the axis counts."""

    x: float
    value: float
    low: float
    high: float
    text: str
    ringed: bool = False


@dataclass(frozen=True)
class Series:
    """`flat` has no place on the x axis and is drawn across it."""

    name: str
    points: tuple[Point, ...]
    flat: bool = False


@dataclass(frozen=True)
class Mark:
    x: float
    y: float
    low: float
    high: float
    text: str
    ringed: bool = False


@dataclass(frozen=True)
class Line:
    name: str
    look: int
    flat: bool
    marks: tuple[Mark, ...]

    @property
    def points(self) -> str:
        return " ".join(f"{mark.x:.1f},{mark.y:.1f}" for mark in self.marks)

    @property
    def shape(self) -> str:
        return SHAPES[self.look]


@dataclass(frozen=True)
class Chart:
    """`front` connects what nothing else beats in both directions, as "x,y x,y"."""

    title: str
    x_title: str
    lines: tuple[Line, ...]
    x_ticks: tuple[tuple[str, float], ...]
    y_ticks: tuple[tuple[str, float], ...]
    front: str = ""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT


def by_shots(series: Sequence[Series], title: str) -> Chart:
    """Numbers of shots at equal distances: 1, 5, 10, 20 would crowd on a linear axis."""
    shots = sorted({point.x for one in series if not one.flat for point in one.points})
    step = (WIDTH - RIGHT - LEFT) / max(len(shots), 1)
    places = {k: LEFT + step * (i + 0.5) for i, k in enumerate(shots)}
    height, y_ticks = _heights(series)
    lines: list[Line] = []
    for i, one in enumerate(series):
        aside = ASIDE * (i % LOOKS - (min(len(series), LOOKS) - 1) / 2)
        xs = (
            [float(LEFT), float(WIDTH - RIGHT)]
            if one.flat
            else [places[point.x] + aside for point in one.points]
        )
        points = one.points[:1] * 2 if one.flat else one.points
        marks = tuple(_mark(point, x, height) for point, x in zip(points, xs, strict=True))
        lines.append(Line(one.name, i % LOOKS, one.flat, marks))
    ticks = tuple((f"{k:g}", places[k]) for k in shots)
    return Chart(title, "demonstrations (not to scale)", tuple(lines), ticks, y_ticks)


def by_cost(series: Sequence[Series], title: str, x_title: str) -> Chart:
    """Points at what an item costs. Costs of different orders of magnitude stand on a logarithmic
    axis, with those that are nothing at its left end."""
    points = [point for one in series for point in one.points]
    place, x_ticks = _costs([point.x for point in points])
    height, y_ticks = _heights(series)
    lines = tuple(
        Line(
            one.name,
            i % LOOKS,
            False,
            tuple(_mark(point, place(point.x), height) for point in one.points),
        )
        for i, one in enumerate(series)
    )
    front = sorted((point for point in points if point.ringed), key=lambda point: point.x)
    drawn = " ".join(f"{place(point.x):.1f},{height(point.value):.1f}" for point in front)
    return Chart(title, x_title, lines, x_ticks, y_ticks, drawn)


def best_for_their_cost(points: Iterable[tuple[float, float]]) -> set[tuple[float, float]]:
    """The Pareto front of (cost, value): nothing else is as cheap and better, or as good and
    cheaper."""
    front: set[tuple[float, float]] = set()
    best = -math.inf
    for cost, value in sorted(points, key=lambda point: (point[0], -point[1])):
        if value > best:
            front.add((cost, value))
            best = value
    return front


def _mark(point: Point, x: float, height: Callable[[float], float]) -> Mark:
    y, low, high = height(point.value), height(point.low), height(point.high)
    return Mark(x, y, low, high, point.text, point.ringed)


def _heights(
    series: Sequence[Series],
) -> tuple[Callable[[float], float], tuple[tuple[str, float], ...]]:
    """As much of 0 to 1 as the intervals need."""
    points = [point for one in series for point in one.points]
    low, high = min(point.low for point in points), max(point.high for point in points)
    step = next((step for step in STEPS if (high - low) / step <= MOST_TICKS - 1), STEPS[-1])
    first = max(math.floor(low / step + 1e-9), 0)
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
    least, most = min(positive), max(positive)
    if most / least < 30:
        ticks = _round_steps(most)
        return (
            lambda cost: inner + cost / most * wide,
            tuple((_written(tick), inner + tick / most * wide) for tick in ticks),
        )
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    free = 1 if len(positive) < len(costs) else 0

    def place(cost: float) -> float:
        above = math.log10(cost) - low + free if cost > 0 else 0.0
        return inner + above / (high - low + free) * wide

    decades = [10.0**power for power in range(low, high + 1)]
    shown = [0.0] * free + decades
    return place, tuple((_written(tick), place(tick)) for tick in shown)


def _round_steps(most: float) -> list[float]:
    """From 0 to about `most`."""
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(power * n for n in (1, 2, 2.5, 5, 10) if power * n * 5 >= most)
    return [step * i for i in range(math.floor(most / step + 1e-9) + 1)]


def _written(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


THUMBNAIL = 160
SHOWN_ROWS = 8
SHOWN_MISTAKES = 4
CURVES = "Share of right answers by number of demonstrations; the table has the figures"


def render(
    results: Sequence[Result],
    scored: Sequence[ScoredAnswer],
    shown: Mapping[int, Sequence[Candidate]],
    *,
    title: str,
    facts: Mapping[str, str],
    note: str,
) -> str:
    """`scored` are the items of the method whose rows are shown, `shown` its demonstrations by the
    item's place; `facts` go under the title and `note` under the figures."""
    results = [row for row in results if row.value is not None]
    mistakes = [s for s in scored[SHOWN_ROWS:] if not s.correct][:SHOWN_MISTAKES]
    environment = house()
    environment.globals.update(thumbnail=_thumbnail, labels_of=labels_of)
    return environment.get_template("page.html").render(
        title=title,
        facts=facts,
        note=note,
        results=results,
        shown=shown,
        rows=[*scored[:SHOWN_ROWS], *mistakes],
        mistakes=mistakes,
        curves=by_shots(shot_series([(row.method, row) for row in results]), CURVES),
    )


def house() -> Environment:
    """What our pages are made with: everything escaped, and one style."""
    environment = Environment(
        loader=PackageLoader("bottega.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    style = files("bottega.evaluation").joinpath("house.css").read_text(encoding="utf-8")
    environment.globals["house"] = Markup(style)
    return environment


def shot_series(results: Sequence[tuple[str, Result]]) -> list[Series]:
    """One line a name; what has no shots is flat."""
    named: dict[str, list[Result]] = {}
    for name, result in results:
        named.setdefault(name, []).append(result)
    return [
        Series(name, tuple(map(_point, sorted(rows, key=lambda row: row.shots))), not rows[0].shots)
        for name, rows in named.items()
    ]


def _point(row: Result) -> Point:
    value, low, high = row.value or 0.0, row.low or 0.0, row.high or 0.0
    text = f"{row.method}, {row.shots} shots: {value:.3f} [{low:.3f}, {high:.3f}]"
    return Point(row.shots, value, low, high, text)


def _thumbnail(image: Image) -> str:
    picture = image.decode(at_least=THUMBNAIL).copy()
    picture.thumbnail((THUMBNAIL, THUMBNAIL), Pillow.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG" if max(picture.size) <= 64 else "JPEG", quality=85)
    kind = "png" if max(picture.size) <= 64 else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
