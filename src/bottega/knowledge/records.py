"""Identity of an example, and its conversion to and from a database row."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import orjson

from bottega._util.identity import identity
from bottega.image import Image
from bottega.protocols import Vectors
from bottega.types import Example, Query

Value = str | int | float | bytes | None
COLUMNS = (
    "id",
    "question",
    "answer",
    "choices",
    "labels",
    "rationale",
    "tags",
    "source",
    "created",
)


@dataclass(frozen=True)
class RowMetadata:
    """Age, pin and counters of a stored example; times are unix seconds."""

    created: float
    uses: int = 0
    last_used: float | None = None
    saved_usd: float = 0.0
    pinned: bool = False


def identity_without_choices(example: Example) -> str:
    """Return the id that format 5 and older gave the example."""
    query = example.query
    return identity(replace(example, query=replace(query, choices=())))


def has_valid_id(example: Example) -> bool:
    """Return whether the id still matches the content."""
    try:
        return identity(example) == example.id
    except TypeError:  # a field is not a text
        return False


def find_damage(example: Example) -> str | None:
    """Return a description of the damage to a stored example, or None."""
    for image in example.query.images:
        data = image.data  # SQLite holds any type in any column
        if not isinstance(data, bytes) or hashlib.sha256(data).hexdigest() != image.sha256:
            return f"the bytes of image {image.sha256} are not those that were stored"
    return None if has_valid_id(example) else "it has another question, answer or image"


def is_text(value: object) -> bool:
    """Return whether the value is a string that SQLite stores faithfully.

    It must be encodable in UTF-8 and contain no NUL, because SQLite's functions read a text only up
    to a NUL: two labels could look equal.
    """
    try:
        return isinstance(value, str) and b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


def with_id(example: Example, id: str) -> Example:
    """Return the example with this id and copies of its images, so the caller's images do not keep
    the pixels that are decoded here."""
    images = tuple(image.detached_copy() for image in example.query.images)
    return replace(example, id=id, query=replace(example.query, images=images))


def to_row(example: Example) -> tuple[Value, ...]:
    """Return the values of `COLUMNS`, in their order."""
    query = example.query
    return (
        example.id,
        query.text,
        example.answer,
        _json(query.choices),
        None if example.labels is None else _json(example.labels),
        example.rationale,
        _json(dict(example.tags)),
        example.source,
        time.time(),
    )


def from_row(row: sqlite3.Row, images: Sequence[Image]) -> Example:
    """Return the example of a row.

    Raises `TypeError` or `ValueError` for a damaged value: SQLite holds any type in any column, and
    one flipped bit turns a text into a blob.
    """
    id, labels = text_of(row["id"]), row["labels"]
    return Example(
        Query(text_of(row["question"]), tuple(images), _texts(row["choices"]), id=id),
        text_of(row["answer"]),
        labels=None if labels is None else _texts(labels),
        rationale=_optional(row["rationale"]),
        tags=_tags(row["tags"]),
        source=_optional(row["source"]),
        id=id,
    )


def text_of(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!a} should be a text")
    return value


def _optional(value: object) -> str | None:
    return None if value is None else text_of(value)


def _texts(value: str) -> tuple[str, ...]:
    texts = orjson.loads(value)
    if not isinstance(texts, list):
        raise TypeError(f"{value!a} should be a list")
    return tuple(map(text_of, texts))


def _tags(value: str) -> dict[str, str]:
    tags = orjson.loads(value)
    if not isinstance(tags, dict):
        raise TypeError(f"{value!a} should be an object")
    return {name: text_of(tag) for name, tag in tags.items()}


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


TINY = np.finfo(np.float32).tiny


def unit(rows: Vectors) -> Vectors:
    """Return rows scaled to length one; a row of zeros stays zero."""
    # np.linalg.norm has more overhead than this whole computation.
    lengths = np.sqrt((rows * rows).sum(axis=-1, keepdims=True))
    scaled: Vectors = rows / np.maximum(lengths, TINY)
    return scaled.astype(np.float32, copy=False)
