"""Embedders that embed each question of a run once, whatever the number of methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from bottega._util.identity import query_key
from bottega.protocols import Embedder, MultiVectorEmbedder, Vectors
from bottega.types import Query


class CachingEmbedder:
    """Remembers vectors (not images) by the query's text and image hashes, without a limit."""

    def __init__(self, inner: Embedder) -> None:
        self._inner = inner
        self._known: dict[tuple[str, ...], Vectors] = {}

    @property
    def fingerprint(self) -> str:
        return self._inner.fingerprint

    @property
    def dimension(self) -> int:
        return self._inner.dimension

    def embed(self, queries: Sequence[Query]) -> Vectors:
        if not queries:
            return np.empty((0, self.dimension), np.float32)
        return np.stack(_remembered(self._known, queries, self._inner.embed))


class CachingTokenEmbedder:
    """The same for the token vectors of questions; documents are embedded each time, and
    `progress` is told how many."""

    def __init__(
        self, inner: MultiVectorEmbedder, progress: Callable[[int], None] | None = None
    ) -> None:
        self._inner = inner
        self._progress = progress
        self._known: dict[tuple[str, ...], Vectors] = {}

    @property
    def fingerprint(self) -> str:
        return self._inner.fingerprint

    @property
    def dimension(self) -> int:
        return self._inner.dimension

    def embed_queries(self, queries: Sequence[Query]) -> list[Vectors]:
        return _remembered(self._known, queries, self._inner.embed_queries)

    def embed_documents(self, queries: Sequence[Query]) -> list[Vectors]:
        made = self._inner.embed_documents(queries)
        if self._progress is not None:
            self._progress(len(queries))
        return made


def _remembered(
    known: dict[tuple[str, ...], Vectors],
    queries: Sequence[Query],
    embed: Callable[[Sequence[Query]], Iterable[Vectors]],
) -> list[Vectors]:
    fresh = {query_key(q): q for q in queries if query_key(q) not in known}
    if fresh:
        known.update(zip(fresh, embed(list(fresh.values())), strict=True))
    return [known[query_key(q)] for q in queries]
