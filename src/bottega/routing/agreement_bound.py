"""Threshold above which an apprentice's answers are served, tested while it is in force."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bottega.errors import SettingError, check_fraction
from bottega.routing.change_tests import ErrorRateTest, MixTest

BINS = 40  # equal parts of the score, which is in [0, 1]
WINDOW = 500  # replies whose expected differences the limiter bounds
INTERVAL = 10  # samples between two evaluations of thresholds, rates and bets

# Defaults of the sampling rates: see docs/decisions/0036-agreement-bound.md.
LEAST_RATE = 0.02
MEAN_RATE = 0.026
FIRST_SAMPLES = 250  # spread over the first requests: the mean rate is at least this / requests
SUSPICIOUS_RATE = 0.2
FIRST_REQUESTS = 50  # before a threshold is certified
LEAST_SHARE = 0.1  # of the requests, above the first threshold of the scope "apprentice"

BETS = np.array([[0.5], [1.0]])  # the wealth is the mean of two bettors, one more careful
# The least number of comparisons near a bin, and its highest rate of differences, to serve it.
LEAST_COMPARISONS, HIGHEST_RATE = 20.0, 0.4
PRIOR_COMPARISONS = 4.0
MARGIN = 0.5  # standard errors that the limiter adds to a rate
MEMORY = 40  # comparisons of served answers that correct the limiter
_POSITIONS = np.arange(BINS)
_KERNEL = np.exp(-0.5 * ((_POSITIONS[:, None] - _POSITIONS) / (BINS / 20)) ** 2)

BoundScope = Literal["all", "apprentice"]
BoundMode = Literal["standard", "careful"]


class Draw(NamedTuple):
    """Decision on one request, made before the compared call: whether the apprentice's answer is
    `served`, and the `rate` at which both answers are compared, 1 where the master answers.
    `chance` is uniform in [0, 1): the answers are compared if it is below `rate`. `expected` is the
    expected difference of the reply from the master's. `epoch` counts the alarms before it."""

    bin: int
    served: bool
    rate: float
    chance: float
    expected: float
    epoch: int

    @property
    def compared(self) -> bool:
        return self.chance < self.rate


@dataclass(frozen=True)
class _Rates:
    """Constants of a mode. Careful mode aims at a smaller risk, alarms earlier and lets each
    certificate expire after one to two `generation`s of requests."""

    risk: float  # of the target's
    alarm: float
    generation: int | None = None


MODES = {"standard": _Rates(1.0, 1e5), "careful": _Rates(0.8, 3e4, 2500)}


