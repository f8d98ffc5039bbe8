"""Metrics of answers, and estimates with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bottega.errors import SettingError
from bottega.knowledge.fitted_vote import THRESHOLDS
from bottega.types import Answer, Example

RESAMPLES = 2000
PERMUTATIONS = 10_000
CELLS = 20_000_000
Z = NormalDist().inv_cdf(0.975)
BINS = 10


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


@dataclass(frozen=True)
class Judgement:
    """Item, its answer and the answer's score in [0, 1] (`Metric.score`)."""

    item: Example
    answer: Answer
    score: float


class Metric(Protocol):
    """Published metric; `name` identifies the variant.

    A metric holds further references (ten annotators' answers, ranges) by the item's query id. An
    invalid answer scores 0 unless the published metric differs.
    """

    @property
    def name(self) -> str: ...

    def score(self, item: Example, answer: Answer, /) -> float: ...

    def estimate(self, judged: Sequence[Judgement], /, *, seed: int) -> Estimate | None:
        """Return the value over at least one item with its 95 % interval, None for `NotScored`."""
        ...


class MeanScore:
    """Base of metrics whose value is the mean score."""

    def estimate(self, judged: Sequence[Judgement], /, *, seed: int) -> Estimate:
        return mean([one.score for one in judged], seed=seed)


class Accuracy(MeanScore):
    """Accuracy: the labels are exactly those of the item."""

    name = "accuracy"

    def score(self, item: Example, answer: Answer, /) -> float:
        return float(answer.valid and set(answer.labels) == set(labels_of(item)))


class NotScored:
    """Metric of items whose answers are not published: results have no value."""

    name = "not_scored"

    def score(self, item: Example, answer: Answer, /) -> float:
        return 0.0

    def estimate(self, judged: Sequence[Judgement], /, *, seed: int) -> None:
        return None


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
    return with_interval(value, _macro_f1(gold, chosen, resampled(len(truth), seed)))


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


@dataclass(frozen=True)
class Bin:
    """Answers with a confidence above `low` and at most `high` (0 belongs to the first bin)."""

    low: float
    high: float
    n: int
    confidence: float
    score: float


@dataclass(frozen=True)
class Calibration:
    """Expected calibration error of `n` answers; `without` answers without a confidence are
    excluded. `bins` lists the non-empty ones."""

    name: str
    error: Estimate
    n: int
    without: int
    bins: tuple[Bin, ...]


def calibration(judged: Sequence[Judgement], *, seed: int, bins: int = BINS) -> Calibration | None:
    """Return the expected calibration error; None if no answer has a confidence.

    The error is the mean distance of confidence and score in bins of equal width, weighted by the
    number of answers (Naeini et al., 2015; Guo et al., 2017). The percentile bootstrap gives the
    interval; resampling adds noise to every bin and shifts it upwards, so its lower end is capped
    at the value.
    """
    pairs = [(c, one.score) for one in judged if (c := one.answer.confidence) is not None]
    if not pairs:
        return None
    confidence, score = np.array(pairs).T
    index = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    inside = np.eye(bins)[index]
    gaps = inside * (confidence - score)[:, None]
    n = len(pairs)
    value = float(np.abs(gaps.sum(axis=0)).sum() / n)
    low, high = np.percentile(np.abs(resampled(n, seed) @ gaps).sum(axis=1) / n, [2.5, 97.5])
    found = tuple(
        Bin(b / bins, (b + 1) / bins, int(here.sum()), confidence[here].mean(), score[here].mean())
        for b in range(bins)
        if (here := index == b).any()
    )
    error = Estimate(value, min(float(low), value), max(float(high), value))
    return Calibration(f"ece_{bins}_equal_width_bins", error, n, len(judged) - n, found)


@dataclass(frozen=True)
class CostQuality:
    """Quality at a share of the strong model's cost (or calls), from 0 to 1."""

    share: float
    quality: float


def gap_recovered(quality: float, *, weak: float, strong: float) -> float:
    """Return the recovered share of the gap between the weak and the strong model.

    Raises `SettingError` without a gap.
    """
    if not strong > weak:
        raise SettingError(
            f"the strong model's quality must be above the weak one's {weak}, got {strong}",
            hint="compare other models or another metric",
        )
    return (quality - weak) / (strong - weak)


def average_gap_recovered(curve: Sequence[CostQuality], *, weak: float, strong: float) -> float:
    """Return the APGR (RouteLLM; Cache-of-Thought): the mean recovered gap over all shares of cost.

    It is the area below straight lines between the points; a random router has 0.5. Missing points
    at 0 and 1 are the weak and the strong model.
    """
    shares, qualities = _whole(curve, weak, strong)
    recovered = [gap_recovered(quality, weak=weak, strong=strong) for quality in qualities]
    steps = pairwise(zip(shares, recovered, strict=True))
    return sum((right - left) * (low + high) / 2 for (left, low), (right, high) in steps)


def _whole(
    curve: Sequence[CostQuality], weak: float, strong: float
) -> tuple[list[float], list[float]]:
    """Return shares in increasing order, from 0 to 1, with their qualities."""
    if any(not 0 <= point.share <= 1 for point in curve):
        raise SettingError(
            "shares of cost must be between 0 and 1",
            hint="divide by the cost of the strong model",
        )
    points = sorted(curve, key=lambda point: point.share)
    if not points or points[0].share > 0:
        points.insert(0, CostQuality(0.0, weak))
    if points[-1].share < 1:
        points.append(CostQuality(1.0, strong))
    return [point.share for point in points], [point.quality for point in points]


def labels_of(example: Example) -> tuple[str, ...]:
    """Return the example's labels; without explicit labels, its answer."""
    return (example.answer,) if example.labels is None else example.labels


@dataclass(frozen=True)
class ConfidentScore:
    """Mean score, with its interval, of the `n` answers with at least this `confidence`. `share` is
    `n` divided by the number of all answers."""

    confidence: float
    n: int
    share: float
    value: float
    low: float
    high: float


def by_confidence(judged: Sequence[Judgement], *, seed: int) -> tuple[ConfidentScore, ...]:
    """Return the score of the answers with at least each confidence of `THRESHOLDS` that any answer
    reaches."""
    found = []
    for least in THRESHOLDS:
        scores = [
            one.score
            for one in judged
            if one.answer.confidence is not None and one.answer.confidence >= least
        ]
        if scores:
            score = mean(scores, seed=seed)
            share = len(scores) / len(judged)
            found.append(
                ConfidentScore(least, len(scores), share, score.value, score.low, score.high)
            )
    return tuple(found)
