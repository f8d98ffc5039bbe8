"""Retrievers by the name of `--retrieve`, with caches of question embeddings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

import numpy as np

from bottega._util.identity import query_key
from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.retrieval import (
    EXCLUDE,
    EpisodeRetriever,
    bundled_token_embedder,
    nearest_retriever,
)
from bottega.knowledge import KnowledgeBase, LateInteractionIndex, TokenEmbedder, View
from bottega.knowledge.records import DEFAULT
from bottega.protocols import Embedder, MultiVectorEmbedder, Retriever, Vectors
from bottega.retrieval import (
    BM25Retriever,
    HashtagRetriever,
    HashtagTree,
    KeywordRetriever,
    LeaveOneOutGroupCount,
    StaticExamples,
    TfidfKeywordExtractor,
    keyword_query,
)
from bottega.types import Example, Query

RetrieverFactory = Callable[[Benchmark, KnowledgeBase], Retriever]
BY_VECTORS = ("image", "text", "dual")
RETRIEVE = (*BY_VECTORS, "hybrid", "keywords", "bm25", "hashtag")
TOKEN_BATCH = 256


def retriever_factory(
    retrieve: str,
    embed: Embedder | None = None,
    *,
    tokens: MultiVectorEmbedder | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> RetrieverFactory:
    """Return the factory of one of `RETRIEVE`. Raises `SettingError` for another name.

    `embed` is the knowledge base's embedder; `tokens` embeds for `hybrid`, by default with the
    bundled model. `progress` receives the number of newly embedded examples, for `hybrid` only.
    """
    if retrieve in BY_VECTORS:
        return nearest_retriever
    if retrieve == "hybrid":
        index = cache(partial(_token_index, tokens=tokens, progress=progress))
        return partial(_by_tokens, index=index)
    if retrieve == "keywords":
        return _by_keywords
    if retrieve == "bm25":
        return _by_bm25
    if retrieve == "hashtag" and embed is not None:
        return partial(_by_hashtags, embed=embed, seed=seed)
    raise SettingError(
        f"retrieval method is unknown, got {retrieve!r}", hint=f"use {', '.join(RETRIEVE)}"
    )


def knowledge_views(retrieve: str, embed: Embedder) -> dict[str, View]:
    """Return the views of a run's knowledge base.

    With `keywords`, examples are embedded by the keywords of their responses, where they have some
    (Cache-of-Thought, 4.3.1).
    """
    return {DEFAULT: View(embed, keyword_query if retrieve == "keywords" else None)}


class KnowledgeSubset:
    """Subset of a knowledge base's examples."""

    def __init__(self, knowledge: KnowledgeBase, ids: Sequence[str]) -> None:
        self._knowledge = knowledge
        self._ids = ids

    def ids(self) -> Sequence[str]:
        return self._ids

    def get_many(self, ids: Sequence[str]) -> list[Example]:
        return self._knowledge.get_many(ids)


def _by_tokens(
    data: Benchmark,
    knowledge: KnowledgeBase,
    *,
    index: Callable[[KnowledgeBase], LateInteractionIndex],
) -> Retriever:
    late = index(knowledge)  # shared by all methods of the run
    late.refresh()
    return nearest_retriever(data, knowledge, partial(late.search, exact=True))


def _token_index(
    knowledge: KnowledgeBase,
    *,
    tokens: MultiVectorEmbedder | None = None,
    progress: Callable[[int], None] | None = None,
) -> LateInteractionIndex:
    embedder = CachingTokenEmbedder(tokens or bundled_token_embedder(), progress)
    return LateInteractionIndex(knowledge, embedder, batch_size=TOKEN_BATCH)


def _by_keywords(data: Benchmark, knowledge: KnowledgeBase) -> Retriever:
    # The labelled questions give the document frequencies.
    terms = TfidfKeywordExtractor((example.query.text for example in data.knowledge), longest=1)
    return KeywordRetriever(nearest_retriever(data, knowledge), terms)


def _by_bm25(data: Benchmark, knowledge: KnowledgeBase) -> Retriever:
    return _per_episode(
        data, knowledge, lambda part: BM25Retriever(StaticExamples(part), exclude=EXCLUDE)
    )


def _by_hashtags(
    data: Benchmark, knowledge: KnowledgeBase, *, embed: Embedder, seed: int
) -> Retriever:
    """Return a retriever over groups of questions, fitted to their words before the first query.

    Within a group, the knowledge base's own similarity decides.
    """
    words = CachingEmbedder(TokenEmbedder.bundled())

    def make(part: KnowledgeSubset) -> Retriever:
        count = LeaveOneOutGroupCount(
            _vectors(part, embed), _vectors(part, words, _answer_query), seed=seed
        )
        tree = HashtagTree(count, seed=seed)
        changes = StaticExamples(part).changes
        search = partial(knowledge.search, exclude=EXCLUDE)
        retrieve = HashtagRetriever(changes, _vectors(part, words), words, search, tree)
        retrieve.build()
        return retrieve

    return _per_episode(data, knowledge, make)


def _per_episode(
    data: Benchmark, knowledge: KnowledgeBase, make: Callable[[KnowledgeSubset], Retriever]
) -> Retriever:
    if not data.episode_of:
        return make(KnowledgeSubset(knowledge, knowledge.ids()))
    members: defaultdict[str, list[str]] = defaultdict(list)
    for example in knowledge:
        members[example.tags["episode"]].append(str(example.id))
    by_episode = {
        episode: make(KnowledgeSubset(knowledge, ids)) for episode, ids in members.items()
    }
    return EpisodeRetriever(data.episode_of, by_episode)


def _vectors(
    part: KnowledgeSubset,
    embed: Embedder,
    reads: Callable[[Example], Query] = lambda example: example.query,
) -> Callable[[Sequence[str]], Vectors]:
    return lambda ids: embed.embed([reads(example) for example in part.get_many(ids)])


def _answer_query(example: Example) -> Query:
    return Query(example.answer or example.query.text)


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
        return _cached(self._cache, queries, self._inner.embed_queries)

    def embed_documents(self, queries: Sequence[Query]) -> list[Vectors]:
        made = self._inner.embed_documents(queries)
        if self._progress is not None:
            self._progress(len(queries))
        return made


def _cached(
    vectors: dict[tuple[str, ...], Vectors],
    queries: Sequence[Query],
    embed: Callable[[Sequence[Query]], Iterable[Vectors]],
) -> list[Vectors]:
    fresh = {query_key(q): q for q in queries if query_key(q) not in vectors}
    if fresh:
        vectors.update(zip(fresh, embed(list(fresh.values())), strict=True))
    return [vectors[query_key(q)] for q in queries]
