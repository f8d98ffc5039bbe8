"""Whether stated confidences hold: of the answers that are 70 % sure, are 70 % right?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bottega.evaluation.metrics.intervals import Estimate, resampled
from bottega.evaluation.metrics.metric import Judged

BINS = 10


@dataclass(frozen=True)
class Bin:
    """Answers whose confidence is above `low` and at most `high` (0 lies in the first bin)."""

    low: float
    high: float
    n: int
    confidence: float
    score: float


@dataclass(frozen=True)
class Calibration:
    """The expected calibration error of `n` answers; `without` had no confidence and are in no
    figure. `bins` are those that hold an answer."""

    name: str
    error: Estimate
    n: int
    without: int
    bins: tuple[Bin, ...]


def calibration(judged: Sequence[Judged], *, seed: int, bins: int = BINS) -> Calibration | None:
    """None if no answer has a confidence.

    The error is the mean distance of confidence and score in bins of equal width, weighted by
    their answers (Naeini et al., 2015; Guo et al., 2017). Its interval is the percentile
    bootstrap's: resampling adds noise to every bin, so it leans upwards; its lower end is never
    above the value.
    """
    known = [(c, one.score) for one in judged if (c := one.answer.confidence) is not None]
    if not known:
        return None
    confidence, score = np.array(known).T
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    inside = np.eye(bins)[place]
    gaps = inside * (confidence - score)[:, None]
    n = len(known)
    value = float(np.abs(gaps.sum(axis=0)).sum() / n)
    low, high = np.percentile(np.abs(resampled(n, seed) @ gaps).sum(axis=1) / n, [2.5, 97.5])
    found = tuple(
        Bin(b / bins, (b + 1) / bins, int(here.sum()), confidence[here].mean(), score[here].mean())
        for b in range(bins)
        if (here := place == b).any()
    )
    error = Estimate(value, min(float(low), value), max(float(high), value))
    return Calibration(f"ece_{bins}_equal_width_bins", error, n, len(judged) - n, found)
