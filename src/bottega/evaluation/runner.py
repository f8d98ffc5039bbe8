"""Runs methods over a benchmark and scores them. What failed is counted, never scored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from bottega.errors import BottegaError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.metrics.calibration import calibration
from bottega.evaluation.metrics.intervals import RESAMPLES, Estimate, resampled
from bottega.evaluation.metrics.metric import Judgement
from bottega.evaluation.outcomes import (
    Budget,
    EndpointCheck,
    Method,
    Outcome,
    ScoredAnswer,
    first,
    is_item_error,
)
from bottega.evaluation.run_store import Ledger, Unkept
from bottega.pipeline import Pipeline
from bottega.types import Example, Query


@dataclass(frozen=True)
class Figure:
    metric: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Result:
    """One row of the table. `n` counts answered items, invalid replies included; `failed` items
    (the endpoint did not answer) and `missing` ones (not asked: the budget was spent) are in no
    other figure. Values are None if none was answered. `seconds` are those of this run alone,
    `also` are the benchmark's further metrics, and the error of the answers' confidence."""

    method: str
    shots: int
    n: int
    metric: str
    value: float | None
    low: float | None
    high: float | None
    invalid: int
    failed: int
    calls: int
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float | None
    seconds: float
    missing: int = 0
    also: tuple[Figure, ...] = field(default=())


def tally(
    benchmark: Benchmark,
    method: Method,
    scored: Sequence[ScoredAnswer],
    *,
    failed: int,
    seconds: float,
    seed: int,
) -> Result:
    figures = [
        _figure(metric.name, metric.estimate(_judged(scored, place), seed=seed))
        for place, metric in enumerate(benchmark.metrics)
        if scored
    ]
    return summed(
        (method.name, method.shots),
        benchmark.metrics[0].name,
        scored,
        figures,
        asked=len(benchmark.items),
        failed=failed,
        seconds=round(seconds, 3),
        seed=seed,
    )


def summed(
    key: tuple[str, int],
    metric: str,
    scored: Sequence[ScoredAnswer],
    figures: Sequence[Figure],
    *,
    asked: int,
    failed: int,
    seconds: float,
    seed: int,
) -> Result:
    """The row of a method at its number of shots, with its `figures`, that of `metric` among them
    if there is one, and the error of the answers' confidence."""
    first = next((figure for figure in figures if figure.metric == metric), None)
    sure = calibration(_judged(scored, 0), seed=seed)
    also = [figure for figure in figures if figure is not first]
    also += [] if sure is None else [_figure(sure.name, sure.error)]
    costs = [s.cost_usd for s in scored if s.cost_usd is not None]
    return Result(
        method=key[0],
        shots=key[1],
        n=len(scored),
        metric=metric,
        value=first.value if first else None,
        low=first.low if first else None,
        high=first.high if first else None,
        invalid=sum(not s.answer.valid for s in scored),
        failed=failed,
        calls=sum(s.calls for s in scored),
        prompt_tokens=sum(s.prompt_tokens for s in scored),
        completion_tokens=sum(s.completion_tokens for s in scored),
        cost_usd=sum(costs) if len(costs) == len(scored) else None,
        seconds=seconds,
        missing=asked - len(scored) - failed,
        also=tuple(also),
    )


def _judged(scored: Sequence[ScoredAnswer], place: int) -> list[Judgement]:
    return [Judgement(one.item, one.answer, one.scores[place]) for one in scored]


def _figure(name: str, estimate: Estimate) -> Figure:
    return Figure(name, estimate.value, estimate.low, estimate.high)


Scores = Sequence[float]


@dataclass(frozen=True)
class StreamResult:
    """What was answered in one stream, `length` items in their order, some of which may be
    missing because they failed."""

    scored: tuple[ScoredAnswer, ...]
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


async def stream(data: Benchmark, method: Method) -> StreamResult:
    """Each item is asked when the answer to the one before it is in the cache."""
    _, scored = await evaluate(data, method, Conditions(concurrency=1, round_size=1))
    return StreamResult(tuple(scored), len(data.items))


def answering(name: str, pipeline: Pipeline, shots: int = 0) -> Method:
    """A pipeline as a method. What it learns from is its own answers, never an item's gold one: it
    is given the queries alone."""

    async def answer(query: Query) -> Outcome:
        trace = await pipeline.trace(query)
        return Outcome(trace.answer, trace)

    return Method(name, shots, answer)


def mean_over(
    streams: Sequence[StreamResult],
    *,
    tier: str | None = None,
    part: int | None = None,
    parts: int = 3,
    seed: int = 0,
) -> Estimate:
    """Mean score over the streams, of all answers, of one tier's, or of a part's."""
    return _estimate([list(one.scores(tier, part, parts).values()) for one in streams], seed)


