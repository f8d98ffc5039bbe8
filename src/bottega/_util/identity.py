"""Identity of queries: keys, random states and exclusion rules that depend on the content."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Literal

from bottega.types import Example, Query


def image_hashes(query: Query) -> tuple[str, ...]:
    """Return the sha256 of each image in order."""
    return tuple(image.sha256 for image in query.images)


def query_key(query: Query) -> tuple[str, ...]:
    """Return the text and the image hashes."""
    return query.text, *image_hashes(query)


def query_rng(query: Query, seed: object) -> random.Random:
    """Return a generator seeded by the query's content, so results do not depend on query order."""
    # Published runs depend on this text, with its last colon also for a query without images.
    return random.Random(f"{seed}:{query.text}:{':'.join(image_hashes(query))}")


# "same-image" excludes every example that shares an image with the query. Evaluations need it:
# another question about the same image may give the answer away. "same-question" excludes only the
# identical question, so a cache can show earlier answers about the same image.
Exclude = Literal["same-image", "same-question"]
DESCRIPTIONS: Mapping[Exclude, str] = {
    "same-image": "every example that shares an image with the query",
    "same-question": "the same question only",
}


def is_excluded(query: Query, example: Example, exclude: Exclude = "same-image") -> bool:
    """Return whether the rule excludes the example; the query's own id is always excluded."""
    if query.id is not None and query.id == example.id:
        return True
    if exclude == "same-question":
        return is_same_question(query, example)
    return not set(query.images).isdisjoint(example.query.images)


def is_same_question(query: Query, example: Example) -> bool:
    """Compare images, text, choices and context. An example without choices matches any choices;
    one without a context (`tags["context"]`) matches any context."""
    other = example.query
    return (
        query.text == other.text
        and query.images == other.images
        and other.choices in ((), query.choices)
        and example.tags.get("context", query.context) == query.context
    )
