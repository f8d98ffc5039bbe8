"""Estimates with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
PERMUTATIONS = 10_000
CELLS = 20_000_000
Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """Value with its 95 % interval."""

    value: float
    low: float
    high: float


def bounds(estimate: Estimate | None) -> tuple[float | None, float | None, float | None]:
    """Return value, low and high; all None without an estimate."""
    if estimate is None:
        return None, None, None
    return estimate.value, estimate.low, estimate.high


def accuracy(correct: Sequence[bool]) -> Estimate:
    """Return the share of correct answers with its Wilson interval; invalid ones are False."""
    n, share = len(correct), sum(correct) / len(correct)
    scale = 1 + Z**2 / n
    center = (share + Z**2 / (2 * n)) / scale
    half = Z / scale * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    low = center - half if share > 0 else 0.0
    return Estimate(share, low, center + half if share < 1 else 1.0)


def mean(values: Sequence[float], *, seed: int) -> Estimate:
    """Return the mean of at least one value.

    The interval is Wilson's if all values are 0 or 1, else the percentile bootstrap's.
    """
    if all(value in (0.0, 1.0) for value in values):
        return accuracy([value == 1.0 for value in values])
    array = np.asarray(values, np.float64)
    return with_interval(array.mean(), resampled(len(array), seed) @ array / len(array))


def with_interval(value: float, samples: NDArray[np.float64]) -> Estimate:
    """Return the value with the 95 % percentile interval of its bootstrap samples."""
    low, high = np.percentile(samples, [2.5, 97.5])
    return Estimate(float(value), float(low), float(high))


def resampled(n: int, seed: int) -> NDArray[np.float64]:
    """Return how often each of n items is sampled, (resamples, n).

    The number of resamples shrinks for very many items, to fit into memory.
    """
    return _counts(n, seed).astype(np.float64)


@lru_cache(maxsize=2)  # the methods of a report have the same items; 20 MB each up to 100,000
def _counts(n: int, seed: int) -> NDArray[np.uint8]:
    rows = max(200, min(RESAMPLES, CELLS // n))
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=rows)
    return counts.astype(np.uint8)  # an item is sampled about once, never 256 times


def paired_difference(ours: Sequence[bool], theirs: Sequence[bool]) -> Estimate:
    """Return our accuracy minus theirs on the same items, at least one, with its score interval.

    Method 10 of Newcombe, Improved confidence intervals for the difference between binomial
    proportions based on paired data, Statistics in Medicine 17 (1998): two Wilson intervals, joined
    by the correlation of right and wrong answers.
    """
    we, they, phi = accuracy(ours), accuracy(theirs), _correlation(ours, theirs)
    value = (sum(ours) - sum(theirs)) / len(ours)
    below = _joined(we.value - we.low, they.high - they.value, phi)
    above = _joined(we.high - we.value, they.value - they.low, phi)
    return Estimate(value, value - below, value + above)


def paired_mean_difference(
    ours: Sequence[float], theirs: Sequence[float], *, seed: int
) -> Estimate:
    """Return the mean difference of scores in [0, 1] with its percentile bootstrap interval."""
    gain = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    return with_interval(gain.mean(), resampled(len(gain), seed) @ gain / len(gain))


def sign_flips(ours: Sequence[float], theirs: Sequence[float], *, seed: int) -> float:
    """Return the two-sided p-value of a permutation test that swaps both scores of random items.

    It is never below one over the number of permutations.
    """
    gain = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    gain = gain[gain != 0]
    if not len(gain):
        return 1.0
    rows = max(200, min(PERMUTATIONS, CELLS // len(gain)))
    signs = np.random.default_rng(seed).integers(0, 2, (rows, len(gain)), np.int8) * 2 - 1
    as_far = np.abs(signs @ gain) >= abs(gain.sum()) - 1e-9
    return float((as_far.sum() + 1) / (rows + 1))


def mcnemar(ours: Sequence[bool], theirs: Sequence[bool]) -> float:
    """Return the exact two-sided p-value of McNemar's test (Psychometrika 12, 1947).

    It compares the items that only one side answered correctly; without any it is 1.0.
    """
    wins = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    losses = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    n, tail, ways = wins + losses, 0, 1
    for k in range(min(wins, losses) + 1):  # `ways` to choose k of n, in whole numbers
        tail += ways
        ways = ways * (n - k) // (k + 1)
    return float(min(1.0, 2 * tail / 2**n))


def _joined(one: float, other: float, phi: float) -> float:
    return math.sqrt(one**2 + other**2 - 2 * phi * one * other)


def _correlation(ours: Sequence[bool], theirs: Sequence[bool]) -> float:
    """Return phi of right and wrong, with Newcombe's continuity correction."""
    n, we, they = len(ours), sum(ours), sum(theirs)
    both = sum(a and b for a, b in zip(ours, theirs, strict=True))
    together = float(n * both - we * they)
    if together > 0:
        together = max(together - n / 2, 0.0)
    spread = math.sqrt(we * (n - we) * they * (n - they))
    return together / spread if spread else 0.0
