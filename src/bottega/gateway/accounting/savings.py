"""What the gateway spent, and what the master alone would have cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bottega.gateway.accounting.entries import Row
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.savings_reader import Costs, Route, SavingsReader

Floats = NDArray[np.float64]
MASTER = "master"
RESAMPLES = 2000
FEW = 10  # answers of the master
SEED = 0
NONE = np.zeros(RESAMPLES + 1)
# Agresti and Coull, The American Statistician 52 (1998), for shares; Agresti and Min, Statistics in
# Medicine 24 (2005), for differences of paired ones.
AGREEMENT = {0.0: 2.0, 1.0: 2.0}
DIFFERENCE = {-1.0: 0.5, 0.0: 1.0, 1.0: 0.5}


@dataclass(frozen=True)
class Figure:
    """With its 95 % interval, None where `n` is too small for one."""

    value: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class Alone:
    """What the master alone would have cost: an estimate. Its own answers cost what they cost, and
    so do its failures that were paid for; each of the `estimated` requests that others answered
    costs the mean of its answers in the same namespace or, for `borrowed` ones, in all. Each `n`
    counts the answers behind the means. `saved` is less what was spent."""

    usd: Figure
    saved: Figure
    estimated: int
    borrowed: int


@dataclass(frozen=True)
class Quality:
    """How far answers agree with the master's, with demonstrations and without, on the same
    questions; `gain` is the mean of the differences."""

    shown: Figure
    bare: Figure
    gain: Figure


@dataclass(frozen=True)
class Savings:
    """Of all `requests` so many were `answered`; others failed or were refused. `alone` is None
    without a priced answer of the master, `quality` without shadow samples. `spent_usd` leaves out
    `unpriced` requests; `lost` ones stand nowhere, whenever they were."""

    master: str
    namespace: str | None
    first: float | None
    last: float | None
    requests: int
    answered: int
    routes: tuple[Route, ...]
    spent_usd: float
    unpriced: int
    alone: Alone | None
    quality: Quality | None
    lost: int


def savings(
    ledger: Ledger,
    *,
    namespace: str | None = None,
    since: float | None = None,
    master: str | None = None,
) -> Savings:
    """Of every namespace if none is named. `since` is in unix seconds. Blocks."""
    master = master or ledger.master() or MASTER
    since = since or 0.0
    reading = SavingsReader(ledger, since, namespace, master)
    routes = reading.routes()
    first, last = reading.span()
    spent = sum(route.cost_usd for route in routes)
    return Savings(
        master,
        namespace,
        first,
        last,
        sum(route.requests for route in routes if route.state != "shadow"),
        sum(route.requests for route in routes if route.is_answer),
        routes,
        spent,
        sum(route.unpriced for route in routes),
        _alone(reading, spent),
        _quality(reading.shadows()),
        ledger.lost_by_all(),
    )


def _alone(reading: SavingsReader, spent: float) -> Alone | None:
    answers, others = reading.costs(), reading.others()
    if not answers:
        return None
    means, sizes = _means(answers), {where: costs.n for where, costs in answers.items()}
    # For a namespace without an answer of the master's.
    pooled = sum((means[where] * n for where, n in sizes.items()), NONE) / sum(sizes.values())
    estimated = sum((count * means.get(where, pooled) for where, count in others.items()), NONE)
    usd = estimated + reading.paid()
    borrowed = sum(count for where, count in others.items() if where not in answers)
    sure = all(sizes.get(where, sum(sizes.values())) >= FEW for where in others)
    n = sum(n for where, n in sizes.items() if borrowed or not others or where in others)
    return Alone(
        _figure(usd, n, sure=sure),
        _figure(usd - spent, n, sure=sure),
        sum(others.values()),
        borrowed,
    )


def _means(answers: Mapping[str, Costs]) -> dict[str, Floats]:
    """Of each namespace, the mean, and after it the means of bootstrap samples."""
    draw, means = np.random.default_rng(SEED), {}
    for where, costs in answers.items():
        n = costs.n
        if not costs.values:  # many answers: the bootstrap converges to the normal distribution
            error = costs.deviation / math.sqrt(n)
            resampled = costs.mean + draw.standard_normal(RESAMPLES) * error
        else:
            values = np.asarray(costs.values, np.float64)
            resampled = np.array([values[draw.integers(0, n, n)].mean() for _ in range(RESAMPLES)])
        means[where] = np.concatenate([[costs.mean], resampled])
    return means


def _figure(draws: Floats, n: int, *, sure: bool) -> Figure:
    if not sure:
        return Figure(float(draws[0]), None, None, n)
    low, high = np.percentile(draws[1:], [2.5, 97.5])
    return Figure(float(draws[0]), float(low), float(high), n)


def _quality(samples: Sequence[Row]) -> Quality | None:
    if not samples:
        return None
    shown, bare = np.asarray(samples, np.float64).T
    return Quality(_wald(shown, AGREEMENT), _wald(bare, AGREEMENT), _wald(shown - bare, DIFFERENCE))


def _wald(values: Floats, added: Mapping[float, float]) -> Figure:
    """Their mean, and the interval that Wald's method gives after so many values were added. With
    few or equal values it stays wide, where the bootstrap's shrinks to a point."""
    numbers = np.concatenate([values, list(added)])
    weights = np.concatenate([np.ones(len(values)), list(added.values())])
    middle = np.average(numbers, weights=weights)
    variance = np.average((numbers - middle) ** 2, weights=weights)
    reach = 1.96 * math.sqrt(variance / weights.sum())
    low, high = max(middle - reach, min(added)), min(middle + reach, max(added))
    return Figure(float(values.mean()), float(low), float(high), len(values))
