"""The text that seeds the random retrievers."""

from __future__ import annotations

from bottega.types import Query


def identity(query: Query) -> str:
    return ":".join((query.text, *(image.sha256 for image in query.images)))
