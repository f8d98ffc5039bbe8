"""Router by cache coverage, and escalation of answers with low confidence."""

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
    """Router that uses the apprentice if the cache has a similar example, else the master.

    With `at_least`, the nearest example must have that score (the scale depends on the retriever).
    With `master_rate`, about that fraction of the queries goes to the master: those whose nearest
    example is farthest, compared with the last `window` queries. The threshold is corrected after
    each query (adaptive conformal inference, Gibbs and Candès, NeurIPS 2021): over n queries of any
    stream, the fraction is within 51 / n of the rate. Queries without any example go to the master
    in addition.

    Pass the retriever of the demonstrations in a `SharedRetriever` to search only once per query.
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
                "coverage needs exactly one of at_least and master_rate, got"
                f" at_least={at_least} and master_rate={master_rate}",
                hint="pass one of the two",
            )
        self._apprentice, self._master = apprentice_and_master(tiers)
        self._retrieve = retrieve
        self._at_least = at_least
        self._rate = check_fraction("master_rate", master_rate or 0.0)
        self._threshold = self._rate
        self._last: deque[float] = deque(maxlen=window)
        self._random = random.Random(seed)

    async def __call__(self, query: Query, /) -> Tier:
        found = await self._retrieve(query, 1)
        score = found[0].score if found else None
        if self._at_least is not None:
            covered = score is not None and score >= self._at_least
        else:
            covered = self._is_covered_by_rank(score)
        return self._apprentice if covered else self._master

    def _is_covered_by_rank(self, score: float | None) -> bool:
        covered = score is not None and self._rank(score) >= self._threshold
        self._threshold += STEP * (self._rate - (not covered))
        # A long time without examples must not be followed by a long time without the master.
        self._threshold = min(max(self._threshold, -STEP), 1 + STEP)
        if score is not None:
            self._last.append(score)
        return covered

    def _rank(self, score: float) -> float:
        """Return the fraction of recent scores that are lower. Ties are broken at random: in
        some caches every nearest example is a copy."""
        lower = sum(other < score for other in self._last)
        equal = sum(other == score for other in self._last)
        return (lower + self._random.random() * (equal + 1)) / (len(self._last) + 1)


log = logging.getLogger(__name__)


class ConfidenceEscalation:
    """Escalation to the next tier if the answer is invalid or its confidence is less than `below`.

    `tiers` are two or more, the cheapest first. The parser provides the confidence: the one that
    the model states, or the probability of the whole reply, which is small for every long text. For
    answers with reasoning, sample several and let the pipeline choose by `most_frequent`: the
    confidence is then the fraction of samples that agree (self-consistency). A valid answer without
    confidence is kept, which is logged once for each tier.

    Other tiers, such as one that a client requested by name, are never escalated.
    """

    def __init__(self, tiers: Sequence[Tier], below: float = 0.7) -> None:
        names = [tier.name for tier in check_tiers(tiers)]
        self._next = dict(zip(names, tiers[1:], strict=False))
        self._below = check_fraction("below", below)
        self._warned: set[str] = set()

    async def __call__(self, query: Query, tier: Tier, answer: Answer, /) -> Tier | None:
        better = self._next.get(tier.name)
        if better is None:
            return None
        if answer.valid and answer.confidence is None:
            self._warn(tier.name)
            return None
        confidence = answer.confidence if answer.valid and answer.confidence is not None else -1.0
        return None if confidence >= self._below else better

    def _warn(self, name: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning(
                "answers of %r have no confidence: valid ones are kept; request"
                " log-probabilities, or sample several and choose by most_frequent",
                name,
            )
