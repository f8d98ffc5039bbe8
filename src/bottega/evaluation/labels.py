"""What an example says."""

from __future__ import annotations

from collections.abc import Iterable

from bottega.types import Example


def labels_of(example: Example) -> tuple[str, ...]:
    return (example.answer,) if example.labels is None else example.labels


def is_passage(example: Example) -> bool:
    """Whether it is read, not imitated."""
    return not example.answer


def says_which(items: Iterable[Example]) -> bool:
    """Whether each names the passage that answers it."""
    return all("passage" in item.tags for item in items)
