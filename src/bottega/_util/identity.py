"""Keys that are equal for queries with the same content."""

from __future__ import annotations

from bottega.types import Query


def image_hashes(query: Query) -> tuple[str, ...]:
    """Return the sha256 of each image in order."""
    return tuple(image.sha256 for image in query.images)


def query_key(query: Query) -> tuple[str, ...]:
    """Return the text and the image hashes."""
    return query.text, *image_hashes(query)
