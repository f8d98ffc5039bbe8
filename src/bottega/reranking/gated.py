"""Nothing, where demonstrations do not help."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bottega.protocols import Reranker
from bottega.types import Candidate, Query


class Gated:
    """What `rerank` makes of the candidates, or nothing where `shows` does not allow it, such as
    `BenefitGate.shows`. What is hidden is not re-ranked first. Who measures whether showing would
    have helped asks `rerank` itself."""

    def __init__(self, rerank: Reranker, shows: Callable[[Sequence[Candidate]], bool]) -> None:
        self.rerank = rerank
        self._shows = shows

    async def __call__(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> list[Candidate]:
        return await self.rerank(query, candidates, k) if self._shows(candidates) else []
