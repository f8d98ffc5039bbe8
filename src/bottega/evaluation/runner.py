"""Runs methods over a benchmark and scores them. What failed is counted, never scored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from bottega.errors import BottegaError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.failures import concerns_one, first
from bottega.evaluation.methods import Method, Outcome
from bottega.evaluation.metrics.intervals import Estimate
from bottega.evaluation.metrics.metric import Judged
from bottega.types import Example, Query


@dataclass(frozen=True)
class Result:
    """One row of the table. `n` counts answered items, invalid replies included; `failed` items
    (the endpoint did not answer) are in no other figure. Values are None if none was answered."""

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


@dataclass(frozen=True)
class Scored:
    """An answered item with the answer's score by the benchmark's first metric."""

    item: Example
    outcome: Outcome
    score: float

    @property
    def correct(self) -> bool:
        return self.score == 1.0


async def evaluate(
    benchmark: Benchmark,
    method: Method,
    *,
    concurrency: int,
    seed: int,
    done: Callable[[], None] = lambda: None,
) -> tuple[Result, list[Scored]]:
    """One method over all items. Raises the first error that would meet every item."""
    started = time.perf_counter()
    limiter = asyncio.Semaphore(concurrency)

    async def one(item: Example) -> Scored | None:
        async with limiter:
            outcome = await _attempt(method.answer, item.query)
        done()
        if outcome is None:
            return None
        return Scored(item, outcome, benchmark.metrics[0].score(item, outcome.answer))

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in benchmark.items]
    except ExceptionGroup as errors:
        raise first(errors) from errors
    scored = [result for task in tasks if (result := task.result()) is not None]
    seconds = time.perf_counter() - started
    failed = len(tasks) - len(scored)
    return _tally(benchmark, method, scored, failed, seconds, seed), scored


async def _attempt(answer: Callable[[Query], Awaitable[Outcome]], query: Query) -> Outcome | None:
    """None if this one item failed."""
    try:
        return await answer(query)
    except BottegaError as error:
        if not concerns_one(error):
            raise
        return None


def _tally(
    benchmark: Benchmark,
    method: Method,
    scored: Sequence[Scored],
    failed: int,
    seconds: float,
    seed: int,
) -> Result:
    estimate = _estimate(benchmark, scored, seed)
    traces = [s.outcome.trace for s in scored if s.outcome.trace is not None]
    costs = [trace.cost_usd for trace in traces if trace.cost_usd is not None]
    return Result(
        method=method.name,
        shots=method.shots,
        n=len(scored),
        metric=benchmark.metrics[0].name,
        value=estimate.value if estimate else None,
        low=estimate.low if estimate else None,
        high=estimate.high if estimate else None,
        invalid=sum(not s.outcome.answer.valid for s in scored),
        failed=failed,
        calls=len(traces),
        prompt_tokens=sum(trace.reply.usage.prompt_tokens for trace in traces),
        completion_tokens=sum(trace.reply.usage.completion_tokens for trace in traces),
        cost_usd=sum(costs) if len(costs) == len(traces) else None,
        seconds=round(seconds, 3),
    )


def _estimate(benchmark: Benchmark, scored: Sequence[Scored], seed: int) -> Estimate | None:
    if not scored:
        return None
    judged = [Judged(s.item, s.outcome.answer, s.score) for s in scored]
    return benchmark.metrics[0].estimate(judged, seed=seed)
