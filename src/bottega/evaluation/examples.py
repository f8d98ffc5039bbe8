"""Labels, passages and ids of examples."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bottega.errors import SettingError
from bottega.types import Example


def labels_of(example: Example) -> tuple[str, ...]:
    """Return the example's labels; without explicit labels, its answer."""
    return (example.answer,) if example.labels is None else example.labels


def is_passage(example: Example) -> bool:
    """Return whether the example is a passage to read: it has no answer."""
    return not example.answer


def names_passages(items: Iterable[Example]) -> bool:
    """Return whether every item names the passage that answers it, in the tag `passage`."""
    return all("passage" in item.tags for item in items)


def index_by_id(items: Iterable[Example]) -> dict[str, Example]:
    """Index items by query id, in their order. Raises `SettingError` unless ids are unique."""
    indexed: dict[str, Example] = {}
    for item in items:
        id = item.query.id
        if not id or id in indexed:
            problem = f"the id {id!r} is not unique" if id else "an item has no id"
            raise SettingError(
                f"{problem}, got the question {item.query.text!r}",
                hint="give each item its own query id, or remove oracle, concat and racc",
            )
        indexed[id] = item
    return indexed


def contains_answer(passage: str, answers: Iterable[str]) -> bool:
    """Return whether the passage contains an answer as whole words, in any case.

    `is_relevant` in `benchmarks.passages`, the measure of OK-VQA's retrievers, also finds "art" in
    "start".
    """
    text = fold(passage)
    return any(
        re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text)
        for answer in map(fold, answers)
        if answer
    )


def fold(text: str) -> str:
    """Return the text in lower case with single spaces."""
    return " ".join(text.casefold().split())
