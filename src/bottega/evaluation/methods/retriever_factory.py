"""Retrievers of a run, within the episodes of its benchmark, with caches of question embeddings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from bottega._util.identity import query_key
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.methods.retrieval import EpisodeRetriever
from bottega.knowledge import KnowledgeBase
from bottega.protocols import Embedder, MultiVectorEmbedder, Retriever, Vectors
from bottega.recipes.cache_retrieval import CacheRetrieval
from bottega.types import Query

RetrieverFactory = Callable[[Benchmark, KnowledgeBase], Retriever]
# Retrieval methods with one vector for each example.
BY_VECTORS = ("image", "text", "dual")


def retriever_factory(retrieval: CacheRetrieval) -> RetrieverFactory:
    """Return a factory of retrievers over a knowledge base with the views of `retrieval`. All
    methods of a run share one retriever."""
    made: dict[int, Retriever] = {}

    def make(data: Benchmark, knowledge: KnowledgeBase) -> Retriever:
        if id(knowledge) not in made:
            made[id(knowledge)] = _retriever(retrieval, data, knowledge)
        return made[id(knowledge)]

    return make


def _retriever(retrieval: CacheRetrieval, data: Benchmark, knowledge: KnowledgeBase) -> Retriever:
    if not data.episode_of:
        return retrieval.retriever(knowledge)
    members: defaultdict[str, list[str]] = defaultdict(list)
    for example in knowledge:
        members[example.tags["episode"]].append(str(example.id))
    by_episode = {episode: retrieval.retriever(knowledge, ids) for episode, ids in members.items()}
    return EpisodeRetriever(data.episode_of, by_episode)


class CachingEmbedder:
    """Embedder that embeds each query of a run once, for all methods.

    Vectors are kept without a limit, by the query's text and image hashes.
    """

    def __init__(self, inner: Embedder) -> None:
        self.inner = inner
        self._cache: dict[tuple[str, ...], Vectors] = {}

    @property
    def fingerprint(self) -> str:
        return self.inner.fingerprint

    @property
    def dimension(self) -> int:
        return self.inner.dimension

    def embed(self, queries: Sequence[Query]) -> Vectors:
        if not queries:
            return np.empty((0, self.dimension), np.float32)
        return np.stack(_cached(self._cache, queries, self.inner.embed))

    def keep(self, queries: Sequence[Query], rows: Vectors) -> None:
        """Cache the vectors (n, dimension) of these queries."""
        self._cache.update(zip(map(query_key, queries), rows, strict=True))


class CachingTokenEmbedder:
    """Token embedder that embeds each question of a run once.

    Documents are embedded on each call; `progress` receives their number.
    """

    def __init__(
        self, inner: MultiVectorEmbedder, progress: Callable[[int], None] | None = None
    ) -> None:
        self._inner = inner
        self._progress = progress
        self._cache: dict[tuple[str, ...], Vectors] = {}

    @property
    def fingerprint(self) -> str:
        return self._inner.fingerprint

    @property
    def dimension(self) -> int:
        return self._inner.dimension

    def embed_queries(self, queries: Sequence[Query]) -> list[Vectors]:
        return _cached(self._cache, queries, self._inner.embed_queries, _key_with_choices)

    def embed_documents(self, queries: Sequence[Query]) -> list[Vectors]:
        made = self._inner.embed_documents(queries)
        if self._progress is not None:
            self._progress(len(queries))
        return made


def _cached(
    vectors: dict[tuple[str, ...], Vectors],
    queries: Sequence[Query],
    embed: Callable[[Sequence[Query]], Iterable[Vectors]],
    key: Callable[[Query], tuple[str, ...]] = query_key,
) -> list[Vectors]:
    fresh = {key(q): q for q in queries if key(q) not in vectors}
    if fresh:
        vectors.update(zip(fresh, embed(list(fresh.values())), strict=True))
    return [vectors[key(q)] for q in queries]


def _key_with_choices(query: Query) -> tuple[str, ...]:
    """Return the key of a query whose tokens may include its choices (`FlmrEmbedder`)."""
    return *query_key(query), *query.choices
