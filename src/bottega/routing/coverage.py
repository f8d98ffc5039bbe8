"""Routing by coverage of the cache, and escalation at low confidence."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Sequence

from bottega.errors import SettingError
from bottega.protocols import Retriever, Tier
from bottega.routing.fixed import apprentice_and_master, check_fraction, check_tiers
from bottega.types import Answer, Query

STEP = 0.02


class CoverageRouter:
    """The apprentice where the nearest cached example is similar enough, else the master; the
    master, too, where there is no example at all.

    Either the nearest must have a score of `at_least` (the scale is the retriever's), or about
    `master_rate` of the queries go to the master: those whose nearest example is the farthest,
    compared with the last `window` queries. In that case the share is corrected by what was sent
    (adaptive conformal inference, Gibbs and Candès, NeurIPS 2021): whatever the stream does, over n
    queries it is within 51 / n of the rate, but for queries without any example, which come on top.

    Give it the retriever of the demonstrations, in a `SharedRetriever`, and there is one search,
    not two.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        retrieve: Retriever,
        at_least: float | None = None,
        master_rate: float | None = None,
        *,
        window: int = 300,
        seed: int = 0,
    ) -> None:
        if (at_least is None) == (master_rate is None):
            raise SettingError(
                "coverage is decided by at_least or by master_rate",
                hint="give one of the two",
            )
        self._apprentice, self._master = apprentice_and_master(tiers)
        self._retrieve = retrieve
        self._at_least = at_least
        self._rate = check_fraction("master_rate", master_rate or 0.0)
        self._aim = self._rate
        self._last: deque[float] = deque(maxlen=window)
        self._random = random.Random(seed)

    async def __call__(self, query: Query, /) -> Tier:
        found = await self._retrieve(query, 1)
        score = found[0].score if found else None
        if self._at_least is not None:
            covered = score is not None and score >= self._at_least
        else:
            covered = self._among_the_near(score)
        return self._apprentice if covered else self._master

    def _among_the_near(self, score: float | None) -> bool:
        covered = score is not None and self._rank(score) >= self._aim
        self._aim += STEP * (self._rate - (not covered))
        # A long time without any example must not be paid back by one without any master.
        self._aim = min(max(self._aim, -STEP), 1 + STEP)
        if score is not None:
            self._last.append(score)
        return covered

    def _rank(self, score: float) -> float:
        """The share of the last scores that are lower. Equal ones are broken by a draw, as for a
        cache where every nearest example is a copy."""
        lower = sum(other < score for other in self._last)
        equal = sum(other == score for other in self._last)
        return (lower + self._random.random() * (equal + 1)) / (len(self._last) + 1)


log = logging.getLogger(__name__)


class ConfidenceEscalation:
    """The next tier where the answer is invalid or its confidence is below `below`; of any number
    of tiers, the cheapest first.

    The confidence is what the parser gives: the one that the model states, or the probability of
    the whole reply, which is small for every long text. For worked answers sample several and let
    the pipeline choose by `most_frequent`: then it is the share of the samples that agree
    (self-consistency). A valid answer without any confidence stays, as nothing speaks against it;
    this is logged once, for such a tier is only escalated for invalid answers.

    A tier that is none of these, one that a client asked for by name, is never escalated.
    """

    def __init__(self, tiers: Sequence[Tier], below: float = 0.7) -> None:
        names = [tier.name for tier in check_tiers(tiers)]
        self._next = dict(zip(names, tiers[1:], strict=False))
        self._below = check_fraction("below", below)
        self._silent: set[str] = set()

    async def __call__(self, query: Query, tier: Tier, answer: Answer, /) -> Tier | None:
        better = self._next.get(tier.name)
        if better is None:
            return None
        if answer.valid and answer.confidence is None:
            self._note(tier.name)
            return None
        sure = answer.confidence if answer.valid and answer.confidence is not None else -1.0
        return None if sure >= self._below else better

    def _note(self, name: str) -> None:
        if name not in self._silent:
            self._silent.add(name)
            log.warning(
                "answers of %r come without confidence: they are kept if they are valid; "
                "ask for log-probabilities, or sample several and choose by most_frequent",
                name,
            )
