"""Selection of settings by their accuracy on the same items, with a nested estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bottega.evaluation.metrics.intervals import Estimate, accuracy, mcnemar, paired_difference
from bottega.reranking import DemonstrationOrder

FOLDS = 5


@dataclass(frozen=True)
class Setting:
    """Name of the embedder, and number and order of the demonstrations."""

    embedder: str
    shots: int
    order: DemonstrationOrder = "nearest-last"


@dataclass(frozen=True)
class Trial:
    """Setting, and whether it answers each item correctly; all trials have the same items."""

    setting: Setting
    correct: tuple[bool, ...]

    @property
    def accuracy(self) -> Estimate:
        return accuracy(self.correct)

    def difference(self, other: Trial) -> Estimate:
        """Return the accuracy minus the other one's, paired."""
        return paired_difference(self.correct, other.correct)


@dataclass(frozen=True)
class Selection:
    """Comparison of settings with the current one, the first trial.

    `best` is the most accurate trial; its accuracy is optimistic, because the same items selected
    it. `nested` is an unbiased estimate: each item is answered by the best setting of the other
    folds. `gain` is the difference of `nested` to the current setting. `p_value` of the gain is
    McNemar's, because the interval alone is too narrow for few items.
    """

    trials: tuple[Trial, ...]
    best: Trial
    nested: Estimate
    gain: Estimate
    p_value: float

    @property
    def current(self) -> Trial:
        return self.trials[0]

    @property
    def is_change(self) -> bool:
        """Whether the best setting is better, with an interval that excludes 0 and p < 0.05."""
        return self.best != self.current and self.gain.low > 0 and self.p_value < 0.05

    @property
    def chosen(self) -> Setting:
        return (self.best if self.is_change else self.current).setting


def select(trials: Sequence[Trial], *, seed: int = 0) -> Selection:
    """Compare trials on the same items; the first one is the current setting and wins ties."""
    correct = np.array([trial.correct for trial in trials])
    held_out = _held_out(correct, seed)
    return Selection(
        tuple(trials),
        trials[int(correct.sum(1).argmax())],
        accuracy(held_out),
        paired_difference(held_out, trials[0].correct),
        mcnemar(held_out, trials[0].correct),
    )


def _held_out(correct: NDArray[np.bool_], seed: int) -> list[bool]:
    """Return for each item whether the best setting on the items of other folds is correct."""
    count = correct.shape[1]
    fold_of = np.random.default_rng(seed).permutation(count) % FOLDS
    found = np.zeros(count, bool)
    for fold in np.unique(fold_of):
        inside = fold_of == fold
        best = correct[:, ~inside].sum(1).argmax()
        found[inside] = correct[best, inside]
    return [bool(one) for one in found]
