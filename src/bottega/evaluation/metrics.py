"""Figures with their 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000


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


def macro_f1(
    truth: Sequence[Sequence[str]],
    predicted: Sequence[Sequence[str]],
    labels: Sequence[str],
    *,
    seed: int,
) -> Estimate:
    """Unweighted mean of the labels' F1 with its percentile bootstrap interval over items.

    A label that neither the truth nor the predictions hold is left out of the mean.
    """
    gold, said = _indicators(truth, labels), _indicators(predicted, labels)
    everything = np.ones((1, len(truth)))
    draws = np.random.default_rng(seed).multinomial(
        len(truth), np.full(len(truth), 1 / len(truth)), size=RESAMPLES
    )
    value = _macro_f1(gold, said, everything)[0]
    low, high = np.percentile(_macro_f1(gold, said, draws.astype(float)), [2.5, 97.5])
    return Estimate(float(value), float(low), float(high))


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


def _indicators(sets: Sequence[Sequence[str]], labels: Sequence[str]) -> NDArray[np.float64]:
    return np.array([[float(label in chosen) for label in labels] for chosen in sets])


def _macro_f1(
    gold: NDArray[np.float64], said: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """One value for each row of item weights."""
    both = weights @ (gold * said)
    total = weights @ (gold + said)
    occurs = total > 0
    f1 = np.divide(2 * both, total, out=np.zeros_like(total), where=occurs)
    result: NDArray[np.float64] = f1.sum(axis=1) / np.maximum(occurs.sum(axis=1), 1)
    return result
