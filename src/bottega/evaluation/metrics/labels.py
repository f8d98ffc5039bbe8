"""Labels: accuracy, and macro-F1 for sets with several labels an item."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bottega.evaluation.examples import labels_of
from bottega.evaluation.metrics.intervals import Estimate, mean, resampled
from bottega.evaluation.metrics.metric import Judgement
from bottega.types import Answer, Example


class Accuracy:
    """Whether the labels are exactly those of the item."""

    name = "accuracy"

    def score(self, item: Example, answer: Answer, /) -> float:
        return float(answer.valid and set(answer.labels) == set(labels_of(item)))

    def estimate(self, judged: Sequence[Judgement], /, *, seed: int) -> Estimate:
        return mean([one.score for one in judged], seed=seed)


class MacroF1(Accuracy):
    """The mean of the labels' F1; an item's own score is whether its labels are exactly right."""

    name = "macro_f1"

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels

    def estimate(self, judged: Sequence[Judgement], /, *, seed: int) -> Estimate:
        truth = [labels_of(one.item) for one in judged]
        said = [one.answer.labels for one in judged]
        return macro_f1(truth, said, self._labels, seed=seed)


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
    value = _macro_f1(gold, said, everything)[0]
    low, high = np.percentile(_macro_f1(gold, said, resampled(len(truth), seed)), [2.5, 97.5])
    return Estimate(float(value), float(low), float(high))


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
