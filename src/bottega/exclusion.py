"""Which stored examples a query must not be shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from bottega.types import Example, Query

# "same-image": every example that shares an image with the query. An evaluation needs it: another
# question about the same image may give the answer away. "same-question": the identical question
# only, which lets a cache show what was answered about the same image before.
Exclude = Literal["same-image", "same-question"]
DESCRIPTIONS: Mapping[Exclude, str] = {
    "same-image": "every example that shares an image with the query",
    "same-question": "the same question only",
}


def is_excluded(query: Query, example: Example, exclude: Exclude = "same-image") -> bool:
    """Return whether the rule excludes the example. One with the query's own id always is."""
    if query.id is not None and query.id == example.id:
        return True
    if exclude == "same-question":
        return is_same_question(query, example)
    return not set(query.images).isdisjoint(example.query.images)


def is_same_question(query: Query, example: Example) -> bool:
    """Compare images, text, choices and context. An example without choices, or without a context
    (`tags["context"]`), suits every one."""
    other = example.query
    return (
        query.text == other.text
        and query.images == other.images
        and other.choices in ((), query.choices)
        and example.tags.get("context", query.context) == query.context
    )
