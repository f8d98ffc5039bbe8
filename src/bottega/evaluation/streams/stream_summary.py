"""Figures 5 to 7 of Cache-of-Thought from the results of streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bottega.evaluation.metrics.intervals import Estimate
from bottega.evaluation.streams.growing_cache import (
    PARTS,
    StreamResult,
    gain,
    growth,
    mean_over,
    scores_without,
)
from bottega.evaluation.streams.stream_plan import Stream
from bottega.parsing import equal_answers
from bottega.recording import is_unanswered

NO_CACHE = "no cache"


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
