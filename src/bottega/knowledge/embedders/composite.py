"""Embedders composed of others: joined vectors, one part each, or one by the kind of image."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bottega._util.drawings import is_photograph
from bottega.errors import EmbeddingError, SettingError
from bottega.knowledge.embedders.photo_embedder import PhotoEmbedder
from bottega.knowledge.records import unit
from bottega.protocols import Embedder, Vectors
from bottega.types import Query


class JoinedEmbedder:
    """Embedder whose vectors are the vectors of two embedders side by side.

    The cosine of two joined vectors is (1 - weight) times the first cosine plus `weight` times the
    second. A joined vector has the length of its first part, so that part can be recovered. The
    fingerprint contains the weight. Raises `SettingError` unless 0 < weight < 1.
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
        lengths = np.linalg.norm(first, axis=-1, keepdims=True)
        lengths[lengths == 0] = 1
        rows: Vectors = np.concatenate([ours * first, theirs * lengths * unit(second)], axis=-1)
        return rows.astype(np.float32, copy=False)

    def first_part(self, rows: Vectors) -> Vectors:
        """Return the first embedder's vectors from joined rows; exact up to rounding."""
        return rows[..., : self.first.dimension] / np.float32(self._scales[0])


def uncached(embedder: Embedder) -> Embedder:
    """Return the embedder inside a `CachingEmbedder`, else the embedder itself."""
    inner: Embedder = getattr(embedder, "inner", embedder)
    return inner


def photo_embedder_of(embedder: Embedder) -> PhotoEmbedder | None:
    """Return the embedder of photographs whose vectors an embedder contains, None if there is
    none."""
    embedder = uncached(embedder)
    first = uncached(embedder.first) if isinstance(embedder, JoinedEmbedder) else embedder
    return first if isinstance(first, PhotoEmbedder) else None


class DualEmbedder:
    """Concatenation of an image and a text embedder with equal weight.

    The cosine of two queries that have both is the mean of the two cosines. If a query has no image
    or no text, that part is zero and the other part has length one.
    """

    def __init__(self, image: Embedder, text: Embedder) -> None:
        self._image = image
        self._text = text
        self.fingerprint = f"dual ({image.fingerprint}) ({text.fingerprint})"

    @property
    def dimension(self) -> int:
        return self._image.dimension + self._text.dimension

    def embed(self, queries: Sequence[Query]) -> Vectors:
        image_rows = embed_part(self._image, queries, [bool(query.images) for query in queries])
        text_rows = embed_part(self._text, queries, [bool(query.text) for query in queries])
        if not all(query.images or query.text for query in queries):
            raise EmbeddingError(
                "the query has neither image nor text", hint="add an image or a text"
            )
        return unit(np.concatenate([image_rows, text_rows], axis=1))


def embed_part(embedder: Embedder, queries: Sequence[Query], present: Sequence[bool]) -> Vectors:
    """Return unit rows, with zeros where the part is absent."""
    rows = np.zeros((len(queries), embedder.dimension), np.float32)
    chosen = [query for query, has in zip(queries, present, strict=True) if has]
    if chosen:
        rows[np.array(present)] = unit(embedder.embed(chosen))
    return rows


class PhotographDispatchEmbedder:
    """Image embedder with one part of the vector for photographs and one for other images.

    The other part is zero, so the inner product of a photograph and another image is 0.
    """

    def __init__(self, photographs: Embedder, others: Embedder) -> None:
        self._photographs, self._others = photographs, others
        # Version 2 recognises grey photographs.
        self.fingerprint = f"by-kind 2 ({photographs.fingerprint}) ({others.fingerprint})"

    @property
    def dimension(self) -> int:
        return self._photographs.dimension + self._others.dimension

    def embed(self, queries: Sequence[Query]) -> Vectors:
        photographs = [all(map(is_photograph, query.images)) for query in queries]
        others = [not one for one in photographs]
        parts = (self._photographs, photographs), (self._others, others)
        return np.hstack([embed_part(embedder, queries, given) for embedder, given in parts])
