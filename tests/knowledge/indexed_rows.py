"""Row store with generated vectors, and its index."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bottega._util.identity import identity
from bottega.knowledge.index.vector_index import FaissIndex, FlatIndex
from bottega.knowledge.records import EmbeddedBatch, with_id
from bottega.knowledge.sqlite.rows import SqliteRows
from bottega.knowledge.sqlite.search import IndexFollower
from bottega.protocols import Vectors
from tests.knowledge.doubles import text_example

WIDTH = 16


def clustered(rows: int, seed: int = 0) -> Vectors:
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((40, WIDTH))
    around = centres[rng.integers(40, size=rows)] + 0.5 * rng.standard_normal((rows, WIDTH))
    return around.astype(np.float32)


class IndexedRows:
    """Row store with generated vectors, and the index that follows it."""

    def __init__(self, path: Path, above: int = 100) -> None:
        self.rows = SqliteRows(str(path))
        self.above = above
        self.added = self.rows.count()

    def add(self, number: int) -> None:
        examples = [text_example(f"q{self.added + i}") for i in range(number)]
        named = [with_id(example, identity(example)) for example in examples]
        vectors = clustered(self.added + number)[self.added :]
        self.rows.put(named, {"default": EmbeddedBatch("f", vectors)})
        self.added += number

    def follow(self) -> IndexFollower:
        return IndexFollower(self.rows, self.rows.views()["default"], "cosine", self.above)

    def truth(self) -> FaissIndex:
        index = FlatIndex(WIDTH, "cosine")
        index.apply(self.rows.changes_since(0, 1_000_000))
        return index


def settled(follower: IndexFollower) -> FaissIndex:
    follower.current()
    follower.wait_for_indexes()
    return follower.current()
