"""Labels, passages and ids of examples."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from bottega.errors import SettingError
from bottega.types import Example

# How a passage contains an answer: see `contains_answer`.
Relevance = Literal["contains", "stems", "words"]


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


def contains_answer(
    passage: str, answers: Iterable[str], relevance: Relevance = "contains"
) -> bool:
    """Return whether the passage contains an answer, in any case.

    `contains`, the rule of OK-VQA's retrievers and of RACC (Luo et al. 2021), finds "art" in
    "start". `stems` also allows other word endings: it finds "surf board" in "surfing
    boards". `words` requires whole words.
    """
    text = fold(passage)
    return any(
        answer in text if relevance == "contains" else re.search(_pattern(answer, relevance), text)
        for answer in map(fold, answers)
        if answer
    )


def _pattern(answer: str, relevance: Relevance) -> str:
    if relevance == "stems":
        return r"\w* ".join(map(re.escape, answer.split()))
    return rf"(?<!\w){re.escape(answer)}(?!\w)"


def fold(text: str) -> str:
    """Return the text in lower case with single spaces."""
    return " ".join(text.casefold().split())
