"""Means of few scores, with intervals that are honest about how few."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import mul
from statistics import NormalDist
from typing import NamedTuple

from bottega.errors import SettingError
from bottega.routing.fixed import check_fraction
from bottega.types import Candidate


@dataclass(frozen=True)
class IntervalEstimate:
    value: float
    low: float
    high: float


def paired_gain(differences: Sequence[float], confidence: float) -> IntervalEstimate:
    """The mean of paired differences in [-1, 1]. `low` and `high` are one-sided bounds, each at
    this confidence.

    Bonett and Price, Adjusted Wald intervals for a difference of binomial proportions based on
    paired data, Journal of Educational and Behavioral Statistics 37 (2012): the normal interval
    after one more sample was won and one more lost. The bounds exist without any sample, and three
    wins in a row are not certainty.
    """
    return _estimate(differences, (1.0, -1.0), confidence, lowest=-1.0)


def mean_agreement(scores: Sequence[float], confidence: float = 0.975) -> IntervalEstimate:
    """The mean of scores in [0, 1], with two more of each end (Agresti and Coull, The American
    Statistician 52, 1998); the two bounds together hold at 95 %."""
    return _estimate(scores, (0.0, 0.0, 1.0, 1.0), confidence, lowest=0.0)


def _estimate(
    values: Sequence[float], more: tuple[float, ...], confidence: float, *, lowest: float
) -> IntervalEstimate:
    known = [*values, *more]
    n, middle = len(known), sum(known) / len(known)
    spread = max(0.0, sum(map(mul, known, known)) / n - middle**2)  # all within [-1, 1]
    reach = _deviations(confidence) * math.sqrt(spread / n)
    value = sum(values) / len(values) if values else middle
    low, high = max(lowest, min(middle - reach, value)), min(1.0, max(middle + reach, value))
    return IntervalEstimate(value, low, high)


@cache
def _deviations(confidence: float) -> float:
    return NormalDist().inv_cdf(confidence)


FORMAT = 1


class PairedSample(NamedTuple):
    """One query answered twice: how near its nearest demonstration was, and both scores."""

    similarity: float
    shown: float
    hidden: float


@dataclass(frozen=True)
class SimilarityBand:
    """The queries whose nearest demonstration has a score from `low` up to `high`, and what `n`
    samples say of them. The bounds of `paired_gain` are one-sided."""

    low: float
    high: float
    n: int
    with_score: float | None
    without_score: float | None
    gain: IntervalEstimate
    shown: bool


class BenefitGate:
    """Whether a query is shown its demonstrations: where paired samples say that this helps.

    A sample scores one query's answer with demonstrations and without, in [0, 1]. The last `window`
    samples count, in bands of equally many by the similarity of the nearest demonstration: one band
    at first, and up to `bands` once each has `least` samples. Demonstrations are shown in a band
    when the lower bound of the mean gain (`estimates.gain`, one-sided, at `confidence`) is above
    `worth`, and hidden when the upper bound, of all its samples or of the last `least`, is below.
    What neither helps nor hurts stays as it was, rather than flap. Before `least` samples
    demonstrations are hidden, or shown with `unmeasured="shown"`. Whoever takes samples must go on
    in either state.

    The bounds are looked at after every sample, so over a long time each will be wrong somewhat
    more often than its confidence says; see the simulations in tests/routing/test_benefit.py.
    """

    def __init__(
        self,
        *,
        bands: int = 3,
        least: int = 20,
        window: int = 240,
        confidence: float = 0.98,
        worth: float = 0.0,
        unmeasured: str = "hidden",
    ) -> None:
        if not (bands >= 1 and least >= 1 and window >= bands * least):
            raise SettingError(
                f"{bands} bands of {least} samples do not fit into a window of {window}",
                hint="make the window larger, or take fewer bands",
            )
        if unmeasured not in ("hidden", "shown"):
            raise SettingError(f"unmeasured is {unmeasured!r}", hint='use "hidden" or "shown"')
        if not 0.5 < confidence < 1:
            raise SettingError(
                f"confidence is {confidence}", hint="set it above 0.5 and below 1, such as 0.98"
            )
        self._bands, self._least, self._worth = bands, least, worth
        self._confidence = confidence
        self._samples: deque[PairedSample] = deque(maxlen=window)
        self._edges: list[float] = []
        self._open = [unmeasured == "shown"]

    @property
    def is_measured(self) -> bool:
        """Whether samples decide: a band is only split off once it has `least` of them."""
        return len(self._samples) >= self._least

    def shows(self, candidates: Sequence[Candidate], /) -> bool:
        return bool(candidates) and self._open[self._band(nearest(candidates))]

    def learn(
        self, candidates: Sequence[Candidate], with_score: float, without_score: float
    ) -> None:
        """Nothing is learnt of a query that nothing could be shown with."""
        if not candidates:
            return
        self._samples.append(
            PairedSample(
                nearest(candidates),
                check_fraction("with_score", with_score),
                check_fraction("without_score", without_score),
            )
        )
        self._divide()
        for place, samples in enumerate(self._by_band()):
            if len(samples) >= self._least:
                self._decide(place, samples)

    def summary(self) -> list[SimilarityBand]:
        """The bands from the farthest demonstrations to the nearest."""
        lows, highs = [-math.inf, *self._edges], [*self._edges, math.inf]
        return [
            SimilarityBand(
                low,
                high,
                len(samples),
                _mean([sample.shown for sample in samples]),
                _mean([sample.hidden for sample in samples]),
                self._gain(samples),
                shown,
            )
            for low, high, samples, shown in zip(
                lows, highs, self._by_band(), self._open, strict=True
            )
        ]

    def state(self) -> dict[str, object]:
        """What JSON can hold and `restore` needs to go on as if nothing had happened."""
        samples = [list(sample) for sample in self._samples]
        return {
            "format": FORMAT,
            "samples": samples,
            "edges": list(self._edges),
            "open": list(self._open),
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Raises `SettingError`, and changes nothing, for what no `state()` has given."""
        samples, edges, shown = _checked(state)
        if len(shown) > self._bands:
            raise SettingError(
                f"the state has {len(shown)} bands and the gate {self._bands}",
                hint="give the gate as many bands as before, or begin without the state",
            )
        self._samples.clear()
        self._samples.extend(samples)
        self._edges, self._open = edges, shown

    def _band(self, similarity: float) -> int:
        return bisect_right(self._edges, similarity)

    def _by_band(self) -> list[list[PairedSample]]:
        found: list[list[PairedSample]] = [[] for _ in self._open]
        for sample in self._samples:
            found[bisect_right(self._edges, sample.similarity)].append(sample)
        return found

    def _divide(self) -> None:
        """A band that is split hands its state on: what was known of all is known of each."""
        seen = sorted(sample.similarity for sample in self._samples)
        before, now = len(self._open), max(1, min(self._bands, len(seen) // self._least))
        now = max(before, now)
        self._edges = [seen[place * len(seen) // now] for place in range(1, now)]
        self._open = [self._open[(2 * place + 1) * before // (2 * now)] for place in range(now)]

    def _gain(self, samples: Sequence[PairedSample]) -> IntervalEstimate:
        return paired_gain([sample.shown - sample.hidden for sample in samples], self._confidence)

    def _decide(self, place: int, samples: Sequence[PairedSample]) -> None:
        """The latest samples alone may hide: old gains must not outvote a change for the worse."""
        latest = self._gain(samples[-self._least :])
        measured = self._gain(samples)
        if min(measured.high, latest.high) < self._worth:
            self._open[place] = False
        elif measured.low > self._worth < latest.value:
            self._open[place] = True


def nearest(candidates: Sequence[Candidate]) -> float:
    """In whatever order they stand."""
    return max(candidate.score for candidate in candidates)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _checked(state: Mapping[str, object]) -> tuple[list[PairedSample], list[float], list[bool]]:
    samples, edges, shown = state.get("samples"), state.get("edges"), state.get("open")
    if (
        state.get("format") == FORMAT
        and isinstance(samples, list)
        and isinstance(edges, list)
        and isinstance(shown, list)
        and all(isinstance(row, list) and _numbers(row) and len(row) == 3 for row in samples)
        and _numbers(edges)
        and edges == sorted(edges)
        and all(isinstance(one, bool) for one in shown)
        and len(shown) == len(edges) + 1
    ):
        return (
            [PairedSample(*map(float, row)) for row in samples],
            [*map(float, edges)],
            list(shown),
        )
    raise SettingError(
        "this is not the state of a benefit gate",
        hint="begin without it; the gate measures anew",
    )


def _numbers(values: list[object]) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)
