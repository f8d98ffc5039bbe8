"""Figures with their 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
PERMUTATIONS = 10_000
CELLS = 20_000_000


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float


def accuracy(correct: Sequence[bool]) -> Estimate:
    """Share of correct answers, at least one, with its Wilson interval. Invalid ones are False."""
    from scipy.stats import binomtest  # takes a second to load; --help should not

    interval = binomtest(sum(correct), len(correct)).proportion_ci(method="wilson")
    return Estimate(sum(correct) / len(correct), float(interval.low), float(interval.high))


def mean(values: Sequence[float], *, seed: int) -> Estimate:
    """Their mean, of at least one: with Wilson's interval if all are 0 or 1, else with the
    percentile bootstrap's."""
    if all(value in (0.0, 1.0) for value in values):
        return accuracy([value == 1.0 for value in values])
    known = np.asarray(values, np.float64)
    drawn = resampled(len(known), seed) @ known / len(known)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Estimate(float(known.mean()), float(low), float(high))


def resampled(n: int, seed: int) -> NDArray[np.float64]:
    """How often each of n items is drawn: (resamples, n). Fewer resamples of very many items, so
    that they fit into memory."""
    rows = max(200, min(RESAMPLES, CELLS // n))
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=rows)
    return drawn.astype(np.float64)


def paired_difference(ours: Sequence[bool], theirs: Sequence[bool]) -> Estimate:
    """Our accuracy less theirs on the same items, one at least, with its score interval.

    Method 10 of Newcombe, Improved confidence intervals for the difference between binomial
    proportions based on paired data, Statistics in Medicine 17 (1998): two Wilson intervals, joined
    by how far the answers are right and wrong together.
    """
    we, they, phi = accuracy(ours), accuracy(theirs), _correlation(ours, theirs)
    value = (sum(ours) - sum(theirs)) / len(ours)
    below = _joined(we.value - we.low, they.high - they.value, phi)
    above = _joined(we.high - we.value, they.value - they.low, phi)
    return Estimate(value, value - below, value + above)


def paired_mean_difference(
    ours: Sequence[float], theirs: Sequence[float], *, seed: int
) -> Estimate:
    """The same for scores between 0 and 1, with the percentile bootstrap's interval over items."""
    gain = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    low, high = np.percentile(resampled(len(gain), seed) @ gain / len(gain), [2.5, 97.5])
    return Estimate(float(gain.mean()), float(low), float(high))


def sign_flips(ours: Sequence[float], theirs: Sequence[float], *, seed: int) -> float:
    """The two-sided p-value of a permutation test that swaps the two scores of each item at random.
    Never below one over the number of permutations."""
    gain = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    gain = gain[gain != 0]
    if not len(gain):
        return 1.0
    rows = max(200, min(PERMUTATIONS, CELLS // len(gain)))
    signs = np.random.default_rng(seed).integers(0, 2, (rows, len(gain)), np.int8) * 2 - 1
    as_far = np.abs(signs @ gain) >= abs(gain.sum()) - 1e-9
    return float((as_far.sum() + 1) / (rows + 1))


def mcnemar(ours: Sequence[bool], theirs: Sequence[bool]) -> float:
    """The exact two-sided p-value of McNemar's test (Psychometrika 12, 1947): of the items that
    only one answered rightly, is either as likely? 1.0 if there are none."""
    from scipy.stats import binomtest

    wins = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    losses = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def _joined(one: float, other: float, phi: float) -> float:
    return math.sqrt(one**2 + other**2 - 2 * phi * one * other)


def _correlation(ours: Sequence[bool], theirs: Sequence[bool]) -> float:
    """Phi of right and wrong, with Newcombe's correction for continuity."""
    n, we, they = len(ours), sum(ours), sum(theirs)
    both = sum(a and b for a, b in zip(ours, theirs, strict=True))
    together = float(n * both - we * they)
    if together > 0:
        together = max(together - n / 2, 0.0)
    spread = math.sqrt(we * (n - we) * they * (n - they))
    return together / spread if spread else 0.0
