"""Image and word tokens of the bundled model, for late interaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from PIL import Image as Pillow

from bottega.bundled import WORDS
from bottega.errors import EmbeddingError
from bottega.image import Image
from bottega.knowledge.embedders.tokens import TokenEmbedder
from bottega.knowledge.embedders.tower import TowerEmbedder
from bottega.knowledge.vectors import unit
from bottega.protocols import Vectors
from bottega.types import Query


class TowerTokenEmbedder:
    """One token for each image and one for each word that means something to the bundled model.

    At 64 x 64 pixels the tower ends in a single cell, its image vector. `cells` adds the map before
    it (2 x 2). Words of no known meaning are left out unless there are no others. Images, cells and
    words have dimensions of their own, so that none is taken for another.

    What it is worth: on `attributes`, 8 of 500 known, it finds more right answers than the two
    vectors of `DualEmbedder` do, because a plain word cannot weigh the asked attribute down; the
    cells make it worse (docs/log.md). Five tokens are no test of late interaction itself.
    """

    def __init__(self, images: TowerEmbedder, words: TokenEmbedder, *, cells: bool = False) -> None:
        self._images = images
        self._words = words
        self._cells = cells
        blank = Image.from_pillow(Pillow.new("RGB", (64, 64)))
        self._channels = images.cells(blank).shape[1] if cells else 0
        self.fingerprint = (
            f"tower-tokens {self._channels} ({images.fingerprint}) ({words.fingerprint})"
        )

    @classmethod
    def bundled(cls, *, cells: bool = False) -> Self:
        """The model that comes with the package."""
        return cls(TowerEmbedder.bundled(), TokenEmbedder.bundled(), cells=cells)

    @property
    def dimension(self) -> int:
        return self._images.dimension + self._channels + self._words.dimension - 1

    def embed_queries(self, queries: Sequence[Query]) -> list[Vectors]:
        images = [image for query in queries for image in query.images]
        seen = iter(self._images.embed([Query("", (image,)) for image in images]))
        return [self._tokens(query, [next(seen) for _ in query.images]) for query in queries]

    def embed_documents(self, queries: Sequence[Query]) -> list[Vectors]:
        return self.embed_queries(queries)

    def _tokens(self, query: Query, seen: list[Vectors]) -> Vectors:
        parts = [self._placed(row[None], 0) for row in seen]
        if self._cells:
            cells = [unit(self._images.cells(image)) for image in query.images]
            parts += [self._placed(rows, self._images.dimension) for rows in cells]
        words = self._meant(query.text)
        if len(words):
            parts.append(self._placed(unit(words), self._images.dimension + self._channels))
        if not parts:
            raise EmbeddingError("a query has neither image nor text", hint="give it one of them")
        return np.concatenate(parts)

    def _meant(self, text: str) -> Vectors:
        rows = self._words.token_rows(text)
        # A token that is all zeros is one of which nothing is known.
        rows = rows[rows.any(axis=1)]
        means = rows[:, WORDS.stop - WORDS.start :].any(axis=1)
        return rows[means] if means.any() else rows

    def _placed(self, rows: Vectors, start: int) -> Vectors:
        placed = np.zeros((len(rows), self.dimension), np.float32)
        placed[:, start : start + rows.shape[1]] = rows
        return placed
