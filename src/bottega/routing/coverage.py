"""To the master what the cache does not cover, so that it learns what it lacks."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from bottega.errors import SettingError
from bottega.protocols import Retriever, Tier
from bottega.routing.ends import ends, share
from bottega.types import Query

STEP = 0.02


class Covered:
    """The apprentice where the nearest cached example is similar enough, else the master; the
    master, too, where there is no example at all.

    Either the nearest must have a score of `at_least` (the scale is the retriever's), or about
    `master_rate` of the queries go to the master: those whose nearest example is the farthest,
    compared with the last `window` queries. In that case the share is corrected by what was sent
    (adaptive conformal inference, Gibbs and Candès, NeurIPS 2021): whatever the stream does, over n
    queries it is within 51 / n of the rate, but for queries without any example, which come on top.

    Give it the retriever of the demonstrations, in a `Shared`, and there is one search, not two.
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
        self._apprentice, self._master = ends(tiers)
        self._retrieve = retrieve
        self._at_least = at_least
        self._rate = share("master_rate", master_rate or 0.0)
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
