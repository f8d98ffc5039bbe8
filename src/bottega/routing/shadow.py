"""Measuring, beside the answers that are given, what demonstrations do and how good answers are."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bottega.errors import GenerationError, SettingError
from bottega.routing.benefit_gate import BenefitGate, IntervalEstimate, mean_agreement, paired_gain
from bottega.routing.fixed import check_fraction
from bottega.types import Candidate, Query

log = logging.getLogger(__name__)

AnswerCall = Callable[[], Awaitable[str]]
# How far two replies to the query say the same, in [0, 1].
AgreementFunction = Callable[[str, str, Query], float]


class AgreementPair(NamedTuple):
    """How far the apprentice agreed with the master, and whether the gate showed demonstrations."""

    shown: float
    hidden: float
    open: bool


@dataclass(frozen=True)
class ShadowQuality:
    """Agreement of the apprentice's answers with the master's over the last `n` samples: as they
    were served, with demonstrations, without, and what demonstrations gain. 95 % intervals.
    `failed` samples, of which an answer is missing, are in none of them."""

    n: int
    failed: int
    served: IntervalEstimate
    with_demonstrations: IntervalEstimate
    without: IntervalEstimate
    gain: IntervalEstimate


class ShadowSampler:
    """Asks some of the apprentice's queries again: with demonstrations, without, and the master.

    About `rate` of the queries are measured, `at_once` at the same time at most: whoever answers
    calls `begins` for each query of the apprentice, and where it is true, `measure` (or `cancel`).
    `eager` measures every query until the gate has samples enough to decide, which at a rate of 2 %
    takes 1,000 queries. A sample costs two calls more than the answer, one of them to the master,
    whose answer may as well be remembered. Agreement with the master is not truth: it is what the
    apprentice is for.
    """

    def __init__(
        self,
        gate: BenefitGate,
        agree: AgreementFunction,
        *,
        rate: float = 0.05,
        at_once: int = 4,
        window: int = 1000,
        eager: bool = False,
        seed: int = 0,
    ) -> None:
        if at_once < 1:
            raise SettingError(f"at_once is {at_once}", hint="measure 1 query at once or more")
        self.gate = gate
        self._agree = agree
        self._rate = check_fraction("rate", rate)
        self._eager = eager
        self._free = at_once
        self._pairs: deque[AgreementPair] = deque(maxlen=window)
        self._failed = 0
        self._random = random.Random(seed)

    def begins(self) -> bool:
        """Whether this query is measured; if so its place is taken until `measure` has ended."""
        drawn = self._random.random() < self._rate
        wanted = drawn or (self._eager and not self.gate.is_measured)
        if not wanted or self._free == 0:
            return False
        self._free -= 1
        return True

    def cancel(self) -> None:
        """Gives the place back of a query that is not measured after all."""
        self._free += 1

    async def measure(
        self,
        query: Query,
        candidates: Sequence[Candidate],
        *,
        shown: AnswerCall,
        hidden: AnswerCall,
        master: AnswerCall,
    ) -> AgreementPair | None:
        """Asks what is not known yet, all at once, and learns; `candidates` are what `shown` was
        shown. None if an answer is missing: that is counted, not raised, for the client has its
        answer already."""
        try:
            replies = await asyncio.gather(shown(), hidden(), master(), return_exceptions=True)
        finally:
            self.cancel()
        said = [reply for reply in replies if isinstance(reply, str)]
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, GenerationError):
                raise reply
        if len(said) < len(replies):
            self._failed += 1
            log.info("a shadow sample failed: %s", [r for r in replies if not isinstance(r, str)])
            return None
        return self.learn(query, candidates, *said)

    def learn(
        self, query: Query, candidates: Sequence[Candidate], shown: str, hidden: str, master: str
    ) -> AgreementPair:
        """Of three replies, for those who asked by themselves."""
        pair = AgreementPair(
            self._agree(shown, master, query),
            self._agree(hidden, master, query),
            self.gate.shows(candidates),
        )
        self._pairs.append(pair)
        self.gate.learn(candidates, pair.shown, pair.hidden)
        return pair

    def summary(self) -> ShadowQuality:
        pairs = self._pairs
        return ShadowQuality(
            n=len(pairs),
            failed=self._failed,
            served=mean_agreement([pair.shown if pair.open else pair.hidden for pair in pairs]),
            with_demonstrations=mean_agreement([pair.shown for pair in pairs]),
            without=mean_agreement([pair.hidden for pair in pairs]),
            gain=paired_gain([pair.shown - pair.hidden for pair in pairs], 0.975),
        )
