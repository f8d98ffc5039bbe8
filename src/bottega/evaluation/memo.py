"""An embedder that embeds each question of a run once, whatever the number of methods."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bottega.protocols import Embedder, Vectors
from bottega.types import Query


class MemoEmbedder:
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
        fresh = {_key(q): q for q in queries if _key(q) not in self._known}
        if fresh:
            vectors = self._inner.embed(list(fresh.values()))
            self._known.update(zip(fresh, vectors, strict=True))
        if not queries:
            return np.empty((0, self.dimension), np.float32)
        return np.stack([self._known[_key(q)] for q in queries])


def _key(query: Query) -> tuple[str, ...]:
    return (query.text, *(image.sha256 for image in query.images))
