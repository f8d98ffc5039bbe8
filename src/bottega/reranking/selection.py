"""Re-rankers that select by score, diversity, labels or a gate."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from bottega._util.rng import query_rng
from bottega.errors import NotFoundError, SettingError
from bottega.protocols import Reranker, Vectors
from bottega.types import Candidate, Query

MOST_SHOWN = 100
DemonstrationOrder = Literal["nearest-last", "nearest-first", "shuffled"]


class TopKReranker:
    """The first k candidates. The paper leaves their order open; it is a setting here.

    `nearest-last` (default) puts the best demonstration next to the query, where language models
    read most; `shuffled` is seeded per query.
    """

    def __init__(self, order: DemonstrationOrder = "nearest-last", *, seed: int = 0) -> None:
        self.order: DemonstrationOrder = order
        self.seed = seed

    async def __call__(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> list[Candidate]:
        check_count(k)
        return order_demonstrations(candidates[:k], self.order, query, self.seed)


def check_count(k: int) -> None:
    if k < 0:
        raise SettingError(f"cannot choose {k} candidates", hint="use k >= 0")


def check_depth(k: int) -> None:
    """Of a branch: the tree is recorded node within node, and JSON cannot go on for ever."""
    check_count(k)
    if k > MOST_SHOWN:
        raise SettingError(
            f"a search cannot choose {k} demonstrations",
            hint=f"show {MOST_SHOWN} or fewer, or leave the search out",
        )


def order_demonstrations(
    best: Sequence[Candidate], order: DemonstrationOrder, query: Query, seed: int
) -> list[Candidate]:
    """Candidates that stand best first, in the order in which they will be shown."""
    shown = list(best)
    if order == "nearest-last":
        shown.reverse()
    elif order == "shuffled":
        query_rng(query, seed).shuffle(shown)
    return shown


class LabelCoverageReranker:
    """Chooses candidates so that as many of their labels as possible are shown.

    Meant for multi-label sets, where the nearest examples often repeat the common labels. Greedy
    set cover in rounds: each choice is the candidate that shows the most labels not yet shown in
    this round, the nearer one of two equals; when nothing new is left a round ends, and all labels
    are new again. A greedy cover shows at least 1 - 1/e of the labels that the best choice would.
    A candidate without labels ("none of the classes") counts as showing a label of its own. The
    pipeline's `fetch` must be larger than the number of shots for there to be a choice.
    """

    def __init__(self, order: DemonstrationOrder = "nearest-last", *, seed: int = 0) -> None:
        self._order: DemonstrationOrder = order
        self._seed = seed

    async def __call__(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> list[Candidate]:
        check_count(k)
        return order_demonstrations(_cover(candidates, k), self._order, query, self._seed)


def _cover(candidates: Sequence[Candidate], k: int) -> list[Candidate]:
    rest = [(candidate, _labels(candidate)) for candidate in candidates]
    chosen: list[Candidate] = []
    shown: set[str | None] = set()
    while rest and len(chosen) < k:
        best = max(range(len(rest)), key=lambda place: len(rest[place][1] - shown))
        if not rest[best][1] - shown:
            shown.clear()
            continue
        candidate, labels = rest.pop(best)
        chosen.append(candidate)
        shown |= labels
    return chosen


def _labels(candidate: Candidate) -> set[str | None]:
    example = candidate.example
    labels = (example.answer,) if example.labels is None else example.labels
    return set(labels) or {None}


class MMRReranker:
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
        order: DemonstrationOrder = "nearest-last",
        seed: int = 0,
    ) -> None:
        if not 0 <= trade_off <= 1:
            raise SettingError(f"trade_off is {trade_off}", hint="set it between 0 and 1")
        self._vectors = vectors
        self._trade_off = trade_off
        self._order: DemonstrationOrder = order
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
        return order_demonstrations(
            [candidates[place] for place in chosen], self._order, query, self._seed
        )

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


class GatedReranker:
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


LEAST_WEIGHT = 1e-3  # keeps the lowest-scored candidate selectable


def check_scores(scores: Sequence[float]) -> None:
    if not all(map(math.isfinite, scores)):
        raise SettingError(
            "a candidate's score is not a finite number",
            hint="a search goes by the scores: the retriever has to give each candidate one",
        )


def scaled(scores: Sequence[float], more_span: float = 0.0) -> list[float]:
    check_scores(scores)
    # Halves, because the difference of two large numbers may be too large.
    least = min(scores, default=0.0) / 2
    span = max(scores, default=0.0) / 2 - least + more_span / 2
    return [((score / 2 - least) / span if span else 1.0) + LEAST_WEIGHT for score in scores]
