"""Figures 5 to 7 of Cache-of-Thought from the results of streams, and tests of their trends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from bottega.evaluation.metrics.metric import Estimate
from bottega.evaluation.streams.growing_cache import (
    PARTS,
    StreamResult,
    gain,
    gains,
    growth,
    mean_over,
    scores_without,
)
from bottega.evaluation.streams.stream_plan import STARTS, Curve, Stream
from bottega.parsing import equal_answers
from bottega.recording import is_unanswered

NO_CACHE = "no cache"

Results = Mapping[Stream, StreamResult]
MIN_CONDITIONS, MIN_ORDERS = 3, 2  # of Page's test
TREND_COLUMNS = ("rises with", "curve", "means", "orders", "p")
BY_RATE, BY_START, BY_THIRD = "master's rate", "start", "third of the stream"


@dataclass(frozen=True)
class CurvePoint:
    """Streams of one curve at one master's rate, with 95 % intervals over streams and items.

    `accuracy` is the score of all answers (Fig. 5). `gain` is the apprentice's score minus its own
    without a cache on the same items (Fig. 6), `gains` the same for each third of the stream
    (Fig. 7), `growth` the apprentice's score in the last third minus the first. They are None
    without such answers. `agreement` is the share of the apprentice's answers that equal the
    master's to the same items. `recovered` is the share of the gap between the apprentice alone and
    the master alone that the streams close. `cost_usd` is the mean cost of a stream that sends
    every request, None if a price is unknown.
    """

    curve: str
    rate: float
    streams: int
    n: int
    missing: int
    accuracy: Estimate
    apprentice: Estimate | None
    gain: Estimate | None
    gains: tuple[Estimate | None, ...]
    growth: Estimate | None
    master_share: float
    agreement: float | None
    recovered: float | None
    cost_usd: float | None


def summarize_streams(
    results: Mapping[Stream, StreamResult], master: str, *, seed: int = 0
) -> list[CurvePoint]:
    """Return a point for each curve and rate, in the order of the streams; streams without an
    answer are skipped."""
    answered = {stream: result for stream, result in results.items() if result.scored}
    groups: dict[tuple[str, float], list[Stream]] = {}
    for stream in answered:
        groups.setdefault((stream.curve.name, stream.rate), []).append(stream)
    return [
        _point(key, streams, answered, master, seed)
        for key, streams in sorted(groups.items(), key=lambda entry: _position(entry[0], answered))
    ]


def _position(key: tuple[str, float], results: Mapping[Stream, StreamResult]) -> tuple[int, float]:
    names = list(dict.fromkeys(stream.curve.name for stream in results))
    return names.index(key[0]), key[1]


def _point(
    key: tuple[str, float],
    streams: Sequence[Stream],
    results: Mapping[Stream, StreamResult],
    master: str,
    seed: int,
) -> CurvePoint:
    found = [results[stream] for stream in streams]
    scored = [one for result in found for one in result.scored]
    cheaper = {one.tier for one in scored} - {master}
    without = scores_without_cache(results, master)
    compared = bool(without) and bool(cheaper) and key[0] != NO_CACHE
    costs = [one.cost_usd for one in scored if one.cost_usd is not None]
    alone = _alone(results)
    accuracy = mean_over(found, seed=seed)
    return CurvePoint(
        curve=key[0],
        rate=key[1],
        streams=len(streams),
        n=len(scored),
        missing=sum(result.length for result in found) - len(scored),
        accuracy=accuracy,
        apprentice=_defined(mean_over(found, tier=cheaper, seed=seed)) if cheaper else None,
        gain=_defined(gain(found, without, tier=cheaper, seed=seed)) if compared else None,
        gains=tuple(
            _defined(gain(found, without, tier=cheaper, part=part, seed=seed)) if compared else None
            for part in range(PARTS)
        ),
        growth=_defined(growth(found, cheaper, seed=seed)) if cheaper else None,
        master_share=sum(one.tier == master for one in scored) / len(scored),
        agreement=_agreement(streams, results, cheaper),
        recovered=None if alone is None else (accuracy.value - alone[0]) / (alone[1] - alone[0]),
        cost_usd=sum(costs) / len(found) if len(costs) == len(scored) else None,
    )


def _defined(estimate: Estimate) -> Estimate | None:
    return estimate if estimate.value == estimate.value else None


def scores_without_cache(
    results: Mapping[Stream, StreamResult], master: str
) -> dict[tuple[str, str], float]:
    """Return the scores without a cache by tier and item id, of all orders and rates. The control
    `vote`, which has no tier, is compared with the cheaper tiers."""
    found = scores_without(r for s, r in results.items() if s.curve.name == NO_CACHE)
    voted = {("", item): score for (tier, item), score in found.items() if tier != master}
    return {**voted, **found}


def _alone(results: Mapping[Stream, StreamResult]) -> tuple[float, float] | None:
    """Return the scores of the apprentice and the master alone, None if they do not differ."""
    found = {
        stream.rate: mean_over([result]).value
        for stream, result in results.items()
        if stream.curve.name == NO_CACHE and stream.rate in (0, 1)
    }
    return (found[0], found[1]) if len(found) == 2 and found[0] != found[1] else None


def _agreement(
    streams: Sequence[Stream], results: Mapping[Stream, StreamResult], cheaper: set[str]
) -> float | None:
    """Return the share of the cheaper tiers' answers that equal the master's to the same items, as
    a mean over the streams. Abstentions and invalid answers agree with none."""
    masters = next(
        (r for s, r in results.items() if s.curve.name == NO_CACHE and s.rate == 1), None
    )
    if masters is None:
        return None
    answers = {one.item.query.id: one.answer for one in masters.scored}
    shares = []
    for stream in streams:
        equal = [
            one.answer.valid
            and not is_unanswered(one.answer.text)
            and equal_answers(one.answer, answers[one.item.query.id], one.item.query)
            for one in results[stream].scored
            if one.tier in cheaper and one.item.query.id in answers
        ]
        shares += [sum(equal) / len(equal)] if equal else []
    return sum(shares) / len(shares) if shares else None


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
        """Cells of `TREND_COLUMNS`."""
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
