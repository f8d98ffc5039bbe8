"""Dense retrievers, and rank fusion of several retrievers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Iterable, Sequence

from bottega._util.event_loops import gather_or_cancel
from bottega.errors import SettingError
from bottega.protocols import Embedder, Retriever
from bottega.retrieval.ports import NearestSearch, SearchFunction
from bottega.types import Candidate, Example, Query


class DenseRetriever:
    """Retriever of the k nearest examples by `search(query, k)`, which blocks and runs in a thread.

    Visual RAG, eq. 1: exact L2 distance (or cosine, the same order for unit vectors). The search
    decides whether it compares images, texts or both: by the knowledge base's embedder, or by a
    view, as in `functools.partial(knowledge.search, by="text")`. Both means the average of the unit
    vectors of image and text. `SentenceEmbedder(model, mode="average", average="raw",
    normalize=False)` averages as the code of Cache-of-Thought does.
    """

    def __init__(self, search: SearchFunction) -> None:
        self._search = search

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        return await asyncio.to_thread(self._search, query, k)


class CrossModalRetriever:
    """Retriever that compares queries of one embedder with a view of another embedder.

    Both must share a space, as CLIP's images and texts do. Cache-of-Thought's best dense search
    (Table 1) compares the mean of a query's image and keywords with the cached images alone.
    """

    def __init__(self, embed: Embedder, nearest: NearestSearch) -> None:
        self._embed = embed
        self._nearest = nearest

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        return await asyncio.to_thread(self._find, query, k)

    def _find(self, query: Query, k: int) -> list[Candidate]:
        return self._nearest(self._embed.embed([query]), k, excluded_for=[query])[0]


class RankFusionRetriever:
    """Retriever that orders the results of several retrievers by the sum of weight / (constant +
    rank).

    Ranks start at 1, and score scales do not matter (Cormack, Clarke and Buettcher 2009, with
    constant 60). The retrievers run concurrently, each for `depth` examples, or k if that is more;
    deeper ranks count as 0. Candidates of one list with equal scores share their best rank. An
    all-tied list is ignored.
    """

    def __init__(
        self,
        retrievers: Iterable[Retriever],
        *,
        constant: float = 60.0,
        depth: int = 50,
        weights: Iterable[float] | None = None,
    ) -> None:
        retrievers = tuple(retrievers)
        weights = None if weights is None else tuple(weights)
        if not retrievers:
            raise SettingError(
                "retrievers must have at least 1 entry, got 0", hint="pass one retriever or more"
            )
        if not 0 < constant < math.inf:
            raise SettingError(f"constant must be above 0, got {constant}", hint="set constant=60")
        if weights is not None and (
            len(weights) != len(retrievers) or not all(0 <= weight < math.inf for weight in weights)
        ):
            raise SettingError(
                f"weights must have {len(retrievers)} entries of 0 or more, got {list(weights)}",
                hint="pass one weight for each retriever",
            )
        self._retrievers = retrievers
        self._weights = weights or (1.0,) * len(retrievers)
        self._constant = constant
        self._depth = depth

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        if k < 0:
            raise SettingError(f"k must be 0 or more, got {k}", hint="set k=0 or more")
        depth = max(k, self._depth)
        rankings = await gather_or_cancel(retrieve(query, depth) for retrieve in self._retrievers)
        return self._fused(rankings)[:k]

    def _fused(self, rankings: Sequence[Sequence[Candidate]]) -> list[Candidate]:
        scores: dict[Hashable, float] = {}
        found: dict[Hashable, Candidate] = {}
        for weight, ranking in zip(self._weights, rankings, strict=True):
            informative = len(ranking) == 1 or len({candidate.score for candidate in ranking}) > 1
            for rank, candidate in zip(_ranks(ranking), ranking, strict=True):
                id = _identity(candidate.example)
                share = weight / (self._constant + rank) if informative else 0.0
                scores[id] = scores.get(id, 0.0) + share
                found.setdefault(id, candidate)
        best = sorted(scores, key=lambda id: -scores[id])
        return [Candidate(found[id].example, scores[id]) for id in best]


def _ranks(ranking: Sequence[Candidate]) -> list[int]:
    ranks: dict[float, int] = {}
    for rank, candidate in enumerate(ranking, start=1):
        ranks.setdefault(candidate.score, rank)
    return [ranks[candidate.score] for candidate in ranking]


def _identity(example: Example) -> Hashable:
    """Return the id of the example, or its content if it has none."""
    if example.id is not None:
        return example.id
    return example.query, example.answer, example.labels, example.rationale, example.source