def growth(
    streams: Sequence[StreamResult], tier: str, *, parts: int = 3, seed: int = 0
) -> Estimate:
    """How much better a tier answers in the last part of the streams than in their first."""
    last = [list(one.scores(tier, parts - 1, parts).values()) for one in streams]
    first = [list(one.scores(tier, 0, parts).values()) for one in streams]
    return _estimate(last, seed, less=first)


def gain(
    ours: Sequence[StreamResult],
    theirs: Sequence[StreamResult],
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


@dataclass(frozen=True)
class Conditions:
    """How a run goes, whatever is asked: `concurrency` questions at once; with `round_size` only
    among so many in a row, in their order, and a method may learn from a round before the next."""

    concurrency: int = 32
    seed: int = 0
    round_size: int | None = None
    ledger: Ledger = field(default_factory=Unkept)
    budget: Budget = field(default_factory=Budget)
    contact: EndpointCheck = field(default_factory=EndpointCheck)


async def evaluate(
    benchmark: Benchmark,
    method: Method,
    conditions: Conditions,
    *,
    done: Callable[[ScoredAnswer | None], None] = lambda scored: None,
) -> tuple[Result, list[ScoredAnswer]]:
    """One method over all items that the ledger does not hold; stops where the budget is spent.

    `done` is told of each answer, of those in the ledger too, and of each failure (None). Raises
    the first error that would meet every item.
    """
    started = time.perf_counter()
    run = _Run(benchmark, method, conditions, done)
    try:
        for places in _rounds(len(benchmark.items), conditions.round_size):
            await run.round(places)
    except ExceptionGroup as errors:
        raise first(errors) from errors
    scored = [run.scored[place] for place in sorted(run.scored)]
    seconds = time.perf_counter() - started
    return tally(
        benchmark, method, scored, failed=run.failed, seconds=seconds, seed=conditions.seed
    ), scored


def _rounds(items: int, size: int | None) -> Iterator[range]:
    step = size or items
    return (range(start, min(start + step, items)) for start in range(0, items, step))


class _Run:
    def __init__(
        self,
        benchmark: Benchmark,
        method: Method,
        conditions: Conditions,
        done: Callable[[ScoredAnswer | None], None],
    ) -> None:
        self._benchmark = benchmark
        self._method = method
        self._conditions = conditions
        self._done = done
        self.scored = conditions.ledger.answered(method, benchmark.items)
        self.failed = 0
        for one in self.scored.values():
            done(one)

    async def round(self, places: Sequence[int]) -> None:
        waiting = (place for place in places if place not in self.scored)

        async def work() -> None:
            for place in waiting:
                if not self._conditions.budget.reserve():
                    return
                await self._one(place)

        if self._conditions.budget.is_limited and not self.scored:
            # What one costs has to be known before many are under way.
            for place in waiting:
                if self._conditions.budget.reserve():
                    await self._one(place)
                break
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._conditions.concurrency, len(places))):
                group.create_task(work())
        if self._method.learn is not None:
            for one in (self.scored[place] for place in places if place in self.scored):
                await self._method.learn(one.item.query, one.answer, one.tier)

    async def _one(self, place: int) -> None:
        """Whatever the answer cost, it is in the ledger before it counts."""
        item, ledger = self._benchmark.items[place], self._conditions.ledger
        try:
            outcome = await self._method.answer(item.query)
        except BottegaError as error:
            await ledger.fail(self._method, place, error)
            at_once = self._conditions.concurrency
            if not is_item_error(error) and not self._conditions.contact.passes(error, at_once):
                raise
            self.failed += 1
            self._conditions.budget.settle(0.0)
            self._done(None)
            return
        self._conditions.contact.answered |= outcome.trace is not None
        scored = self._judged(place, item, outcome)
        await ledger.keep(self._method, scored, outcome)
        # What its reasoning was stands in the ledger, not in memory.
        self.scored[place] = replace(scored, answer=replace(scored.answer, rationale=None))
        self._conditions.budget.settle(scored.cost_usd)
        self._done(scored)

    def _judged(self, place: int, item: Example, outcome: Outcome) -> ScoredAnswer:
        scores = tuple(metric.score(item, outcome.answer) for metric in self._benchmark.metrics)
        trace = outcome.trace
        if trace is None:
            return ScoredAnswer(place, item, outcome.answer, scores)
        return ScoredAnswer(
            place,
            item,
            outcome.answer,
            scores,
            trace.tier,
            trace.calls,
            trace.usage.prompt_tokens,
            trace.usage.completion_tokens,
            trace.cost_usd,
        )
