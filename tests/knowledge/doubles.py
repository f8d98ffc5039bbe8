"""Deterministic embedders and small examples for the tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bottega.errors import BottegaError, EmbeddingError
from bottega.image import Image
from bottega.knowledge import KnowledgeBase
from bottega.knowledge.sqlite.rows import SqliteRows
from bottega.knowledge.sqlite.search import FileSearch
from bottega.protocols import Vectors
from bottega.types import Example, Query
from tests.builders import solid_image

DIMENSION = 8


class SeededEmbedder:
    """Embedder with a random unit vector per pair of text and images; counts its queries."""

    def __init__(self, fingerprint: str = "seeded-8") -> None:
        self.fingerprint = fingerprint
        self.dimension = DIMENSION
        self.embedded = 0

    def embed(self, queries: Sequence[Query]) -> Vectors:
        self.embedded += len(queries)
        return np.stack([vector_of(query) for query in queries])


class ImageOnlyEmbedder(SeededEmbedder):
    def embed(self, queries: Sequence[Query]) -> Vectors:
        for query in queries:
            if not query.images:
                raise EmbeddingError("no image", hint="add one")
        return super().embed(queries)


def vector_of(query: Query) -> Vectors:
    seed = "".join([query.text, *(image.sha256 for image in query.images)])
    rng = np.random.default_rng(list(seed.encode()))
    vector = rng.standard_normal(DIMENSION).astype(np.float32)
    return np.asarray(vector / np.linalg.norm(vector), np.float32)


def text_example(text: str, answer: str = "yes", **fields: object) -> Example:
    """Return an example without an image."""
    return Example(Query(text), answer, **fields)  # type: ignore[arg-type]


def image_example(shade: int, answer: str = "cat", question: str = "What?") -> Example:
    return Example(Query(question, (solid_image(shade),)), answer, source=f"{answer}/{shade}.png")


def damaged_image(source: str = "broken.png") -> Image:
    """Return an image with a valid header and a truncated body."""
    whole = solid_image(1, (64, 64))
    return Image.from_bytes(whole.data[: len(whole.data) // 2], source=source)


class ErrorList(list[BottegaError]):
    """An `on_error` that collects the errors."""

    def __call__(self, error: BottegaError) -> None:
        self.append(error)


def rows_of(kb: KnowledgeBase) -> SqliteRows:
    """Return the rows of a knowledge base in a file or in memory."""
    assert isinstance(kb._rows, SqliteRows)
    return kb._rows


def search_of(kb: KnowledgeBase) -> FileSearch:
    assert isinstance(kb._searcher, FileSearch)
    return kb._searcher
