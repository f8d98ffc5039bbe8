"""From answered items to one row of the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.metrics.calibration import calibration
from bottega.evaluation.metrics.intervals import Estimate
from bottega.evaluation.metrics.metric import Judged
from bottega.evaluation.outcomes import Method, Scored


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
    scored: Sequence[Scored],
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
    scored: Sequence[Scored],
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


def _judged(scored: Sequence[Scored], place: int) -> list[Judged]:
    return [Judged(one.item, one.answer, one.scores[place]) for one in scored]


def _figure(name: str, estimate: Estimate) -> Figure:
    return Figure(name, estimate.value, estimate.low, estimate.high)
