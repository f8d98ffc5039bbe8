"""Tests of the shape of curves: Page's trend test over the orders of a run of streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from bottega.evaluation.streams.growing_cache import PARTS, StreamResult, gains
from bottega.evaluation.streams.stream_plan import STARTS, Curve, Stream
from bottega.evaluation.streams.stream_summary import scores_without_cache

Results = Mapping[Stream, StreamResult]
MIN_CONDITIONS, MIN_ORDERS = 3, 2  # of Page's test
COLUMNS = ("rises with", "curve", "means", "orders", "p")
BY_RATE, BY_START, BY_THIRD = "master's rate", "start", "third of the stream"


@dataclass(frozen=True)
class Trend:
    """Page's test of whether a figure rises over ordered conditions (Page, 1963).

    `p` is one-sided: the probability of a statistic at least this high if the conditions were
    equal. Each order of the items is one block, because answers of one order are not independent:
    `p` cannot be below (1 / c!) ** orders for c conditions.
    """

    over: str
    curve: str
    conditions: tuple[str, ...]
    means: tuple[float, ...]
    orders: int
    p: float

    @property
    def row(self) -> tuple[str, str, str, int, str]:
        """Cells of `COLUMNS`."""
        pairs = zip(self.conditions, self.means, strict=True)
        means = ", ".join(f"{condition}: {mean:.3f}" for condition, mean in pairs)
        return self.over, self.curve, means, self.orders, f"{self.p:.2g}"


def find_trends(results: Results, master: str) -> list[Trend]:
    """Return the tests that the complete streams allow: the score of all answers rises with the
    master's rate (Fig. 5) and from an empty cache to a cold and a warm start, and the apprentice's
    gain over no cache rises from third to third (Fig. 7)."""
    complete = {s: r for s, r in results.items() if len(r.scored) == r.length}
    return [*_by_rate(complete), *_by_start(complete), *_by_third(complete, master)]


def _by_rate(results: Results) -> Iterator[Trend]:
    for curve in _curves(results):
        rates = sorted({stream.rate for stream in results if stream.curve == curve})
        rows = [
            [_score(results.get(Stream(curve, rate, order))) for rate in rates]
            for order in _orders(results)
        ]
        yield from _trend(BY_RATE, curve.name, [f"{rate:g}" for rate in rates], rows)


def _by_start(results: Results) -> Iterator[Trend]:
    """Yield tests over the starts; a block is the mean over the master's rates."""
    for curve in _curves(results):
        if curve.start != "warm":
            continue
        rates = {stream.rate for stream in results if stream.curve == curve}
        starts = [replace(curve, start=start) for start in STARTS]
        rows = [
            [_mean([_score(results.get(Stream(one, r, order))) for r in rates]) for one in starts]
            for order in _orders(results)
        ]
        yield from _trend(BY_START, curve.name.partition(", ")[2], STARTS, rows)


def _by_third(results: Results, master: str) -> Iterator[Trend]:
    """Yield tests over thirds; a block is the mean over the rates with answers in each third."""
    without = scores_without_cache(results, master)
    for curve in _curves(results):
        rows = []
        for order in _orders(results):
            of_rates = [
                _gains(results[stream], without, master)
                for stream in results
                if (stream.curve, stream.order) == (curve, order)
            ]
            found = [one for one in of_rates if None not in one]
            rows.append([_mean([one[part] for one in found]) for part in range(PARTS)])
        yield from _trend(BY_THIRD, curve.name, [str(part + 1) for part in range(PARTS)], rows)


def _trend(
    over: str, curve: str, conditions: Sequence[str], rows: Sequence[Sequence[float | None]]
) -> Iterator[Trend]:
    """Yield the test of the complete rows, one for each order, if they are enough."""
    blocks = np.array([row for row in rows if None not in row], np.float64)
    if len(conditions) < MIN_CONDITIONS or len(blocks) < MIN_ORDERS:
        return
    from scipy.stats import page_trend_test  # takes a second to load

    p = float(page_trend_test(blocks).pvalue)
    means = tuple(map(float, blocks.mean(axis=0)))
    yield Trend(over, curve, tuple(conditions), means, len(blocks), p)


def _curves(results: Results) -> list[Curve]:
    return list(dict.fromkeys(s.curve for s in results if s.curve.control is None))


def _orders(results: Results) -> list[int]:
    return sorted({stream.order for stream in results})


def _score(result: StreamResult | None) -> float | None:
    return None if result is None else fmean(result.scores().values())


def _gains(
    result: StreamResult, without: Mapping[tuple[str, str], float], master: str
) -> list[float | None]:
    """Return the cheaper tiers' mean gain over no cache in each third."""
    tiers = {one.tier for one in result.scored} - {master}
    parts = (gains(result, without, tiers, part) for part in range(PARTS))
    return [_mean(list(one.values())) for one in parts]


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, None without values or if one is missing."""
    present = [value for value in values if value is not None]
    return fmean(present) if present and len(present) == len(values) else None
