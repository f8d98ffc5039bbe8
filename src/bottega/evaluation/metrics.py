"""Figures with their 95 % intervals."""

from __future__ import annotations

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


def paired_difference(ours: Sequence[bool], theirs: Sequence[bool], *, seed: int) -> Estimate:
    """Our accuracy less theirs on the same items, one at least, with its percentile bootstrap
    interval: items are drawn anew, each with both of its answers."""
    gains = np.asarray(ours, float) - np.asarray(theirs, float)
    shares = [float((gains == gain).mean()) for gain in (-1, 0, 1)]
    # An item loses, draws or wins: resampling items is drawing these three counts.
    draws = np.random.default_rng(seed).multinomial(len(gains), shares, size=RESAMPLES)
    low, high = np.percentile((draws[:, 2] - draws[:, 0]) / len(gains), [2.5, 97.5])
    return Estimate(float(gains.mean()), float(low), float(high))


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
