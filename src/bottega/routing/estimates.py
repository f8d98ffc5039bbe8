"""Means of few scores, with intervals that are honest about how few."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import mul
from statistics import NormalDist


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float


def gain(differences: Sequence[float], confidence: float) -> Estimate:
    """The mean of paired differences in [-1, 1]. `low` and `high` are one-sided bounds, each at
    this confidence.

    Bonett and Price, Adjusted Wald intervals for a difference of binomial proportions based on
    paired data, Journal of Educational and Behavioral Statistics 37 (2012): the normal interval
    after one more sample was won and one more lost. The bounds exist without any sample, and three
    wins in a row are not certainty.
    """
    return _estimate(differences, (1.0, -1.0), confidence, lowest=-1.0)


def level(scores: Sequence[float], confidence: float = 0.975) -> Estimate:
    """The mean of scores in [0, 1], with two more of each end (Agresti and Coull, The American
    Statistician 52, 1998); the two bounds together hold at 95 %."""
    return _estimate(scores, (0.0, 0.0, 1.0, 1.0), confidence, lowest=0.0)


def _estimate(
    values: Sequence[float], more: tuple[float, ...], confidence: float, *, lowest: float
) -> Estimate:
    known = [*values, *more]
    n, middle = len(known), sum(known) / len(known)
    spread = max(0.0, sum(map(mul, known, known)) / n - middle**2)  # all within [-1, 1]
    reach = _deviations(confidence) * math.sqrt(spread / n)
    value = sum(values) / len(values) if values else middle
    low, high = max(lowest, min(middle - reach, value)), min(1.0, max(middle + reach, value))
    return Estimate(value, low, high)


@cache
def _deviations(confidence: float) -> float:
    return NormalDist().inv_cdf(confidence)