class AgreementBound:
    """Threshold of a score, with a bound on the differences from the master's answers.

    `min_agreement` is the target: with probability `confidence`, no threshold is ever in force
    above which the expected share of replies that differ from the master's exceeds
    1 - `min_agreement`, while requests stay exchangeable (same questions, same models). With the
    `scope` "all" the share is of all replies, and the master's own agree by definition; with
    "apprentice" it is of the served answers of the apprentice.

    The test is a betting test (Waudby-Smith and Ramdas, Estimating means of bounded random
    variables by betting, JRSS-B 2024) of each threshold, from the highest down (fixed sequence), on
    samples weighted by 1 / `Draw.rate`. It is valid at every moment, whatever the score, the rates,
    the limiter and the floor. An alarm of a change drops all evidence: the master answers until a
    threshold is certified again.

    Call `draw` for each request, and `add` for each draw, in the order of the draws. The state
    depends on nothing else, so processes that add the same draws are in the same state.
    """

    def __init__(
        self,
        min_agreement: float = 0.95,
        confidence: float = 0.95,
        *,
        scope: BoundScope = "all",
        mode: BoundMode = "standard",
        mean_rate: float = MEAN_RATE,
    ) -> None:
        if not 0.5 <= min_agreement < 1:
            raise SettingError(
                f"min_agreement must be at least 0.5 and below 1, got {min_agreement:g}",
                hint="set min_agreement = 0.95; 1 needs no bound: let the master answer",
            )
        if not 0.5 <= confidence < 1:
            raise SettingError(
                f"confidence must be at least 0.5 and below 1, got {confidence:g}",
                hint="set confidence = 0.95",
            )
        self._mode = MODES[mode]
        self.risk = (1 - min_agreement) * self._mode.risk
        generations = 1 if self._mode.generation is None else 2  # certificates in force at once
        self._needed = math.log(generations / (1 - confidence))
        self._is_joint = scope == "all"
        self._mean_rate = check_fraction("mean_rate", mean_rate)
        self.alarms: list[str] = []
        self._recent: deque[float] = deque()
        self._expected = 0.0
        self._begin()

    def _begin(self) -> None:
        """Begin without evidence: the master answers, every answer is compared."""
        self.requests = 0  # since the last alarm
        self._counts, self._compared, self._different = (np.zeros(BINS) for _ in range(3))
        self._wealth = np.zeros((2, BINS))  # logarithms, by bettor and threshold
        self._unbet = np.zeros(BINS)  # requests by bin since the last evaluation
        self._best = self._earlier = np.full(BINS, -math.inf)
        self._bet = np.zeros((2, BINS))
        self.threshold = BINS  # lowest served bin; BINS: none is certified
        self._rate, self._smooth, self._cost = [1.0] * BINS, [0.2] * BINS, [1.0] * BINS
        self._is_served = [False] * BINS
        self._first: int | None = None  # the bin whose threshold is tested first
        self._observed = self._predicted = 0.0
        self._change, self._mix = ErrorRateTest(self._mode.alarm), MixTest(BINS)
        self._smallest = 1.0

    @property
    def epoch(self) -> int:
        return len(self.alarms)

    @property
    def certified(self) -> float | None:
        """The lowest certified score, None before there is one."""
        return self.threshold / BINS if self.threshold < BINS else None

    def draw(self, score: float, chance: float) -> Draw:
        """Return the decision on a request with this score in [0, 1], the higher the better, and a
        uniform random number."""
        bin = min(int(score * BINS), BINS - 1)
        expected = self._cost[bin] * self._correction()
        served = bin >= self.threshold and self._is_served[bin]
        if served and self._is_joint:
            before = self._expected - (self._recent[0] if len(self._recent) >= WINDOW else 0.0)
            served = before + expected <= self.risk * WINDOW
        rate = self._rate[bin] if served else 1.0
        draw = Draw(bin, served, rate, chance, expected if served else 0.0, self.epoch)
        self.note(draw)
        return draw

    def note(self, draw: Draw) -> None:
        """Count a draw of another process in the limiter; `draw` counts its own."""
        self._recent.append(draw.expected)
        self._expected += draw.expected
        if len(self._recent) > WINDOW:
            self._expected -= self._recent.popleft()

    def add(self, draw: Draw, different: bool | None) -> None:
        """Add the outcome of the next draw: whether the answers differ, None if the draw was not
        `compared`. A comparison that failed or stayed undecided counts as different."""
        if draw.epoch != self.epoch:
            return
        if draw.compared == (different is None):
            found = "no outcome of a compared" if draw.compared else "an outcome of another"
            raise SettingError(
                f"different must be given for compared draws, got {found} draw",
                hint="pass None unless the draw is compared",
            )
        self.requests += 1
        bin = draw.bin
        alarm = "mix" if self._mix.add(bin, draw.chance) else None
        if draw.rate >= self._smallest:  # else another process drew it with an older state
            self._unbet[bin] += 1
            if different:
                self._lose(bin, draw.rate)
        if different is not None and self._compare(draw, different):
            alarm = "differences"
        if alarm:
            self.alarms.append(alarm)
            self._begin()
            return
        self._counts[bin] += 1
        if different is not None:
            self._compared[bin] += 1
            self._different[bin] += different
        if self.requests % INTERVAL == 0:
            self._evaluate()

    def _lose(self, bin: int, rate: float) -> None:
        """Bet on a difference: all thresholds up to its bin lose."""
        bets = self._bet[:, : bin + 1]
        self._wealth[:, : bin + 1] += np.log1p(bets * (self.risk - 1 / rate)) - np.log1p(
            bets * self.risk
        )

    def _compare(self, draw: Draw, different: bool) -> bool:
        """Update the correction of the limiter and the test of a change; return its alarm."""
        rate, compared = self._smooth[draw.bin], float(self._compared.sum())
        alarm = False
        if compared >= self._change.warm_up:
            alarm = self._change.add(different, rate, draw.bin >= self.threshold)
        if draw.bin >= self.threshold and compared >= 100:
            self._observed += different - self._observed / MEMORY
            self._predicted += rate - self._predicted / MEMORY
        return alarm

    def _correction(self) -> float:
        return max(1.0, (self._observed + 3) / (self._predicted + 3))

    def _evaluate(self) -> None:
        """Update the wealth, the threshold, and what depends on them."""
        counts = self._unbet
        requests = counts.sum() if self._is_joint else _from_top(counts)
        self._wealth += requests * np.log1p(self._bet * self.risk)
        self._unbet = np.zeros(BINS)
        wealth = np.logaddexp(*self._wealth) - math.log(2)
        self._best = np.maximum(self._best, wealth)
        generation = self._mode.generation
        if generation is not None and self.requests % generation == 0:
            self._earlier, self._best = self._best, np.full(BINS, -math.inf)
            self._wealth = np.zeros((2, BINS))
            for past in (self._counts, self._compared, self._different):
                past *= 0.5
        if self._first is None and self.requests >= FIRST_REQUESTS:
            self._first = self._first_tested()
        if self._first is not None:
            certified = np.maximum(self._best, self._earlier) >= self._needed
            unbroken = np.logical_and.accumulate(certified[self._first :: -1]).sum()
            self.threshold = self._first + 1 - int(unbroken) if unbroken else BINS
        self._set_rates()

    def _first_tested(self) -> int:
        """Return the highest threshold to test. Among the apprentice's answers alone, one with few
        requests above it would never be certified, and none below it."""
        if self._is_joint:
            return BINS - 1
        above = _from_top(self._counts) / self._counts.sum()
        return int(np.flatnonzero(above >= LEAST_SHARE)[-1])

    def _set_rates(self) -> None:
        near = self._compared @ _KERNEL
        overall = (self._different.sum() + 1) / (self._compared.sum() + 2)
        smooth = (self._different @ _KERNEL + PRIOR_COMPARISONS * overall) / (
            near + PRIOR_COMPARISONS
        )
        smooth = np.clip(smooth, 0.002, 0.998)
        variance = smooth * (1 - smooth)
        self._is_served = ((near >= LEAST_COMPARISONS) & (smooth <= HIGHEST_RATE)).tolist()
        self._smooth = smooth.tolist()
        error = np.sqrt(variance / (near + PRIOR_COMPARISONS))
        self._cost = (smooth + MARGIN * error).tolist()
        share = (self._counts + 0.5) / (self._counts + 0.5).sum()
        above = self.threshold <= _POSITIONS
        weight = np.sqrt(variance + 0.003)
        mean = max(self._mean_rate, FIRST_SAMPLES / (self.requests + 1))
        if self._change.is_suspicious:
            mean = max(mean, SUSPICIOUS_RATE)
        scale = mean / max(float((share * weight * above).sum()), 1e-9)
        rates = np.clip(scale * weight, LEAST_RATE, 1.0)
        self._rate = rates.tolist()
        self._set_bets(share, smooth, np.where(above, rates, 1.0))

    def _set_bets(
        self, share: NDArray[np.float64], smooth: NDArray[np.float64], rates: NDArray[np.float64]
    ) -> None:
        """Set the bets that maximize the expected growth at the predicted rates of differences
        (Kelly, second order)."""
        self._smallest = min(float(rates.min()), self._smallest)  # also of draws not added yet
        mean, square = _from_top(share * smooth), _from_top(share * smooth / rates)
        if not self._is_joint:
            mass = _from_top(share)
            mean, square = mean / mass, square / mass
        kelly = (self.risk - mean) / (square - 2 * self.risk * mean + self.risk**2)
        most = 0.9 / (1 / self._smallest - self.risk)
        self._bet = BETS * np.clip(kelly, 0.0, most)


def _from_top(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums over each bin and those above it."""
    return np.cumsum(values[::-1])[::-1]


def comparisons_needed(
    true_risk: float, risk: float, confidence: float
) -> tuple[float, float] | None:
    """Return about how many comparisons certify the whole score range, in half and in 90 % of
    cases, if the true share of differences is `true_risk`; None if it is not below `risk`."""
    if true_risk >= risk:
        return None
    terms = [(true_risk, risk), (1 - true_risk, 1 - risk)]
    divergence = sum(p * math.log(p / q) for p, q in terms if p)
    needed = math.log(1 / (1 - confidence)) / divergence
    return 1.5 * needed, 3.2 * needed
