"""From queries with any number of images to one vector each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image as Pillow

from bottega.errors import EmbeddingError
from bottega.knowledge.vectors import unit
from bottega.protocols import Vectors
from bottega.types import Query

Encode = Callable[[list[Pillow.Image]], Vectors]


def embed_images(
    queries: Sequence[Query], encode: Encode, *, dimension: int, at_least: int, batch_size: int
) -> Vectors:
    """A query with several images gets the mean of their vectors. Nothing is scaled.

    Images are decoded a batch at a time, with at least `at_least` pixels a side.
    """
    counts = [_count(query) for query in queries]
    images = [image for query in queries for image in query.images]
    if not images:
        return np.empty((0, dimension), np.float32)
    vectors = np.concatenate(
        [
            encode([image.decode(at_least) for image in images[start : start + batch_size]])
            for start in range(0, len(images), batch_size)
        ]
    )
    if len(images) == len(queries):
        return vectors
    starts = np.cumsum([0, *counts[:-1]])
    sums = np.add.reduceat(vectors, starts, axis=0)
    return np.asarray(sums / np.array(counts)[:, None], np.float32)


def unit_images(
    queries: Sequence[Query], encode: Encode, *, dimension: int, at_least: int, batch_size: int
) -> Vectors:
    """As `embed_images`, with unit vectors averaged and the mean scaled to length one."""
    return unit(
        embed_images(
            queries,
            lambda pictures: unit(encode(pictures)),
            dimension=dimension,
            at_least=at_least,
            batch_size=batch_size,
        )
    )


def _count(query: Query) -> int:
    if not query.images:
        raise EmbeddingError(
            f"the query {query.text!r} has no image, and this embedder reads only images",
            hint="add an image, or use a text embedder: SentenceEmbedder(model, mode='text')",
        )
    return len(query.images)
