"""Embedder that joins the vectors of two image embedders."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bottega.errors import SettingError
from bottega.knowledge.embedders.bundled_tower import TowerEmbedder
from bottega.knowledge.records import unit
from bottega.protocols import Embedder, Vectors
from bottega.types import Query


class JoinedEmbedder:
    """Embedder whose vectors are two unit vectors side by side.

    They are scaled by sqrt(1 - weight) and sqrt(weight), so the cosine of two joined vectors is
    (1 - weight) times the first cosine plus `weight` times the second. The fingerprint contains the
    weight. Raises `SettingError` unless 0 < weight < 1.
    """

    def __init__(self, first: Embedder, second: Embedder, weight: float) -> None:
        if not 0 < weight < 1:
            raise SettingError(
                f"weight must be between 0 and 1, got {weight:g}", hint="use e.g. 0.5"
            )
        self.first, self._second = first, second
        self._scales = math.sqrt(1 - weight), math.sqrt(weight)
        self.fingerprint = f"joined {weight:g} ({first.fingerprint}) ({second.fingerprint})"

    @property
    def dimension(self) -> int:
        return self.first.dimension + self._second.dimension

    def embed(self, queries: Sequence[Query]) -> Vectors:
        return self.join(self.first.embed(queries), self._second.embed(queries))

    def join(self, first: Vectors, second: Vectors) -> Vectors:
        """Return the joined vectors (n, dimension) of rows from both embedders."""
        ours, theirs = self._scales
        rows: Vectors = np.concatenate([ours * unit(first), theirs * unit(second)], axis=-1)
        return rows.astype(np.float32, copy=False)

    def first_part(self, rows: Vectors) -> Vectors:
        """Return the first embedder's unit vectors from joined rows; exact up to rounding."""
        return unit(rows[..., : self.first.dimension])


def uncached(embedder: Embedder) -> Embedder:
    """Return the embedder inside a `CachingEmbedder`, else the embedder itself."""
    inner: Embedder = getattr(embedder, "inner", embedder)
    return inner


def tower_of(embedder: Embedder) -> TowerEmbedder | None:
    """Return the vision tower whose vectors an embedder contains, None if there is none."""
    embedder = uncached(embedder)
    first = uncached(embedder.first) if isinstance(embedder, JoinedEmbedder) else embedder
    return first if isinstance(first, TowerEmbedder) else None
