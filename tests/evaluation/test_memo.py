from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bottega.evaluation.memo import MemoEmbedder
from bottega.protocols import Vectors
from bottega.types import Query
from tests.builders import picture


class Counting:
    fingerprint = "counting"
    dimension = 2

    def __init__(self) -> None:
        self.embedded = 0

    def embed(self, queries: Sequence[Query]) -> Vectors:
        start = self.embedded
        self.embedded += len(queries)
        return np.array([[start + i, 0] for i in range(len(queries))], np.float32)


def test_each_query_is_embedded_once_and_gets_its_own_vector() -> None:
    inner = Counting()
    memo = MemoEmbedder(inner)
    queries = [Query("a"), Query("b"), Query("a", (picture(1),)), Query("a")]
    first = memo.embed(queries)
    assert first[:, 0].tolist() == [0, 1, 2, 0]
    assert (memo.embed(queries[::-1])[:, 0]).tolist() == [0, 2, 1, 0]
    assert inner.embedded == 3
    assert memo.embed([]).shape == (0, 2)
    assert (memo.fingerprint, memo.dimension) == ("counting", 2)
