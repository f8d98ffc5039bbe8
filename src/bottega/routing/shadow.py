"""Shadow samples: agreement of the apprentice with the master, with and without demonstrations."""

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
# Agreement of two replies to the query, in [0, 1].
AgreementFunction = Callable[[str, str, Query], float]


class AgreementPair(NamedTuple):
    """Agreement of the apprentice with the master, and whether the gate showed demonstrations."""

    shown: float
    hidden: float
    open: bool


@dataclass(frozen=True)
class ShadowQuality:
    """Agreement of the apprentice with the master over the last `n` samples: as served, with
    demonstrations, without them, and the gain by demonstrations. The intervals are 95 %. `failed`
    counts samples with a missing answer, which are excluded."""

    n: int
    failed: int
    served: IntervalEstimate
    with_demonstrations: IntervalEstimate
    without: IntervalEstimate
    gain: IntervalEstimate


class ShadowSampler:
    """Sampler that repeats some queries of the apprentice: with demonstrations, without, and at the
    master.

    About `rate` of the queries are measured, at most `at_once` at a time. The caller calls
    `begins` for each query of the apprentice and, if it is true, `measure` or `cancel`. `eager`
    measures every query until the gate has enough samples to decide; at a rate of 2 % this would
    take 1,000 queries. A sample costs two more calls than the answer, one of them to the master,
    whose answer can be cached. Agreement with the master is not accuracy, but it measures how well
    the apprentice replaces the master.
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
            raise SettingError(f"at_once must be at least 1, got {at_once}", hint="set at_once=4")
        self.gate = gate
        self._agree = agree
        self._rate = check_fraction("rate", rate)
        self._eager = eager
        self._free = at_once
        self._pairs: deque[AgreementPair] = deque(maxlen=window)
        self._failed = 0
        self._random = random.Random(seed)

    def begins(self) -> bool:
        """Whether to measure this query. If so, it occupies one of `at_once` slots until `measure`
        ends."""
        sampled = self._random.random() < self._rate
        wanted = sampled or (self._eager and not self.gate.is_measured)
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
    ) -> AgreementPair | None:
        """Run the missing calls concurrently and learn from the replies. `candidates` are the
        demonstrations of `shown`. Return None if a reply is missing: this is counted and not
        raised, because the client has its answer already."""
        try:
            replies = await asyncio.gather(shown(), hidden(), master(), return_exceptions=True)
        finally:
            self.cancel()
        texts = [reply for reply in replies if isinstance(reply, str)]
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, GenerationError):
                raise reply
        if len(texts) < len(replies):
            self._failed += 1
            log.info("a shadow sample failed: %s", [r for r in replies if not isinstance(r, str)])
            return None
        return self.learn(query, candidates, *texts)

    def learn(
        self, query: Query, candidates: Sequence[Candidate], shown: str, hidden: str, master: str
    ) -> AgreementPair:
        """Learn from three replies that the caller has collected."""
        pair = AgreementPair(
            self._agree(shown, master, query),
            self._agree(hidden, master, query),
            self.gate.shows(candidates),
        )
        self._pairs.append(pair)
        self.gate.learn(candidates, pair.shown, pair.hidden)
        return pair

    def summary(self) -> ShadowQuality:
        """Return the agreement over the last samples."""
        pairs = self._pairs
        return ShadowQuality(
            n=len(pairs),
            failed=self._failed,
            served=mean_agreement([pair.shown if pair.open else pair.hidden for pair in pairs]),
            with_demonstrations=mean_agreement([pair.shown for pair in pairs]),
            without=mean_agreement([pair.hidden for pair in pairs]),
            gain=paired_gain([pair.shown - pair.hidden for pair in pairs], 0.975),
        )
