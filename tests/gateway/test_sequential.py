"""Coverage of the confidence sequences under continuous peeking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.gateway.accounting.experiment_report import (
    MIN_VALUES,
    Floats,
    SequentialEstimate,
    bounded_estimate,
    bounded_sequence,
    difference,
    mean_estimate,
    mean_sequence,
)

Draw = Callable[[np.random.Generator, int], Floats]
Sequence = Callable[[Floats, float], tuple[Floats, Floats]]


def bernoulli(p: float) -> Draw:
    return lambda rng, n: (rng.random(n) < p).astype(np.float64)


def misses(draw: Draw, mean: float, sequence: Sequence, runs: int, n: int, first: int = 1) -> float:
    """Return the share of runs in which an interval after any number of values misses the mean."""
    missed = 0
    for seed in range(runs):
        low, high = sequence(draw(np.random.default_rng(seed), n), 0.05)
        missed += bool(((low > mean) | (high < mean))[first - 1 :].any())
    return missed / runs


@pytest.mark.parametrize("p", [0.02, 0.5, 0.9])
def test_bounded_intervals_cover_at_all_times(p: float) -> None:
    assert misses(bernoulli(p), p, bounded_sequence, 200, 1000) <= 0.05


def test_ordinary_intervals_do_not(p: float = 0.5) -> None:
    def wald(values: Floats, alpha: float) -> tuple[Floats, Floats]:
        n = np.arange(1, len(values) + 1)
        mean = np.cumsum(values) / n
        reach = 1.96 * np.sqrt(mean * (1 - mean) / n)
        return mean - reach, mean + reach

    assert misses(bernoulli(p), p, wald, 200, 1000, first=30) > 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "mean"),
    [
        (bernoulli(0.01), 0.01),
        (bernoulli(0.3), 0.3),
        (bernoulli(0.99), 0.99),
        (lambda rng, n: rng.random(n), 0.5),
        (lambda rng, n: rng.beta(0.2, 0.8, n), 0.2),
        (lambda rng, n: np.full(n, 0.7), 0.7),
    ],
)
def test_bounded_intervals_cover_other_distributions(draw: Draw, mean: float) -> None:
    assert misses(draw, mean, bounded_sequence, 1000, 5000) <= 0.05


@pytest.mark.slow
def test_dependent_values_are_covered() -> None:
    """The variance may depend on earlier values, as long as the expectation does not."""

    def draw(rng: np.random.Generator, n: int) -> Floats:
        values = np.empty(n)
        for i in range(n):
            spread = 0.5 if i and values[i - 1] > 0.5 else 0.05
            values[i] = 0.5 + spread * (1 if rng.random() < 0.5 else -1)
        return values

    assert misses(draw, 0.5, bounded_sequence, 300, 1000) <= 0.05


COSTS: list[Any] = [
    (lambda rng, n: rng.exponential(2.0, n), 2.0),
    (lambda rng, n: rng.lognormal(0.0, 0.7, n), float(np.exp(0.7**2 / 2))),
    (lambda rng, n: rng.lognormal(0.0, 1.2, n), float(np.exp(1.2**2 / 2))),
    (lambda rng, n: rng.normal(1e6, 1.0, n), 1e6),
    (lambda rng, n: rng.gamma(2.0, 0.001, n) + (rng.random(n) < 0.2) * 0.01, 0.004),
    (lambda rng, n: 1.0 + 99.0 * (rng.random(n) < 0.01), 1.99),
    (lambda rng, n: 1.0 + 999.0 * (rng.random(n) < 0.001), 1.999),
]


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "mean"), COSTS)
def test_asymptotic_intervals_cover_from_their_start(draw: Draw, mean: float) -> None:
    assert misses(draw, mean, mean_sequence, 1000, 5000, first=MIN_VALUES) <= 0.05


@pytest.mark.parametrize(("draw", "mean"), [COSTS[0], COSTS[-2]])
def test_asymptotic_intervals_cover_costs(draw: Draw, mean: float) -> None:
    assert misses(draw, mean, mean_sequence, 200, 3000) <= 0.05


def test_rare_costs_delay_the_asymptotic_interval() -> None:
    costs = np.resize([1.0] * 99 + [100.0], 3000)
    low, _ = mean_sequence(costs, 0.05)
    first = int(np.isfinite(low).argmax())
    assert 8 <= (costs[:first] > 1).sum() <= 12


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_interval_contains_possible_means(values: list[float]) -> None:
    low, high = bounded_sequence(np.array(values), 0.05)
    assert ((low >= 0) & (low <= high) & (high <= 1)).all()
    # An interval depends on the values up to its time alone.
    before, _ = bounded_sequence(np.array(values[:-1] or values), 0.05)
    assert np.array_equal(low[: len(before)], before)


def test_intervals_shrink_and_depend_on_the_variance() -> None:
    rng = np.random.default_rng(0)
    many, few = (bounded_estimate(bernoulli(0.5)(rng, n)) for n in (5000, 50))
    assert many is not None and few is not None
    assert width(many) < 0.08 < width(few)
    rare = bounded_estimate(bernoulli(0.01)(rng, 5000))
    assert rare is not None and width(rare) < width(many) / 2


def width(estimate: SequentialEstimate) -> float:
    assert estimate.low is not None and estimate.high is not None
    return estimate.high - estimate.low


def test_few_values_have_no_asymptotic_interval() -> None:
    values = np.resize([0.0, 2.0], MIN_VALUES)
    few = mean_estimate(values[:-2])
    assert few == SequentialEstimate(1.0, None, None, MIN_VALUES - 2)
    enough = mean_estimate(values)
    assert enough is not None and enough.low is not None and 0.5 < enough.low < 1.0
    # Other costs may follow any number of equal ones.
    equal = mean_estimate(np.full(5000, 0.7))
    assert equal is not None and equal.low is None
    assert mean_estimate(np.ones(0)) is bounded_estimate(np.ones(0)) is None
    assert difference(few, few) == SequentialEstimate(0.0, None, None, 2 * (MIN_VALUES - 2))
    assert difference(few, None) is None


def test_difference_covers_at_all_times() -> None:
    missed = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        one, other = bernoulli(0.6)(rng, 800), bernoulli(0.7)(rng, 800)
        ends = [bounded_sequence(values, 0.025) for values in (one, other)]
        low, high = ends[1][0] - ends[0][1], ends[1][1] - ends[0][0]
        missed += bool(((low > 0.1) | (high < 0.1)).any())
    assert missed <= 5
    a, b = SequentialEstimate(0.5, 0.4, 0.6, 10), SequentialEstimate(0.8, 0.7, 0.9, 20)
    found = difference(a, b)
    assert found is not None and found.n == 30
    assert (found.value, found.low, found.high) == pytest.approx((0.3, 0.1, 0.5))
