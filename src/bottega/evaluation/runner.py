"""Runs methods over a benchmark and scores them. What failed is counted, never scored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from bottega.errors import BottegaError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.budget import Budget
from bottega.evaluation.failures import Contact, concerns_one, first
from bottega.evaluation.ledger import Ledger, Unkept
from bottega.evaluation.outcomes import Method, Outcome, Scored
from bottega.evaluation.tally import Result, tally
from bottega.types import Example


@dataclass(frozen=True)
class Conditions:
    """How a run goes, whatever is asked: `concurrency` questions at once; with `round_size` only
    among so many in a row, in their order, and a method may learn from a round before the next."""

    concurrency: int = 32
    seed: int = 0
    round_size: int | None = None
    ledger: Ledger = field(default_factory=Unkept)
    budget: Budget = field(default_factory=Budget)
    contact: Contact = field(default_factory=Contact)


async def evaluate(
    benchmark: Benchmark,
    method: Method,
    conditions: Conditions,
    *,
    done: Callable[[Scored | None], None] = lambda scored: None,
) -> tuple[Result, list[Scored]]:
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
        done: Callable[[Scored | None], None],
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
                if not self._conditions.budget.starts():
                    return
                await self._one(place)

        if self._conditions.budget.is_limited and not self.scored:
            # What one costs has to be known before many are under way.
            for place in waiting:
                if self._conditions.budget.starts():
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
            if not concerns_one(error) and not self._conditions.contact.passes(error, at_once):
                raise
            self.failed += 1
            self._conditions.budget.ended(0.0)
            self._done(None)
            return
        self._conditions.contact.answered |= outcome.trace is not None
        scored = self._judged(place, item, outcome)
        await ledger.keep(self._method, scored, outcome)
        # What its reasoning was stands in the ledger, not in memory.
        self.scored[place] = replace(scored, answer=replace(scored.answer, rationale=None))
        self._conditions.budget.ended(scored.cost_usd)
        self._done(scored)

    def _judged(self, place: int, item: Example, outcome: Outcome) -> Scored:
        scores = tuple(metric.score(item, outcome.answer) for metric in self._benchmark.metrics)
        trace = outcome.trace
        if trace is None:
            return Scored(place, item, outcome.answer, scores)
        return Scored(
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
