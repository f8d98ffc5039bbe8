"""Runner: methods over a benchmark, with their scores. Failed items are counted, never scored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from bottega import notebook
from bottega._util.event_loops import for_each
from bottega._util.progress import Progress, showing_progress
from bottega.errors import BottegaError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import CUSTOM, RunConfig
from bottega.evaluation.metrics.metric import (
    ConfidentScore,
    Estimate,
    Judgement,
    by_confidence,
    calibration,
)
from bottega.evaluation.outcomes import (
    Budget,
    EndpointCheck,
    Method,
    MethodKey,
    Outcome,
    ScoredAnswer,
    is_item_error,
)
from bottega.naming import own_code_error
from bottega.types import Candidate, Example, Query


@dataclass(frozen=True)
class Figure:
    """Value of a metric with its 95 % interval."""

    metric: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class MethodResult:
    """Result of `method` with a number of `shots`: one row of the table.

    `value` is the score by `metric`, with its 95 % interval from `low` to `high`. `calls`,
    `prompt_tokens`, `completion_tokens` and `cost_usd` are sums over the items. `n` counts answered
    items, `invalid` replies included. `failed` items (no answer from the endpoint) and `missing`
    items (budget spent before) are excluded from all other figures. Values are None without an
    answer. `seconds` exclude earlier, interrupted runs; `also` holds the benchmark's further
    metrics and the calibration error, `confident` the scores of answers above several confidences.
    """

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
    confident: tuple[ConfidentScore, ...] = ()

    def _repr_html_(self) -> str:
        return notebook.render("result", self)


def summarize(
    key: tuple[str, int],
    metric: str,
    scored: Sequence[ScoredAnswer],
    figures: Sequence[Figure],
    *,
    items: int,
    failed: int,
    seconds: float,
    seed: int,
) -> MethodResult:
    """Return the result of a method at its number of shots (`key`).

    `figures` may include that of the main `metric`; the calibration error is added to the others.
    """
    main = next((figure for figure in figures if figure.metric == metric), None)
    judged = _judgements(scored, 0)
    calibrated = calibration(judged, seed=seed)
    also = [figure for figure in figures if figure is not main]
    also += [] if calibrated is None else [_figure(calibrated.name, calibrated.error)]
    costs = [s.cost_usd for s in scored if s.cost_usd is not None]
    return MethodResult(
        method=key[0],
        shots=key[1],
        n=len(scored),
        metric=metric,
        value=main.value if main else None,
        low=main.low if main else None,
        high=main.high if main else None,
        invalid=sum(not s.answer.valid for s in scored),
        failed=failed,
        calls=sum(s.calls for s in scored),
        prompt_tokens=sum(s.prompt_tokens for s in scored),
        completion_tokens=sum(s.completion_tokens for s in scored),
        cost_usd=sum(costs) if len(costs) == len(scored) else None,
        seconds=seconds,
        missing=items - len(scored) - failed,
        also=tuple(also),
        confident=by_confidence(judged, seed=seed),
    )


def _judgements(scored: Sequence[ScoredAnswer], metric: int) -> list[Judgement]:
    return [Judgement(one.item, one.answer, one.scores[metric]) for one in scored]


def _figure(name: str, estimate: Estimate) -> Figure:
    return Figure(name, estimate.value, estimate.low, estimate.high)


class AnswerStore:
    """Store of a run's answers; this base class stores none.

    An answer is durable when `keep` returns. A failed item has no answer.
    """

    def answered(self, key: MethodKey, items: tuple[Example, ...]) -> dict[int, ScoredAnswer]:
        """Return the stored answers of a method by item index."""
        return {}

    async def keep(self, method: Method, scored: ScoredAnswer, outcome: Outcome) -> None:
        """Store an answer."""

    async def fail(self, method: Method, index: int, error: BottegaError) -> None:
        """Store the error of a failed item."""

    async def forget(self, key: MethodKey) -> None:
        """Delete the answers and failures of a method."""


class DemonstrationRecorder(AnswerStore):
    """Store of the demonstrations that one method showed, by item index."""

    def __init__(self, method: str, shots: int) -> None:
        self.key = (method, shots)
        self.by_index: dict[int, tuple[Candidate, ...]] = {}

    async def keep(self, method: Method, scored: ScoredAnswer, outcome: Outcome) -> None:
        if method.key == self.key and outcome.trace is not None:
            self.by_index[scored.index] = outcome.trace.candidates


@dataclass
class RunState:
    """State that the methods of a run share."""

    store: AnswerStore = field(default_factory=AnswerStore)
    budget: Budget = field(default_factory=Budget)
    endpoint: EndpointCheck = field(default_factory=EndpointCheck)


async def evaluate(
    benchmark: Benchmark,
    method: Method,
    config: RunConfig | None = None,
    state: RunState | None = None,
    *,
    done: Callable[[ScoredAnswer | None], None] = lambda scored: None,
    progress: Progress = False,
) -> tuple[MethodResult, list[ScoredAnswer]]:
    """Run a method over all items that the store lacks; stop when the budget is spent.

    `done` receives each answer, stored ones included, and None for each failure. `progress=True`
    shows a progress bar on standard error, or in the notebook; a callback receives the number of
    items done since its last call. Raises the first error that would affect every item.
    """
    started = time.perf_counter()
    config = config or RunConfig()
    with showing_progress(method.title, len(benchmark.items), progress) as step:

        def count(scored: ScoredAnswer | None) -> None:
            done(scored)
            step(1)

        run = _MethodRun(benchmark, method, config, state or RunState(), count)
        for indices in _rounds(len(benchmark.items), config.round_size):
            await run.round(indices)
    scored = [run.scored[index] for index in sorted(run.scored)]
    seconds = round(time.perf_counter() - started, 3)
    figures = [
        _figure(metric.name, estimate)
        for i, metric in enumerate(benchmark.metrics)
        if scored and (estimate := metric.estimate(_judgements(scored, i), seed=config.seed))
    ]
    result = summarize(
        (method.name, method.shots),
        benchmark.metrics[0].name,
        scored,
        figures,
        items=len(benchmark.items),
        failed=run.failed,
        seconds=seconds,
        seed=config.seed,
    )
    return result, scored


def _rounds(items: int, size: int | None) -> Iterator[range]:
    step = size or items
    return (range(start, min(start + step, items)) for start in range(0, items, step))


class _MethodRun:
    def __init__(
        self,
        benchmark: Benchmark,
        method: Method,
        config: RunConfig,
        state: RunState,
        done: Callable[[ScoredAnswer | None], None],
    ) -> None:
        self._benchmark = benchmark
        self._method = method
        self._concurrency = config.concurrency
        self._own_code = config.pipeline if method.name == CUSTOM else None
        self._state = state
        self._done = done
        self.scored = state.store.answered(method.key, benchmark.items)
        self.failed = 0
        for one in self.scored.values():
            done(one)

    async def round(self, indices: Sequence[int]) -> None:
        remaining = (index for index in indices if index not in self.scored)
        budget = self._state.budget
        if budget.is_limited and not self.scored:
            # The cost of one item must be known before many run concurrently.
            for index in remaining:
                if budget.reserve():
                    await self._answer(index)
                break
        limit = min(self._concurrency, len(indices))
        await for_each(remaining, self._answer, limit=limit, starts=budget.reserve)
        if self._method.learn is not None:
            for one in (self.scored[index] for index in indices if index in self.scored):
                await self._method.learn(one.item.query, one.answer, one.tier)

    async def _answer(self, index: int) -> None:
        item, state = self._benchmark.items[index], self._state
        try:
            outcome = await self._outcome(item.query)
        except BottegaError as error:
            await state.store.fail(self._method, index, error)
            tolerated = is_item_error(error) or state.endpoint.tolerates(error, self._concurrency)
            if not tolerated:
                raise
            self.failed += 1
            state.budget.settle(0.0)
            self._done(None)
            return
        state.endpoint.answered |= outcome.trace is not None
        scored = self._score(index, item, outcome)
        # Store the answer before its cost can end the run.
        await state.store.keep(self._method, scored, outcome)
        # The store keeps the rationale; memory does not.
        self.scored[index] = replace(scored, answer=replace(scored.answer, rationale=None))
        state.budget.settle(scored.cost_usd)
        self._done(scored)

    async def _outcome(self, query: Query) -> Outcome:
        try:
            return await self._method.answer(query)
        except Exception as error:
            if self._own_code is None or isinstance(error, BottegaError):
                raise
            raise own_code_error(f"{self._own_code}, {query.id},", error) from error

    def _score(self, index: int, item: Example, outcome: Outcome) -> ScoredAnswer:
        scores = tuple(metric.score(item, outcome.answer) for metric in self._benchmark.metrics)
        trace = outcome.trace
        if trace is None:
            return ScoredAnswer(index, item, outcome.answer, scores)
        return ScoredAnswer(
            index,
            item,
            outcome.answer,
            scores,
            trace.tier,
            trace.calls,
            trace.usage.prompt_tokens,
            trace.usage.completion_tokens,
            trace.cost_usd,
        )
