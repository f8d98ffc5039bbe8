"""Accuracy, and macro-F1 for items with several labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bottega.evaluation.examples import labels_of
from bottega.evaluation.metrics.intervals import Estimate, mean, resampled
from bottega.evaluation.metrics.metric import Judgement
from bottega.types import Answer, Example


class Accuracy:
    """Accuracy: the labels are exactly those of the item."""

    name = "accuracy"

    def score(self, item: Example, answer: Answer, /) -> float:
        return float(answer.valid and set(answer.labels) == set(labels_of(item)))

    def estimate(self, judged: Sequence[Judgement], /, *, seed: int) -> Estimate:
        return mean([one.score for one in judged], seed=seed)


class MacroF1(Accuracy):
    """Mean F1 of the labels; an item scores 1 if its labels are exactly right."""

    name = "macro_f1"

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels

    def estimate(self, judged: Sequence[Judgement], /, *, seed: int) -> Estimate:
        truth = [labels_of(one.item) for one in judged]
        predicted = [one.answer.labels for one in judged]
        return macro_f1(truth, predicted, self._labels, seed=seed)


def macro_f1(
    truth: Sequence[Sequence[str]],
    predicted: Sequence[Sequence[str]],
    labels: Sequence[str],
    *,
    seed: int,
) -> Estimate:
    """Return the unweighted mean of the labels' F1 with its percentile bootstrap interval.

    Labels without truth and predictions are excluded.
    """
    gold, chosen = _indicators(truth, labels), _indicators(predicted, labels)
    everything = np.ones((1, len(truth)))
    value = _macro_f1(gold, chosen, everything)[0]
    low, high = np.percentile(_macro_f1(gold, chosen, resampled(len(truth), seed)), [2.5, 97.5])
    return Estimate(float(value), float(low), float(high))


def _indicators(sets: Sequence[Sequence[str]], labels: Sequence[str]) -> NDArray[np.float64]:
    return np.array([[float(label in chosen) for label in labels] for chosen in sets])


def _macro_f1(
    gold: NDArray[np.float64], chosen: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return one value for each row of item weights."""
    both = weights @ (gold * chosen)
    total = weights @ (gold + chosen)
    occurs = total > 0
    f1 = np.divide(2 * both, total, out=np.zeros_like(total), where=occurs)
    result: NDArray[np.float64] = f1.sum(axis=1) / np.maximum(occurs.sum(axis=1), 1)
    return result
