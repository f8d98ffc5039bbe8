"""Re-rankers that select by score, diversity, labels or a gate."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from random import Random
from typing import Literal

import numpy as np

from bottega._util.identity import query_rng
from bottega.errors import NotFoundError, SettingError, check_count, check_fraction, check_scores
from bottega.protocols import Candidates, Reranker, Vectors
from bottega.types import Candidate, Query

MAX_SHOWN = 100
DemonstrationOrder = Literal["nearest-last", "nearest-first", "shuffled"]
LEAST_WEIGHT = 1e-3  # keeps the lowest-scored candidate selectable


@dataclass(frozen=True)
class TopKReranker:
    """Re-ranker that selects the first k candidates. The papers do not specify their order.

    `nearest-last` (default) puts the best demonstration next to the query, where language models
    attend most; `shuffled` is seeded per query.
    """

    order: DemonstrationOrder = "nearest-last"
    _: KW_ONLY
    seed: int = 0

    async def __call__(self, query: Query, candidates: Candidates, k: int, /) -> list[Candidate]:
        check_count("k", k, 0)
        return order_demonstrations(candidates[:k], self.order, query, self.seed)


def check_depth(k: int) -> None:
    """Raise `SettingError` for a branch too deep for the nested JSON of a recorded tree."""
    check_count("k", k, 0)
    if k > MAX_SHOWN:
        raise SettingError(
            f"a search must select at most {MAX_SHOWN} demonstrations, got {k}",
            hint=f"show {MAX_SHOWN} or fewer, or use no search",
        )


def check_exploration(exploration: float) -> None:
    """Raise `SettingError` for a constant of exploration that is negative or not finite."""
    if not (math.isfinite(exploration) and exploration >= 0):
        raise SettingError(
            f"exploration must be finite and at least 0, got {exploration}",
            hint="set exploration to 0.5, the default",
        )


def order_demonstrations(
    best: Sequence[Candidate], order: DemonstrationOrder, query: Query, seed: int
) -> list[Candidate]:
    """Return candidates, given best first, in the order of the prompt."""
    shown = list(best)
    if order == "nearest-last":
        shown.reverse()
    elif order == "shuffled":
        query_rng(query, seed).shuffle(shown)
    return shown


@dataclass(frozen=True)
class LabelCoverageReranker:
    """Re-ranker that covers as many labels as possible.

    Use it for multi-label sets, where the nearest examples often repeat the common labels. It is a
    greedy set cover in rounds: select the candidate with the most labels that this round has not
    shown, and of equals the nearer one; when no candidate adds a label, start a new round. A greedy
    cover shows at least 1 - 1/e of the labels of the best selection. The lack of labels ("none of
    the classes") counts as a label. Set the pipeline's `fetch` above the number of shots.
    """

    order: DemonstrationOrder = "nearest-last"
    _: KW_ONLY
    seed: int = 0

    async def __call__(self, query: Query, candidates: Candidates, k: int, /) -> list[Candidate]:
        check_count("k", k, 0)
        rest: list[tuple[Candidate, set[str | None]]] = []
        for candidate in candidates:
            example = candidate.example
            labels = (example.answer,) if example.labels is None else example.labels
            rest.append((candidate, set(labels) or {None}))
        chosen: list[Candidate] = []
        shown: set[str | None] = set()
        while rest and len(chosen) < k:
            best = max(range(len(rest)), key=lambda index: len(rest[index][1] - shown))
            if not rest[best][1] - shown:
                shown.clear()
                continue
            candidate, added = rest.pop(best)
            chosen.append(candidate)
            shown |= added
        return order_demonstrations(chosen, self.order, query, self.seed)


@dataclass(frozen=True)
class MMRReranker:
    """Re-ranker by maximal marginal relevance (Carbonell and Goldstein 1998).

    Each step selects the candidate with the highest trade_off * relevance - (1 - trade_off) *
    similarity. A `trade_off` (lambda) of 1 selects the first k candidates, 0 the nearest and then
    always the least similar one. Relevance is the retriever's score, scaled to 0..1 over the
    candidates. Similarity is the largest cosine to a selected candidate. `vectors(ids)` blocks;
    candidates for which it raises `NotFoundError` were deleted since retrieval and are left out.
    Set the pipeline's `fetch` above the number of shots.
    """

    vectors: Callable[[Sequence[str]], Vectors]
    _: KW_ONLY
    trade_off: float = 0.7
    order: DemonstrationOrder = "nearest-last"
    seed: int = 0

    def __post_init__(self) -> None:
        check_fraction("trade_off", self.trade_off)

    async def __call__(self, query: Query, candidates: Candidates, k: int, /) -> list[Candidate]:
        check_count("k", k, 0)
        if any(candidate.example.id is None for candidate in candidates):
            raise SettingError(
                "MMR needs candidates with ids, got one without",
                hint="use a retriever that searches a knowledge base",
            )
        found = await asyncio.to_thread(self._present, candidates)
        if not found:
            return []
        candidates, vectors = [one for one, _ in found], np.stack([row for _, row in found])
        scores = np.array([candidate.score for candidate in candidates])
        span = scores.max() - scores.min()
        relevance = (scores - scores.min()) / span if span > 0 else np.zeros_like(scores)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        rows = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
        chosen = self._chosen(relevance, rows @ rows.T, k)
        return order_demonstrations(
            [candidates[index] for index in chosen], self.order, query, self.seed
        )

    def _present(self, candidates: Candidates) -> list[tuple[Candidate, Vectors]]:
        """Return the candidates that still exist, with their vectors (by bisection)."""
        if not candidates:
            return []
        try:
            vectors = self.vectors([str(one.example.id) for one in candidates])
            return list(zip(candidates, vectors, strict=True))
        except NotFoundError:
            if len(candidates) == 1:
                return []
        half = len(candidates) // 2
        return [*self._present(candidates[:half]), *self._present(candidates[half:])]

    def _chosen(self, relevance: Vectors, similarity: Vectors, k: int) -> list[int]:
        closest = np.full(len(relevance), -1.0)
        chosen: list[int] = []
        for _ in range(min(k, len(relevance))):
            if chosen:
                closest = np.maximum(closest, similarity[chosen[-1]])
            gain = self.trade_off * relevance - (1 - self.trade_off) * closest
            gain[chosen] = -np.inf
            chosen.append(int(gain.argmax()))  # of equals the nearer one
        return chosen


@dataclass(frozen=True)
class GatedReranker:
    """Re-ranker that returns no demonstrations if `shows`, such as `BenefitGate.shows`, forbids
    them.

    Hidden candidates are not re-ranked. To measure whether demonstrations would have helped, call
    `rerank` directly.
    """

    rerank: Reranker
    shows: Callable[[Candidates], bool]

    async def __call__(self, query: Query, candidates: Candidates, k: int, /) -> list[Candidate]:
        return await self.rerank(query, candidates, k) if self.shows(candidates) else []


def scaled(scores: Sequence[float], more_span: float = 0.0) -> list[float]:
    """Return scores scaled to 0..1 plus `LEAST_WEIGHT`, as sampling weights."""
    check_scores(scores)
    # Halves: the difference of two large numbers may overflow.
    least = min(scores, default=0.0) / 2
    span = max(scores, default=0.0) / 2 - least + more_span / 2
    return [((score / 2 - least) / span if span else 1.0) + LEAST_WEIGHT for score in scores]


def sample_by_score(candidates: Candidates, k: int, random: Random) -> list[Candidate]:
    """Return up to k candidates, drawn one after another with their scaled scores as weights (RCTS,
    eq. 6)."""
    left, weights = list(candidates), scaled([one.score for one in candidates])
    sample: list[Candidate] = []
    while left and len(sample) < k:
        index = random.choices(range(len(left)), weights)[0]
        sample.append(left.pop(index))
        weights.pop(index)
    return sample
