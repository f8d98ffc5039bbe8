from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bottega.evaluation.methods.retrieval import CachingEmbedder, CachingTokenEmbedder
from bottega.protocols import Vectors
from bottega.types import Query
from tests.builders import solid_image


class CountingEmbedder:
    fingerprint = "counting"
    dimension = 2

    def __init__(self) -> None:
        self.embedded = 0

    def embed(self, queries: Sequence[Query]) -> Vectors:
        start = self.embedded
        self.embedded += len(queries)
        return np.array([[start + i, 0] for i in range(len(queries))], np.float32)


def test_each_query_is_embedded_once() -> None:
    inner = CountingEmbedder()
    cached = CachingEmbedder(inner)
    queries = [Query("a"), Query("b"), Query("a", (solid_image(1),)), Query("a")]
    first = cached.embed(queries)
    assert first[:, 0].tolist() == [0, 1, 2, 0]
    assert (cached.embed(queries[::-1])[:, 0]).tolist() == [0, 2, 1, 0]
    assert inner.embedded == 3
    assert cached.embed([]).shape == (0, 2)
    assert (cached.fingerprint, cached.dimension) == ("counting", 2)


class CountingTokenEmbedder:
    fingerprint = "counting-tokens"
    dimension = 2

    def __init__(self) -> None:
        self.inner = CountingEmbedder()

    def embed_queries(self, queries: Sequence[Query]) -> list[Vectors]:
        return [row[None] for row in self.inner.embed(queries)]

    def embed_documents(self, queries: Sequence[Query]) -> list[Vectors]:
        return self.embed_queries(queries)


def test_only_query_tokens_are_cached() -> None:
    counting = CountingTokenEmbedder()
    cached = CachingTokenEmbedder(counting)
    queries = [Query("a"), Query("b"), Query("a")]
    first = [float(rows[0, 0]) for rows in cached.embed_queries(queries)]
    assert first == [float(rows[0, 0]) for rows in cached.embed_queries(queries)] == [0, 1, 0]
    cached.embed_documents(queries)
    assert counting.inner.embedded == 5
    cached.embed_queries([Query("a", choices=("b", "c")), Query("a", choices=("b", "c"))])
    assert counting.inner.embedded == 6  # tokens may include the choices
    assert (cached.fingerprint, cached.dimension) == ("counting-tokens", 2)
    assert cached.embed_queries([]) == []
