"""Gate of demonstrations by measured benefit, and the shadow samples that measure it."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import mul
from statistics import NormalDist
from typing import NamedTuple, TypeGuard

from bottega.errors import GenerationError, SettingError, check_count, check_fraction
from bottega.types import Candidate, Query

FORMAT = 1
log = logging.getLogger(__name__)
AnswerCall = Callable[[], Awaitable[str]]
# Agreement of two replies to the query, in [0, 1]; None if it is undecided.
CompareAnswers = Callable[[str, str, Query], float | None]
# Agreement of two replies that the function leaves undecided; None if it stays so.
Judge = Callable[[str, str], Awaitable[float | None]]
# Limit of eager samples: undecided pairs never give the gate enough samples.
MAX_EAGER = 100


@dataclass(frozen=True)
class IntervalEstimate:
    """Estimate with its lower and upper bound."""

    value: float
    low: float
    high: float


def paired_gain(differences: Sequence[float], confidence: float) -> IntervalEstimate:
    """Return the mean of paired differences in [-1, 1]. `low` and `high` are one-sided bounds, each
    at this confidence.

    Bonett and Price, Adjusted Wald intervals for a difference of binomial proportions based on
    paired data, Journal of Educational and Behavioral Statistics 37 (2012): the normal interval
    after adding one win and one loss. The bounds exist without samples, and three wins in a row
    give no certainty.
    """
    return _estimate(differences, (1.0, -1.0), confidence, lowest=-1.0)


def mean_agreement(scores: Sequence[float]) -> IntervalEstimate:
    """Return the mean of scores in [0, 1] with its 95 % interval, two samples added at each end
    (Agresti and Coull, The American Statistician 52, 1998)."""
    return _estimate(scores, (0.0, 0.0, 1.0, 1.0), 0.975, lowest=0.0)


@dataclass(frozen=True)
class AgreementRange:
    """Share of `n` answers that agree with the master's: `least` if all `undecided` ones differ,
    `most` if all of them agree. `low` is the lower bound of the 95 % interval of `least`, `high`
    the upper bound of that of `most`."""

    least: float
    most: float
    low: float
    high: float
    n: int
    undecided: int


def agreement_range(scores: Sequence[float | None]) -> AgreementRange:
    """Return the agreement of scores in [0, 1]; None is undecided. Without scores it is unknown,
    from 0 to 1."""
    least = mean_agreement([0.0 if score is None else score for score in scores])
    most = mean_agreement([1.0 if score is None else score for score in scores])
    values = (least.value, most.value) if scores else (0.0, 1.0)
    return AgreementRange(*values, least.low, most.high, len(scores), scores.count(None))


def _estimate(
    values: Sequence[float], more: tuple[float, ...], confidence: float, *, lowest: float
) -> IntervalEstimate:
    padded = [*values, *more]
    n, mean = len(padded), sum(padded) / len(padded)
    spread = max(0.0, sum(map(mul, padded, padded)) / n - mean**2)  # all within [-1, 1]
    margin = _deviations(confidence) * math.sqrt(spread / n)
    value = sum(values) / len(values) if values else mean
    low, high = max(lowest, min(mean - margin, value)), min(1.0, max(mean + margin, value))
    return IntervalEstimate(value, low, high)


@cache
def _deviations(confidence: float) -> float:
    return NormalDist().inv_cdf(confidence)


class PairedSample(NamedTuple):
    """Scores of one query with and without demonstrations, and the similarity of the nearest."""

    similarity: float
    shown: float
    hidden: float


@dataclass(frozen=True)
class SimilarityBand:
    """Statistics of `n` samples whose nearest demonstration scores from `low` up to `high`. The
    bounds of `gain` are one-sided."""

    low: float
    high: float
    n: int
    with_score: float | None
    without_score: float | None
    gain: IntervalEstimate
    shown: bool


class BenefitGate:
    """Gate that shows demonstrations only to queries for which paired samples prove a gain.

    A sample scores one query's answers with and without demonstrations, in [0, 1]. The gate keeps
    the last `window` samples in bands of equal size by the similarity of the nearest demonstration:
    one band at first, up to `bands` once each has `min_samples` samples. A band shows
    demonstrations if the lower bound of the mean gain (`paired_gain` at `confidence`) is above
    `min_gain`. It hides them if the upper bound is below `min_gain`, for all its samples or for the
    last `min_samples`. In between, the state does not change, which prevents flapping. Before
    `min_samples` samples, demonstrations are hidden, or shown with `unmeasured="shown"`. The caller
    must keep sampling in both states.

    The bounds are evaluated after every sample, so in the long run each is wrong slightly more
    often than its confidence; see the simulations in tests/routing/test_benefit.py.
    """

    def __init__(
        self,
        *,
        bands: int = 3,
        min_samples: int = 20,
        window: int = 240,
        confidence: float = 0.98,
        min_gain: float = 0.0,
        unmeasured: str = "hidden",
    ) -> None:
        if not (bands >= 1 and min_samples >= 1 and window >= bands * min_samples):
            raise SettingError(
                f"window must hold {bands} bands of {min_samples} samples, got {window}",
                hint="raise window, or lower bands",
            )
        if unmeasured not in ("hidden", "shown"):
            raise SettingError(
                f'unmeasured must be "hidden" or "shown", got {unmeasured!r}',
                hint='set unmeasured="hidden"',
            )
        if not 0.5 < confidence < 1:
            raise SettingError(
                f"confidence must be above 0.5 and below 1, got {confidence}",
                hint="set confidence=0.98",
            )
        self._bands, self._min_samples, self._min_gain = bands, min_samples, min_gain
        self._confidence = confidence
        self._samples: deque[PairedSample] = deque(maxlen=window)
        self._edges: list[float] = []
        self._open = [unmeasured == "shown"]

    @property
    def is_measured(self) -> bool:
        """Whether there are enough samples to decide."""
        return len(self._samples) >= self._min_samples

    def shows(self, candidates: Sequence[Candidate], /) -> bool:
        """Whether to show these demonstrations."""
        return bool(candidates) and self._open[bisect_right(self._edges, nearest(candidates))]

    def learn(
        self, candidates: Sequence[Candidate], with_score: float, without_score: float
    ) -> None:
        """Add a sample. A query without candidates is ignored."""
        if not candidates:
            return
        check_fraction("with_score", with_score)
        check_fraction("without_score", without_score)
        self.add(PairedSample(nearest(candidates), with_score, without_score))

    def add(self, sample: PairedSample) -> None:
        self._samples.append(sample)
        self._divide()
        for index, samples in enumerate(self._by_band()):
            if len(samples) >= self._min_samples:
                self._decide(index, samples)

    def summary(self) -> list[SimilarityBand]:
        """Return the bands from the farthest demonstrations to the nearest."""
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
        """Return the state for `restore`, as JSON values."""
        return {
            "format": FORMAT,
            "samples": [list(sample) for sample in self._samples],
            "edges": list(self._edges),
            "open": list(self._open),
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Load a state. Raises `SettingError` and changes nothing if it is not one of `state()`."""
        samples, edges, shown = _checked(state)
        if len(shown) > self._bands:
            raise SettingError(
                f"the state must have at most {self._bands} bands, got {len(shown)}",
                hint=f"set bands={len(shown)}, or start without the state",
            )
        self._samples.clear()
        self._samples.extend(samples)
        self._edges, self._open = edges, shown

    def _by_band(self) -> list[list[PairedSample]]:
        found: list[list[PairedSample]] = [[] for _ in self._open]
        for sample in self._samples:
            found[bisect_right(self._edges, sample.similarity)].append(sample)
        return found

    def _divide(self) -> None:
        """Update the band edges. The parts of a split band inherit its state."""
        seen = sorted(sample.similarity for sample in self._samples)
        before, now = len(self._open), max(1, min(self._bands, len(seen) // self._min_samples))
        now = max(before, now)
        self._edges = [seen[index * len(seen) // now] for index in range(1, now)]
        self._open = [self._open[(2 * index + 1) * before // (2 * now)] for index in range(now)]

    def _gain(self, samples: Sequence[PairedSample]) -> IntervalEstimate:
        return paired_gain([sample.shown - sample.hidden for sample in samples], self._confidence)

    def _decide(self, index: int, samples: Sequence[PairedSample]) -> None:
        """Update the state of a band. The latest samples alone may hide demonstrations, because old
        gains must not outvote a recent decline."""
        latest = self._gain(samples[-self._min_samples :])
        measured = self._gain(samples)
        if min(measured.high, latest.high) < self._min_gain:
            self._open[index] = False
        elif measured.low > self._min_gain < latest.value:
            self._open[index] = True


def nearest(candidates: Sequence[Candidate]) -> float:
    """Return the highest score, in any order of the candidates."""
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
        "the state is not that of a benefit gate",
        hint="start without the state; the gate then measures again",
    )


def _numbers(values: list[object]) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)


class AgreementPair(NamedTuple):
    """Agreement of the apprentice with the master with demonstrations and without, None if it is
    undecided, and whether the answer that the client got had demonstrations. Without `found` there
    were none to compare with; a pair is `judged` if a judge was asked."""

    shown: float | None
    hidden: float | None
    was_shown: bool
    found: bool = True
    judged: bool = False

    @property
    def served(self) -> float | None:
        """The agreement of the answer that the client got."""
        return self.shown if self.was_shown else self.hidden

    @property
    def difference(self) -> float | None:
        """The gain by demonstrations, None if it is undecided."""
        return None if self.shown is None or self.hidden is None else self.shown - self.hidden


@dataclass(frozen=True)
class ShadowQuality:
    """Agreement of the apprentice with the master over the last `n` samples: as served; and where
    demonstrations were found, with them, without them, and the gain in the decided pairs. The
    interval is 95 %. `failed` counts samples with a missing answer, which are excluded."""

    n: int
    failed: int
    served: AgreementRange
    with_demonstrations: AgreementRange
    without: AgreementRange
    gain: IntervalEstimate


def shadow_quality(pairs: Sequence[AgreementPair], failed: int = 0) -> ShadowQuality:
    compared = [pair for pair in pairs if pair.found]
    differences = [pair.difference for pair in compared]
    return ShadowQuality(
        n=len(pairs),
        failed=failed,
        served=agreement_range([pair.served for pair in pairs]),
        with_demonstrations=agreement_range([pair.shown for pair in compared]),
        without=agreement_range([pair.hidden for pair in compared]),
        gain=paired_gain([one for one in differences if one is not None], 0.975),
    )


class ShadowSampler:
    """Sampler that repeats some queries of the apprentice: with demonstrations, without, and at the
    master.

    About `rate` of the queries are measured, at most `at_once` at a time. The caller calls
    `begins` for each query of the apprentice and, if it is true, `measure` or `cancel`. `eager`
    measures every query until the gate has enough samples to decide, at most `MAX_EAGER`; at a rate
    of 2 % this would take 1,000 queries. A sample costs two more calls than the answer, one of them
    to the master, whose answer can be cached. Agreement with the master is not accuracy, but it
    measures how well the apprentice replaces the master.
    """

    def __init__(
        self,
        gate: BenefitGate,
        agree: CompareAnswers,
        *,
        rate: float = 0.05,
        at_once: int = 4,
        window: int = 1000,
        eager: bool = False,
        seed: int = 0,
    ) -> None:
        check_count("at_once", at_once)
        self.gate = gate
        self._agree = agree
        self._rate = check_fraction("rate", rate)
        self._eager = eager
        self._free = at_once
        self._pairs: deque[AgreementPair] = deque(maxlen=window)
        self._failed = 0
        self._random = random.Random(seed)

    def draw(self) -> bool:
        """Return whether a query is among those that `rate` samples."""
        return self._random.random() < self._rate

    def begins(self, sampled: bool | None = None) -> bool:
        """Whether to measure this query. If so, it occupies one of `at_once` slots until `measure`
        ends. `sampled` is the result of `draw`, by default of a new one."""
        sampled = self.draw() if sampled is None else sampled
        is_early = len(self._pairs) < MAX_EAGER and not self.gate.is_measured
        wanted = sampled or (self._eager and is_early)
        if not wanted or self._free == 0:
            return False
        self._free -= 1
        return True

    def cancel(self) -> None:
        """Release the slot of a query that is not measured."""
        self._free += 1

    async def measure(
        self,
        query: Query,
        candidates: Sequence[Candidate],
        *,
        shown: AnswerCall,
        hidden: AnswerCall,
        master: AnswerCall,
        was_shown: bool,
        judge: Judge | None = None,
    ) -> AgreementPair | None:
        """Run the missing calls concurrently and learn from the replies. `candidates` are the
        demonstrations of `shown`, whose answer the client got if `was_shown`; `judge` gets the
        pairs that are undecided. Return None if a reply is missing: this is counted and not raised,
        because the client has its answer."""
        try:
            calls = shown(), hidden(), master()
            replies = await asyncio.gather(*calls, return_exceptions=True)
            if not self._are_texts(replies):
                return None
            shown_reply, hidden_reply, master_reply = replies
            scores = dict[str, float | None]()
            for text in dict.fromkeys(
                (shown_reply, hidden_reply)
            ):  # long ones take a second: in a thread
                scores[text] = await asyncio.to_thread(self._agree, text, master_reply, query)
            undecided = [text for text, score in scores.items() if score is None and judge]
            for text in undecided:
                assert judge is not None
                scores[text] = await judge(text, master_reply)
        finally:
            self.cancel()
        scored = scores[shown_reply], scores[hidden_reply], was_shown, bool(candidates)
        return self._learned(candidates, AgreementPair(*scored, judged=bool(undecided)))

    def _are_texts(self, replies: Sequence[str | BaseException]) -> TypeGuard[Sequence[str]]:
        """Return whether all calls returned texts. Count and log a failed sample; raise errors
        other than `GenerationError`."""
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, GenerationError):
                raise reply
        failures = [reply for reply in replies if not isinstance(reply, str)]
        if failures:
            self._failed += 1
            log.info("a shadow sample failed: %s", failures)
        return not failures

    def learn(
        self,
        query: Query,
        candidates: Sequence[Candidate],
        shown: str,
        hidden: str,
        master: str,
        *,
        was_shown: bool,
    ) -> AgreementPair:
        """Learn from three replies that the caller has collected. The gate learns nothing from an
        undecided comparison."""
        scores = self._agree(shown, master, query), self._agree(hidden, master, query)
        pair = AgreementPair(*scores, was_shown, bool(candidates))
        return self._learned(candidates, pair)

    def _learned(self, candidates: Sequence[Candidate], pair: AgreementPair) -> AgreementPair:
        self._pairs.append(pair)
        if pair.shown is not None and pair.hidden is not None:
            self.gate.learn(candidates, pair.shown, pair.hidden)
        return pair

    def summary(self) -> ShadowQuality:
        """Return the agreement over the last samples."""
        return shadow_quality(self._pairs, self._failed)
