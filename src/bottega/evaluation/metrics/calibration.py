"""Calibration of stated confidences, and quality at a cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bottega.errors import SettingError
from bottega.evaluation.metrics.intervals import Estimate, resampled
from bottega.evaluation.metrics.metric import Judgement

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


def calibration(judged: Sequence[Judgement], *, seed: int, bins: int = BINS) -> Calibration | None:
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


@dataclass(frozen=True)
class CostQuality:
    """`share` of the strong model's cost (or of its calls), from 0 to 1, and what it gave."""

    share: float
    quality: float


def gap_recovered(quality: float, *, weak: float, strong: float) -> float:
    """0 is the weak model's quality, 1 the strong one's. Raises `SettingError` without a gap."""
    if not strong > weak:
        raise SettingError(
            f"the strong model's {strong} is not above the weak one's {weak}",
            hint="there is no gap to recover: compare other models or another metric",
        )
    return (quality - weak) / (strong - weak)


def average_gap_recovered(curve: Sequence[CostQuality], *, weak: float, strong: float) -> float:
    """APGR (RouteLLM; Cache-of-Thought): the mean of the recovered gap over all shares of cost,
    the area below straight lines between the points. A coin that chooses the model has 0.5.

    The curve begins at the weak model and ends at the strong one where it has no points of its own
    at 0 and 1.
    """
    shares, qualities = _whole(curve, weak, strong)
    recovered = [gap_recovered(quality, weak=weak, strong=strong) for quality in qualities]
    steps = pairwise(zip(shares, recovered, strict=True))
    return sum((right - left) * (low + high) / 2 for (left, low), (right, high) in steps)


def share_needed(
    curve: Sequence[CostQuality], recovered: float, *, weak: float, strong: float
) -> float | None:
    """The least share of cost that recovers so much of the gap (RouteLLM's call-performance
    threshold), None if the curve never does."""
    shares, qualities = _whole(curve, weak, strong)
    gaps = [gap_recovered(quality, weak=weak, strong=strong) for quality in qualities]
    if gaps[0] >= recovered:
        return shares[0]
    for i in range(1, len(gaps)):
        if gaps[i] >= recovered:
            part = (recovered - gaps[i - 1]) / (gaps[i] - gaps[i - 1])
            return shares[i - 1] + part * (shares[i] - shares[i - 1])
    return None


def _whole(
    curve: Sequence[CostQuality], weak: float, strong: float
) -> tuple[list[float], list[float]]:
    """Shares in rising order, from 0 to 1, with their qualities."""
    if any(not 0 <= point.share <= 1 for point in curve):
        raise SettingError(
            "a share of cost lies outside of 0 to 1", hint="divide by what the strong model costs"
        )
    points = sorted(curve, key=lambda point: point.share)
    if not points or points[0].share > 0:
        points.insert(0, CostQuality(0.0, weak))
    if points[-1].share < 1:
        points.append(CostQuality(1.0, strong))
    return [point.share for point in points], [point.quality for point in points]
