"""Near to the query, and different from each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from bottega.errors import NotFoundError, SettingError
from bottega.protocols import Vectors
from bottega.reranking.top import Order, arranged, check_count
from bottega.types import Candidate, Query


class MaximalMarginalRelevance:
    """Chooses one candidate after the other by trade_off * relevance - (1 - trade_off) * likeness.

    Carbonell and Goldstein 1998, whose lambda is `trade_off`: 1 shows the first k candidates, 0 the
    nearest one and then always the one least like those chosen. Relevance is the retriever's score,
    scaled to 0..1 over the candidates because every retriever has its own scale; likeness is the
    cosine to the most similar chosen one, by `vectors(ids)`, which blocks. Candidates of which it
    raises `NotFoundError`, deleted since they were retrieved, are left out. The pipeline's `fetch`
    must be larger than the number of shots for there to be a choice.
    """

    def __init__(
        self,
        vectors: Callable[[Sequence[str]], Vectors],
        *,
        trade_off: float = 0.7,
        order: Order = "nearest-last",
        seed: int = 0,
    ) -> None:
        if not 0 <= trade_off <= 1:
            raise SettingError(f"trade_off is {trade_off}", hint="set it between 0 and 1")
        self._vectors = vectors
        self._trade_off = trade_off
        self._order: Order = order
        self._seed = seed

    async def __call__(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> list[Candidate]:
        check_count(k)
        if any(candidate.example.id is None for candidate in candidates):
            raise SettingError(
                "a candidate has no id, by which its vector could be found",
                hint="use it behind a retriever that searches a knowledge base",
            )
        found = await asyncio.to_thread(self._present, candidates)
        if not found:
            return []
        candidates, vectors = [one for one, _ in found], np.stack([row for _, row in found])
        relevance = _scaled(np.array([candidate.score for candidate in candidates]))
        chosen = self._chosen(relevance, _likeness(vectors), k)
        return arranged([candidates[place] for place in chosen], self._order, query, self._seed)

    def _present(self, candidates: Sequence[Candidate]) -> list[tuple[Candidate, Vectors]]:
        """Those that are still there, each with its vector."""
        if not candidates:
            return []
        try:
            vectors = self._vectors([str(one.example.id) for one in candidates])
            return list(zip(candidates, vectors, strict=True))
        except NotFoundError:
            if len(candidates) == 1:
                return []
        half = len(candidates) // 2
        return [*self._present(candidates[:half]), *self._present(candidates[half:])]

    def _chosen(self, relevance: Vectors, likeness: Vectors, k: int) -> list[int]:
        closest = np.full(len(relevance), -1.0)
        chosen: list[int] = []
        for _ in range(min(k, len(relevance))):
            if chosen:
                closest = np.maximum(closest, likeness[chosen[-1]])
            gain = self._trade_off * relevance - (1 - self._trade_off) * closest
            gain[chosen] = -np.inf
            chosen.append(int(gain.argmax()))  # the nearer one of two equals
        return chosen


def _scaled(scores: Vectors) -> Vectors:
    span = scores.max() - scores.min()
    scaled: Vectors = (scores - scores.min()) / span if span > 0 else np.zeros_like(scores)
    return scaled


def _likeness(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    cosines: Vectors = rows @ rows.T
    return cosines
