"""Pipelines that learn from the queries they answer: asked one by one, in several orders.

A stream is the items of a benchmark in their order. What is asked early is answered with little in
the cache, so a figure depends on the order: it is a mean over several streams, and its interval is
that of a bootstrap that draws streams first and then items inside of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.metrics.intervals import RESAMPLES, Estimate, resampled
from bottega.evaluation.outcomes import Method, Outcome, Scored
from bottega.evaluation.runner import Conditions, evaluate
from bottega.pipeline import Pipeline
from bottega.types import Query

Scores = Sequence[float]


@dataclass(frozen=True)
class Streamed:
    """What was answered in one stream, `length` items in their order, some of which may be
    missing because they failed."""

    scored: tuple[Scored, ...]
    length: int

    def scores(
        self, tier: str | None = None, part: int | None = None, parts: int = 3
    ) -> dict[int, float]:
        """By place: those of a tier, or of one of the parts (from 0) of equal length."""
        return {
            one.place: one.score
            for one in self.scored
            if tier in (None, one.tier)
            and (part is None or one.place * parts // self.length == part)
        }

    def share(self, tier: str) -> float:
        """Of the answers, those that this tier gave."""
        return sum(one.tier == tier for one in self.scored) / len(self.scored)


async def stream(data: Benchmark, method: Method) -> Streamed:
    """Each item is asked when the answer to the one before it is in the cache."""
    _, scored = await evaluate(data, method, Conditions(concurrency=1, round_size=1))
    return Streamed(tuple(scored), len(data.items))


def answering(name: str, pipeline: Pipeline, shots: int = 0) -> Method:
    """A pipeline as a method. What it learns from is its own answers, never an item's gold one: it
    is given the queries alone."""

    async def answer(query: Query) -> Outcome:
        trace = await pipeline.trace(query)
        return Outcome(trace.answer, trace)

    return Method(name, shots, answer)


def mean_over(
    streams: Sequence[Streamed],
    *,
    tier: str | None = None,
    part: int | None = None,
    parts: int = 3,
    seed: int = 0,
) -> Estimate:
    """Mean score over the streams, of all answers, of one tier's, or of a part's."""
    return _estimate([list(one.scores(tier, part, parts).values()) for one in streams], seed)


def growth(streams: Sequence[Streamed], tier: str, *, parts: int = 3, seed: int = 0) -> Estimate:
    """How much better a tier answers in the last part of the streams than in their first."""
    last = [list(one.scores(tier, parts - 1, parts).values()) for one in streams]
    first = [list(one.scores(tier, 0, parts).values()) for one in streams]
    return _estimate(last, seed, less=first)


def gain(
    ours: Sequence[Streamed],
    theirs: Sequence[Streamed],
    *,
    tier: str | None = None,
    part: int | None = None,
    parts: int = 3,
    seed: int = 0,
) -> Estimate:
    """What we add to them, stream by stream, on the same items: those that `tier` answered for us,
    whoever answered them for them."""
    differences = []
    for mine, yours in zip(ours, theirs, strict=True):
        known = yours.scores()
        own = mine.scores(tier, part, parts)
        differences.append([own[place] - known[place] for place in own if place in known])
    return _estimate(differences, seed)


def _estimate(groups: Sequence[Scores], seed: int, less: Sequence[Scores] = ()) -> Estimate:
    """The mean of the groups' means, each less its other one if there are any. A group that has
    nothing to tell is left out."""
    known = [
        place for place, one in enumerate(groups) if len(one) and (not less or len(less[place]))
    ]
    if not known:
        return Estimate(float("nan"), float("nan"), float("nan"))

    def difference(
        of: Callable[[Scores, int], NDArray[np.float64]], place: int
    ) -> NDArray[np.float64]:
        own = of(groups[place], 2 * place)
        return own - of(less[place], 2 * place + 1) if less else own

    values = np.stack([difference(lambda one, _: np.array([np.mean(one)]), p) for p in known])
    drawn = np.stack([difference(lambda one, n: _resampled_means(one, seed, n), p) for p in known])
    rng = np.random.default_rng([seed, len(known)])
    picked = rng.integers(0, len(known), (len(known), RESAMPLES))
    # The same stream drawn twice has its items drawn twice, too.
    columns = rng.integers(0, drawn.shape[1], (len(known), RESAMPLES))
    low, high = np.percentile(drawn[picked, columns].mean(axis=0), [2.5, 97.5])
    return Estimate(float(values.mean()), float(low), float(high))


def _resampled_means(scores: Scores, seed: int, number: int) -> NDArray[np.float64]:
    known = np.asarray(scores, np.float64)
    means: NDArray[np.float64] = resampled(len(known), seed * 10_007 + number) @ known / len(known)
    return means
