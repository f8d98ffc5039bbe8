"""What an example says."""

from __future__ import annotations

from bottega.types import Example


def labels_of(example: Example) -> tuple[str, ...]:
    return (example.answer,) if example.labels is None else example.labels


def is_passage(example: Example) -> bool:
    """Whether it is read, not imitated."""
    return not example.answer
