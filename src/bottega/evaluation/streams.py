"""Streams of queries whose answers fill a cache, and their statistics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.metrics.intervals import RESAMPLES, Estimate, resampled
from bottega.evaluation.outcomes import Method, ScoredAnswer
from bottega.evaluation.runner import evaluate

Scores = Sequence[float]
Tiers = str | Collection[str] | None


@dataclass(frozen=True)
class StreamResult:
    """Answers of one stream of `length` items in their order; failed items are missing."""

    scored: tuple[ScoredAnswer, ...]
    length: int

    def scores(
        self, tier: Tiers = None, part: int | None = None, parts: int = 3
    ) -> dict[int, float]:
        """Return scores by index: of all answers, of some tiers, or of one of equal parts (from
        0)."""
        names = {tier} if isinstance(tier, str) else tier
        return {
            one.index: one.score
            for one in self.scored
            if (names is None or one.tier in names)
            and (part is None or one.index * parts // self.length == part)
        }

    def share(self, tier: str) -> float:
        """Return the share of the answers that this tier gave."""
        return sum(one.tier == tier for one in self.scored) / len(self.scored)


async def stream(data: Benchmark, method: Method) -> StreamResult:
    """Answer the items one by one: each answer is cached before the next query."""
    _, scored = await evaluate(data, method, RunConfig(concurrency=1, round_size=1))
    return StreamResult(tuple(scored), len(data.items))


def mean_over(
    streams: Sequence[StreamResult],
    *,
    tier: Tiers = None,
    part: int | None = None,
    parts: int = 3,
    seed: int = 0,
) -> Estimate:
    """Return the mean score over the streams: of all answers, of a tier, or of a part."""
    return _estimate([list(one.scores(tier, part, parts).values()) for one in streams], seed)


def growth(
    streams: Sequence[StreamResult], tier: Tiers, *, parts: int = 3, seed: int = 0
) -> Estimate:
    """Return a tier's gain from the first part of the streams to the last."""
    last = [list(one.scores(tier, parts - 1, parts).values()) for one in streams]
    first = [list(one.scores(tier, 0, parts).values()) for one in streams]
    return _estimate(last, seed, less=first)


def gain(
    ours: Sequence[StreamResult],
    theirs: Sequence[StreamResult],
    *,
    tier: Tiers = None,
    part: int | None = None,
    parts: int = 3,
    seed: int = 0,
) -> Estimate:
    """Return the mean gain of our streams over theirs on the same items.

    `tier` selects the items that this tier answered in our streams.
    """
    differences = []
    for mine, yours in zip(ours, theirs, strict=True):
        other = yours.scores()
        own = mine.scores(tier, part, parts)
        differences.append([own[index] - other[index] for index in own if index in other])
    return _estimate(differences, seed)


def _estimate(groups: Sequence[Scores], seed: int, less: Sequence[Scores] = ()) -> Estimate:
    """Return the mean of the groups' means, each minus the mean of its `less` group if given.

    Empty groups are excluded. The interval is a bootstrap over groups and over their items.
    """
    used = [
        index for index, one in enumerate(groups) if len(one) and (not less or len(less[index]))
    ]
    if not used:
        return Estimate(float("nan"), float("nan"), float("nan"))

    def difference(
        of: Callable[[Scores, int], NDArray[np.float64]], index: int
    ) -> NDArray[np.float64]:
        own = of(groups[index], 2 * index)
        return own - of(less[index], 2 * index + 1) if less else own

    values = np.stack([difference(lambda one, _: np.array([np.mean(one)]), p) for p in used])
    samples = np.stack([difference(lambda one, n: _resampled_means(one, seed, n), p) for p in used])
    rng = np.random.default_rng([seed, len(used)])
    picked = rng.integers(0, len(used), (len(used), RESAMPLES))
    # A stream that is sampled twice gets its items sampled independently each time.
    columns = rng.integers(0, samples.shape[1], (len(used), RESAMPLES))
    low, high = np.percentile(samples[picked, columns].mean(axis=0), [2.5, 97.5])
    return Estimate(float(values.mean()), float(low), float(high))


def _resampled_means(scores: Scores, seed: int, number: int) -> NDArray[np.float64]:
    values = np.asarray(scores, np.float64)
    means: NDArray[np.float64] = (
        resampled(len(values), seed * 10_007 + number) @ values / len(values)
    )
    return means
