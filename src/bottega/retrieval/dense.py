"""Exact dense search, and the fusion of several retrievers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Iterable, Sequence

from bottega.errors import SettingError
from bottega.protocols import Embedder, Retriever
from bottega.retrieval.ports import NearestSearch, SearchFunction
from bottega.retrieval.wrappers import gather_or_cancel
from bottega.types import Candidate, Example, Query


class DenseRetriever:
    """The k nearest examples by `search(query, k)`, which blocks and therefore runs in a thread.

    Visual RAG, eq. 1: exact L2 distance (or cosine, the same order for unit vectors). By image, by
    text or by both is the search's matter: the knowledge base's embedder, or the view of it that
    `functools.partial(knowledge.search, by="text")` names. Both is the mean of the image's and the
    text's unit vector; `SentenceEmbedder(model, mode="average", average="raw", normalize=False)`
    is the mean as Cache-of-Thought's code takes it.
    """

    def __init__(self, search: SearchFunction) -> None:
        self._search = search

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        return await asyncio.to_thread(self._search, query, k)


class CrossModalRetriever:
    """Queries embedded by one embedder, compared with a view that another one made.

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
    """Orders what several retrievers found by the sum over them of weight / (constant + rank).

    Ranks start at 1, so scales do not matter (Cormack, Clarke and Buettcher 2009, whose constant
    is 60). The retrievers run together and each is asked for `depth` examples, or k if that is
    more: what one of them ranks below its depth counts nothing there. Candidates of one list with
    the same score share a rank, their best; a list that gives all of several the same score says
    nothing, and counts for nothing.
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
            raise SettingError("there is nothing to fuse", hint="give one retriever or more")
        if not 0 < constant < math.inf:
            raise SettingError(f"constant is {constant}", hint="set it above 0; 60 is usual")
        if weights is not None and (
            len(weights) != len(retrievers) or not all(0 <= weight < math.inf for weight in weights)
        ):
            raise SettingError(
                f"{len(weights)} weights for {len(retrievers)} retrievers",
                hint="give each retriever one weight of 0 or more",
            )
        self._retrievers = retrievers
        self._weights = weights or (1.0,) * len(retrievers)
        self._constant = constant
        self._depth = depth

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        if k < 0:
            raise SettingError(f"cannot search for {k} examples", hint="use k >= 0")
        depth = max(k, self._depth)
        rankings = await gather_or_cancel(retrieve(query, depth) for retrieve in self._retrievers)
        return self._fused(rankings)[:k]

    def _fused(self, rankings: Sequence[Sequence[Candidate]]) -> list[Candidate]:
        scores: dict[Hashable, float] = {}
        found: dict[Hashable, Candidate] = {}
        for weight, ranking in zip(self._weights, rankings, strict=True):
            says = len(ranking) == 1 or len({candidate.score for candidate in ranking}) > 1
            for rank, candidate in zip(_ranks(ranking), ranking, strict=True):
                id = _identity(candidate.example)
                share = weight / (self._constant + rank) if says else 0.0
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
    """Its id; where it has none, what it asks and says."""
    if example.id is not None:
        return example.id
    return example.query, example.answer, example.labels, example.rationale, example.source
