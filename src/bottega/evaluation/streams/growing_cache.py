"""Streams of queries whose answers fill a cache, and their statistics."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.metrics.metric import Estimate, resampled
from bottega.evaluation.outcomes import Method, ScoredAnswer
from bottega.evaluation.runs.runner import evaluate

PARTS = 3  # equal parts of a stream
Tiers = str | Collection[str] | None
TierScores = dict[tuple[str, str], float]


@dataclass(frozen=True)
class StreamResult:
    """Answers of one stream of `length` items in their order; failed items are missing."""

    scored: tuple[ScoredAnswer, ...]
    length: int

    def scores(self, tier: Tiers = None, part: int | None = None) -> dict[int, float]:
        """Return scores by index: of all answers, of some tiers, or of one of equal parts (from
        0)."""
        return {one.index: one.score for one in self._chosen(tier, part)}

    def item_scores(self, tier: Tiers = None, part: int | None = None) -> dict[str, float]:
        """Return the same scores by item id."""
        return {str(one.item.query.id): one.score for one in self._chosen(tier, part)}

    def tier_scores(self, tier: Tiers = None, part: int | None = None) -> TierScores:
        """Return the same scores by tier and item id."""
        chosen = self._chosen(tier, part)
        return {(one.tier, str(one.item.query.id)): one.score for one in chosen}

    def _chosen(self, tier: Tiers, part: int | None) -> list[ScoredAnswer]:
        names = {tier} if isinstance(tier, str) else tier
        return [
            one
            for one in self.scored
            if (names is None or one.tier in names)
            and (part is None or one.index * PARTS // self.length == part)
        ]


async def stream(data: Benchmark, method: Method) -> StreamResult:
    """Answer the items one by one: each answer is cached before the next query."""
    _, scored = await evaluate(data, method, RunConfig(concurrency=1, round_size=1))
    return StreamResult(tuple(scored), len(data.items))


def mean_over(streams: Sequence[StreamResult], *, tier: Tiers = None, seed: int = 0) -> Estimate:
    """Return the mean score over the streams, of all answers or of some tiers."""
    return _estimate([one.item_scores(tier) for one in streams], seed)


def growth(streams: Sequence[StreamResult], tier: Tiers, *, seed: int = 0) -> Estimate:
    """Return a tier's gain from the first part of the streams to the last."""
    last = [one.item_scores(tier, PARTS - 1) for one in streams]
    first = [one.item_scores(tier, 0) for one in streams]
    return _estimate(last, seed, less=first)


def scores_without(streams: Iterable[StreamResult]) -> TierScores:
    """Return the scores of streams without a cache by tier and item id."""
    return dict(chain.from_iterable(found.tier_scores().items() for found in streams))


def gain(
    ours: Sequence[StreamResult],
    without: Mapping[tuple[str, str], float],
    *,
    tier: Tiers = None,
    part: int | None = None,
    seed: int = 0,
) -> Estimate:
    """Return the mean gain of our streams over the same tiers without a cache (`scores_without`),
    on the items that `tier` answered in our streams."""
    return _estimate([gains(one, without, tier, part) for one in ours], seed)


def gains(
    ours: StreamResult,
    without: Mapping[tuple[str, str], float],
    tier: Tiers = None,
    part: int | None = None,
) -> dict[str, float]:
    """Return the gain of each answer over the same tier without a cache, by item id."""
    return {
        item: score - without[name, item]
        for (name, item), score in ours.tier_scores(tier, part).items()
        if (name, item) in without
    }


ItemScores = Mapping[str, float]


def _estimate(groups: Sequence[ItemScores], seed: int, less: Sequence[ItemScores] = ()) -> Estimate:
    """Return the mean of the groups' means, each minus the mean of its `less` group if given.

    Empty groups are excluded. The interval is a bootstrap over groups and over items. All groups of
    a round have the same items, because they are orders of one set: independent samples would make
    the interval smaller with each further order, even of equal answers.
    """
    used = [
        index for index, one in enumerate(groups) if len(one) and (not less or len(less[index]))
    ]
    if not used:
        return Estimate(float("nan"), float("nan"), float("nan"))
    pairs = [(groups[index], less[index] if less else {}) for index in used]
    items = sorted({item for pair in pairs for one in pair for item in one})
    counts = resampled(len(items), seed)
    samples = np.stack(
        [
            _sampled(own, items, counts) - _sampled(les, items, counts, empty=0.0)
            for own, les in pairs
        ]
    )
    value = float(np.mean([_mean(own) - (_mean(les) if les else 0.0) for own, les in pairs]))
    picked = np.random.default_rng([seed, len(used)]).integers(0, len(used), samples.shape)
    means = np.take_along_axis(samples, picked, axis=0).mean(axis=0)
    low, high = np.nanpercentile(means, [2.5, 97.5])
    return Estimate(value, float(low), float(high))


def _mean(scores: ItemScores) -> float:
    return sum(scores.values()) / len(scores)


def _sampled(
    scores: ItemScores, items: Sequence[str], counts: NDArray[np.float64], empty: float = np.nan
) -> NDArray[np.float64]:
    """Return the mean of a group for each sample of the items, (resamples,); NaN for a sample
    without any of them, `empty` for an empty group."""
    if not scores:
        return np.full(len(counts), empty)
    present = np.array([item in scores for item in items], np.float64)
    values = np.array([scores.get(item, 0.0) for item in items])
    sizes = counts @ present
    with np.errstate(invalid="ignore", divide="ignore"):
        means: NDArray[np.float64] = np.where(sizes > 0, counts @ values / sizes, np.nan)
    return means
