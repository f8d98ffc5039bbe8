"""What a query shows and what it says, in one vector."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bottega.errors import EmbeddingError
from bottega.knowledge.vectors import unit
from bottega.protocols import Embedder, Vectors
from bottega.types import Query


class DualEmbedder:
    """The vectors of an image and of a text embedder side by side, of equal weight.

    The cosine of two queries that have both is the mean of the two cosines. Where a query has no
    image or no text that part is zero and the other one has length one alone.
    """

    def __init__(self, image: Embedder, text: Embedder) -> None:
        self._image = image
        self._text = text
        self.fingerprint = f"dual ({image.fingerprint}) ({text.fingerprint})"

    @property
    def dimension(self) -> int:
        return self._image.dimension + self._text.dimension

    def embed(self, queries: Sequence[Query]) -> Vectors:
        seen = _part(self._image, queries, [bool(query.images) for query in queries])
        said = _part(self._text, queries, [bool(query.text) for query in queries])
        if not all(query.images or query.text for query in queries):
            raise EmbeddingError("a query has neither image nor text", hint="give it one of them")
        return unit(np.concatenate([seen, said], axis=1))


def _part(embedder: Embedder, queries: Sequence[Query], present: Sequence[bool]) -> Vectors:
    """Unit rows, zeros where the part is absent."""
    rows = np.zeros((len(queries), embedder.dimension), np.float32)
    chosen = [query for query, has in zip(queries, present, strict=True) if has]
    if chosen:
        rows[np.array(present)] = unit(embedder.embed(chosen))
    return rows
