"""What an example says."""

from __future__ import annotations

from collections.abc import Iterable

from bottega.errors import SettingError
from bottega.types import Example


def labels_of(example: Example) -> tuple[str, ...]:
    return (example.answer,) if example.labels is None else example.labels


def is_passage(example: Example) -> bool:
    """Whether it is read, not imitated."""
    return not example.answer


def names_passages(items: Iterable[Example]) -> bool:
    """Whether each names the passage that answers it."""
    return all("passage" in item.tags for item in items)


def by_id(items: Iterable[Example]) -> dict[str, Example]:
    """In their order. Raises `SettingError` for one without an id, or with another one's."""
    named: dict[str, Example] = {}
    for item in items:
        id = item.query.id
        if not id or id in named:
            said = f"the id {id!r} is that of two questions" if id else "a question has no id"
            raise SettingError(
                f"{said}, and what is read belongs to an id: {item.query.text!r}",
                hint="give each question that is asked an id of its own, or leave oracle, concat"
                " and racc out",
            )
        named[id] = item
    return named
