"""What identifies a query, and which examples are the query itself."""

from __future__ import annotations

from bottega.types import Example, Query


def is_self(query: Query, example: Example) -> bool:
    """Whether the example has the query's id or shows one of its images."""
    same_id = query.id is not None and query.id == example.id
    return same_id or not set(query.images).isdisjoint(example.query.images)


def identity(query: Query) -> str:
    return ":".join((query.text, *(image.sha256 for image in query.images)))
