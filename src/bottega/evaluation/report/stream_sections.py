"""Report of stream runs: figures 5 to 7 of Cache-of-Thought and the score along the streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from bottega.evaluation.metrics.intervals import Estimate, bounds
from bottega.evaluation.report.charts import STYLES, Chart, Point, Series, by_category, by_value
from bottega.evaluation.report.runs import StoredRun
from bottega.evaluation.runs.run_store import ORDERS
from bottega.evaluation.streams.growing_cache import PARTS, StreamResult
from bottega.evaluation.streams.stream_plan import UNLIMITED, Stream, StreamConfig
from bottega.evaluation.streams.stream_summary import (
    CurvePoint,
    Trend,
    find_trends,
    summarize_streams,
)

STEPS = 20  # points of a curve along the stream
THIRDS = ("first third", "second third", "last third")


@dataclass(frozen=True)
class StreamSection:
    """Stream run of a report. `results` holds the streams with an answer in planned order."""

    name: str
    run: StoredRun
    config: StreamConfig
    results: Mapping[Stream, StreamResult]
    points: tuple[CurvePoint, ...]
    trends: tuple[Trend, ...]
    planned: int

    @property
    def metric(self) -> str:
        return str(self.run.settings["metrics"][0]).replace("_", " ")

    @property
    def incomplete(self) -> list[tuple[str, int, int]]:
        """Return name, answered and planned items of each unfinished stream."""
        items = len(self.run.items)
        answered = {stream: len(result.scored) for stream, result in self.results.items()}
        return [
            (stream.name, answered.get(stream, 0), items)
            for stream in self.config.streams()
            if answered.get(stream, 0) < items
        ]

    @property
    def failures(self) -> int:
        return sum(map(len, self.run.failures.values()))


@dataclass(frozen=True)
class StreamFigure:
    """Figure of a section: series over shares (`by_share`) or over parts of the stream."""

    title: str
    x_title: str
    series: tuple[Series, ...]
    categories: tuple[str, ...] = ()
    by_share: bool = True

    @property
    def chart(self) -> Chart:
        if self.categories:
            return by_category(self.series, self.title, self.x_title, self.categories)
        return by_value(self.series, self.title, self.x_title)


def is_stream_run(run: StoredRun) -> bool:
    return ORDERS in run.settings


def stream_section(name: str, run: StoredRun) -> StreamSection:
    """Return the section of a run of `bottega stream`, complete or in progress."""
    config = StreamConfig.from_record(run.settings)
    streams = config.streams()
    orders: Sequence[Sequence[int]] = run.settings[ORDERS]
    results: dict[Stream, StreamResult] = {}
    for stream in streams:
        answers = run.answers.get((stream.name, config.shots), {})
        order = orders[stream.order - 1]
        scored = tuple(
            replace(answers[index].scored, index=position)
            for position, index in enumerate(order)
            if index in answers
        )
        if scored:
            results[stream] = StreamResult(scored, len(order))
    points = summarize_streams(results, config.master, seed=config.seed)
    trends = find_trends(results, config.master)
    return StreamSection(name, run, config, results, tuple(points), tuple(trends), len(streams))


def figures(section: StreamSection) -> Iterator[StreamFigure]:
    """Yield the figures that the run has points for."""
    metric = section.metric
    share = "share of the items that the apprentice may answer"
    for part, names in _readable_parts(section):
        points = [point for point in section.points if point.curve in names]
        yield StreamFigure(
            f"{metric} of all answers (Fig. 5){part}",
            share,
            _by_share(points, lambda point: point.accuracy),
        )
        if gains := _by_share(points, lambda point: point.gain):
            yield StreamFigure(f"gain of the apprentice over no cache (Fig. 6){part}", share, gains)
    main = [stream.curve.name for stream in section.results if stream.curve.control is None]
    for curve in dict.fromkeys(main):
        if thirds := _by_third([point for point in section.points if point.curve == curve]):
            yield StreamFigure(
                f"gain of the apprentice by third of the stream (Fig. 7): {curve}",
                "part of the stream",
                thirds,
                THIRDS,
                by_share=False,
            )
    for rate in section.config.rates:
        series = _cumulative(section, rate)
        for part, names in _readable_parts(section):
            if shown := tuple(one for one in series if one.name in names):
                yield StreamFigure(
                    f"{metric} of all answers so far, master {rate:g}{part}",
                    "items answered",
                    shown,
                    by_share=False,
                )


def _readable_parts(section: StreamSection) -> Iterator[tuple[str, set[str]]]:
    """Yield a title and the names of the curves of each figure: all, or where these are more than
    the styles, those of each start and eviction policy, with the curve without a cache."""
    curves = list(dict.fromkeys(stream.curve for stream in section.results))
    if len(curves) <= STYLES:
        yield "", {curve.name for curve in curves}
        return
    without = {curve.name for curve in curves if curve.control == "no-cache"}
    parts: dict[tuple[str, str], set[str]] = {}
    for curve in curves:
        if curve.control != "no-cache":
            parts.setdefault((curve.start, curve.evict), set(without)).add(curve.name)
    for (start, evict), names in parts.items():
        limited = "" if evict == UNLIMITED else f", {evict}"
        yield f": start {start}{limited}", names


def _by_share(
    points: Sequence[CurvePoint], figure: Callable[[CurvePoint], Estimate | None]
) -> tuple[Series, ...]:
    named: dict[str, list[Point]] = {}
    for point in points:
        if (estimate := figure(point)) is not None:
            text = f"{point.curve}, master {point.rate:g}: {_text(estimate)}, n = {point.n}"
            share = round(1 - point.rate, 6)
            named.setdefault(point.curve, []).append(_point(share, estimate, text))
    styles = list(dict.fromkeys(point.curve for point in points))  # the same in all figures
    return tuple(
        Series(name, tuple(sorted(some, key=lambda point: point.x)), style=styles.index(name))
        for name, some in named.items()
    )


def _by_third(points: Sequence[CurvePoint]) -> tuple[Series, ...]:
    series = []
    for point in points:
        marks = [
            _point(part, estimate, f"master {point.rate:g}, {THIRDS[part]}: {_text(estimate)}")
            for part, estimate in enumerate(point.gains)
            if estimate is not None
        ]
        if len(marks) == PARTS:
            series.append(Series(f"master {point.rate:g}", tuple(marks)))
    return tuple(series[:STYLES])


def _cumulative(section: StreamSection, rate: float) -> tuple[Series, ...]:
    groups: dict[str, list[StreamResult]] = {}
    for stream, result in section.results.items():
        if stream.rate == rate and len(result.scored) == result.length:
            groups.setdefault(stream.curve.name, []).append(result)
    items = len(section.run.items)
    ends = sorted({max(1, round(items * step / STEPS)) for step in range(1, STEPS + 1)})
    styles = list(dict.fromkeys(stream.curve.name for stream in section.results))
    return tuple(
        Series(
            name,
            tuple(_so_far(name, results, end) for end in ends),
            style=styles.index(name),
        )
        for name, results in groups.items()
    )


def _so_far(name: str, results: Sequence[StreamResult], end: int) -> Point:
    cut = [StreamResult(result.scored[:end], end) for result in results]
    scores = [one.score for result in cut for one in result.scored]
    value = sum(scores) / len(scores)
    return Point(end, value, value, value, f"{name}, {end} items: {value:.3f}")


def _point(x: float, estimate: Estimate, text: str) -> Point:
    return Point(x, estimate.value, estimate.low, estimate.high, text)


def _text(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


COLUMNS = (
    *("benchmark", "run", "curve", "master_rate", "streams", "n", "missing", "metric"),
    *(f"{name}{end}" for name in ("accuracy", "gain", "growth") for end in ("", "_low", "_high")),
    *("gain_1", "gain_2", "gain_3", "master_share", "agreement", "recovered", "cost_usd"),
)


def csv_rows(section: StreamSection) -> Iterator[tuple[object, ...]]:
    """Yield the line of each point, in the order of `COLUMNS`."""
    config, metric = section.config, section.run.settings["metrics"][0]
    for point in section.points:
        estimates = (point.accuracy, point.gain, point.growth)
        yield (
            *(config.benchmark, section.name, point.curve, point.rate),
            *(point.streams, point.n, point.missing, metric),
            *chain.from_iterable(map(bounds, estimates)),
            *(None if one is None else one.value for one in point.gains),
            *(point.master_share, point.agreement, point.recovered, point.cost_usd),
        )
