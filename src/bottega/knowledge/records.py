"""Records of a knowledge base: identities, database rows, views and their vectors."""

from __future__ import annotations

import hashlib
import re
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import orjson

from bottega._util.identity import identity
from bottega.errors import (
    EmbedderMismatchError,
    EmbeddingError,
    NotFoundError,
    SettingError,
    StoreError,
)
from bottega.image import Image
from bottega.protocols import Embedder, Vectors
from bottega.types import Example, Query

MAX_NUMBER = 2**62
NO_NUMBERS = "its metadata must be numbers"
ColumnValue = str | int | float | bytes | None
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
TINY = np.finfo(np.float32).tiny
DEFAULT = "default"
# View names become parts of file names.
NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
# Lone surrogates: valid in JSON, but rejected by tokenizers.
SURROGATES = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True)
class RowMetadata:
    """Age, pin and counters of a stored example; times are unix seconds."""

    created: float
    uses: int = 0
    last_used: float | None = None
    saved_usd: float = 0.0
    pinned: bool = False


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


def to_row(example: Example) -> tuple[ColumnValue, ...]:
    """Return the values of `COLUMNS`, in their order."""
    query = example.query
    return (
        example.id,
        query.text,
        example.answer,
        to_json(query.choices),
        None if example.labels is None else to_json(example.labels),
        example.rationale,
        to_json(dict(example.tags)),
        example.source,
        time.time(),
    )


def from_row(row: sqlite3.Row, images: Sequence[Image]) -> Example:
    """Return the example of a row.

    Raises `TypeError` or `ValueError` for a damaged value: SQLite holds any type in any column, and
    one flipped bit turns a text into a blob.
    """
    id, labels = storable_text(row["id"]), row["labels"]
    tags = orjson.loads(row["tags"])
    if not isinstance(tags, dict):
        raise TypeError(f"tags must be an object, got {tags!a}")
    return Example(
        Query(storable_text(row["question"]), tuple(images), _texts(row["choices"]), id=id),
        storable_text(row["answer"]),
        labels=None if labels is None else _texts(labels),
        rationale=_optional(row["rationale"]),
        tags={name: storable_text(tag) for name, tag in tags.items()},
        source=_optional(row["source"]),
        id=id,
    )


def storable_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {value!a}")
    return value


def _optional(value: object) -> str | None:
    return None if value is None else storable_text(value)


def _texts(value: str) -> tuple[str, ...]:
    texts = orjson.loads(value)
    if not isinstance(texts, list):
        raise TypeError(f"expected a list, got {value!a}")
    return tuple(map(storable_text, texts))


def to_json(value: object) -> str:
    return orjson.dumps(value).decode()


def unit(rows: Vectors) -> Vectors:
    """Return rows scaled to length one; a row of zeros stays zero."""
    # np.linalg.norm has more overhead than this whole computation.
    lengths = np.sqrt((rows * rows).sum(axis=-1, keepdims=True))
    scaled: Vectors = rows / np.maximum(lengths, TINY)
    return scaled.astype(np.float32, copy=False)


@dataclass(frozen=True)
class Change:
    """Entry of the change log. `vector` is None if the row has been deleted since.

    `key` identifies a row for the index and is never reused.
    """

    seq: int
    key: int
    vector: Vectors | None


class SearchHit(NamedTuple):
    """Key of a row and its score; higher is better."""

    key: int
    score: float


@dataclass(frozen=True)
class EmbeddedBatch:
    """Vectors (n, dimension) of a batch of examples and the fingerprint of their embedder."""

    fingerprint: str
    vectors: Vectors


@dataclass(frozen=True)
class StoredView:
    """Named vector that every row has. `number` changes when another embedder replaces it."""

    number: int
    name: str
    fingerprint: str
    dimension: int


@dataclass(frozen=True)
class UsageRecord:
    """Number of times an example was shown, the last time (unix seconds), and US dollars saved."""

    count: int
    last_used: float
    saved_usd: float


@dataclass(frozen=True)
class Footprint:
    """Numbers of examples, images and pinned examples in the namespace; `bytes` of the whole
    file."""

    examples: int
    images: int
    pinned: int
    bytes: int
    format_version: int


@dataclass(frozen=True)
class View:
    """Embedder of a named vector. `to_query` selects the content to embed; by default the example's
    query. A knowledge base that lacks the vectors of an `optional` view is used without it."""

    embed: Embedder
    to_query: Callable[[Example], Query] | None = None
    optional: bool = False

    def vectors(self, examples: Sequence[Example]) -> Vectors:
        """Return one finite row (n, dimension) per example. Raises `EmbeddingError`."""
        if not examples:
            return np.empty((0, self.embed.dimension), np.float32)
        to_query = self.to_query or (lambda example: example.query)
        return embed_checked(self.embed, [to_query(example) for example in examples], "examples")


class Views:
    """Views of one handle. A single embedder is one view named `default`."""

    def __init__(self, given: Embedder | Mapping[str, View] | None) -> None:
        self._bare = None if given is None or isinstance(given, Mapping) else View(given)
        self._named = dict(given) if isinstance(given, Mapping) else {}
        if isinstance(given, Mapping) and not given:
            raise SettingError("embed has no views", hint="use embed={'image': View(embedder)}")
        for name, view in self._named.items():
            check_name(name)
            if not isinstance(view, View):
                raise SettingError(
                    f"view {name!r} must be a View, got {type(view).__name__}",
                    hint=f"use embed={{{name!r}: View(embedder)}}",
                )

    def __bool__(self) -> bool:
        return self._bare is not None or bool(self._named)

    @property
    def has_optional(self) -> bool:
        return any(view.optional for view in self._named.values())

    def resolve(self, stored: Mapping[str, StoredView]) -> dict[str, View]:
        """Return the views by name, the default first. Raises if the stored vectors have other
        fingerprints."""
        named = self._named
        if self._bare is not None:
            embed = self._bare.embed
            name = _stored_name(embed, stored)
            if name is None:
                first = next(iter(stored.values()))
                raise EmbedderMismatchError(first.fingerprint, embed.fingerprint)
            named = {name: self._bare}
        if stored:
            named = {name: one for name, one in named.items() if name in stored or not one.optional}
            check_views(stored, {name: view.embed.fingerprint for name, view in named.items()})
        return named

    def choose(
        self, stored: Mapping[str, StoredView], by: str | None
    ) -> tuple[StoredView | None, View]:
        """Return the stored view `by`, by default the first one, and its embedder. The former is
        None before the first example is added."""
        given = self.resolve(stored)
        name = next(iter(given)) if by is None else by
        if name not in given:
            raise SettingError(
                f"view {name!r} does not exist", hint=f"search by one of {', '.join(given)}"
            )
        return stored.get(name), given[name]

    def replace(self, name: str, view: View, stored: Mapping[str, StoredView]) -> None:
        """Use another embedder for this view, if the handle has the view."""
        if self._bare is not None:
            # A single embedder denotes one view; the file may have gained others.
            if _stored_name(self._bare.embed, stored) in (name, None):
                self._bare = view
        elif name in self._named:
            self._named[name] = view


def _stored_name(embed: Embedder, stored: Mapping[str, StoredView]) -> str | None:
    if not stored or DEFAULT in stored:
        return DEFAULT
    made = (name for name, view in stored.items() if view.fingerprint == embed.fingerprint)
    return next(made, None)


def check_views(stored: Mapping[str, StoredView], fingerprints: Mapping[str, str]) -> None:
    """Raise unless every view is stored with this fingerprint."""
    for name, fingerprint in fingerprints.items():
        if name not in stored:
            raise StoreError(
                f"view {name!r} does not exist, only {', '.join(stored)}",
                hint=f"run bottega reindex --by {name}, or knowledge.reindex({name!r}, View(...))",
            )
        if stored[name].fingerprint != fingerprint:
            raise EmbedderMismatchError(stored[name].fingerprint, fingerprint)


def more_views_error(missing: Iterable[str]) -> SettingError:
    return SettingError(
        f"the knowledge base has more views than given: {', '.join(sorted(missing))}",
        hint="open it with all views to add: KnowledgeBase.open(path, {name: View(...)})",
    )


def check_dimensions(stored: Mapping[str, StoredView], widths: Mapping[str, int]) -> None:
    """Raise `StoreError` unless the dimensions match those of the stored views."""
    for name, width in widths.items():
        if stored[name].dimension != width:
            raise StoreError(
                f"the stored vectors {name!r} have {stored[name].dimension} numbers, but"
                f" {stored[name].fingerprint!r} now returns {width}",
                hint="change the fingerprint of an embedder when its vectors change",
            )


def check_name(name: str) -> None:
    """Raise `SettingError` unless the name is valid for a view."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise SettingError(
            f"view name is invalid, got {name!r}", hint="use up to 40 letters, digits, - and _"
        )


def embed_checked(embed: Embedder, queries: Sequence[Query], what: str) -> Vectors:
    """Return one finite row per query, or raise `EmbeddingError`."""
    for query in queries:
        if not query.text.isascii() and SURROGATES.search(query.text):
            raise EmbeddingError(
                f"the text contains lone surrogates, got {query.text!a}", hint="send valid Unicode"
            )
    made = embed.embed(queries)
    try:
        with np.errstate(over="ignore"):
            vectors = np.asarray(made, np.float32)
            lengths = np.square(vectors).sum(axis=-1)
    except (TypeError, ValueError) as error:
        raise EmbeddingError(
            f"{embed.fingerprint} returned {type(made).__name__} for {len(queries)} {what}",
            hint=f"return an array with one row of {embed.dimension} numbers per query",
        ) from error
    if vectors.shape != (len(queries), embed.dimension):
        raise EmbeddingError(
            f"{embed.fingerprint} returned {vectors.shape} for {len(queries)} {what}",
            hint=f"return one row of {embed.dimension} numbers per query",
        )
    if not np.isfinite(lengths).all():
        raise EmbeddingError(
            f"{embed.fingerprint} returned NaN, infinite or too large numbers",
            hint="check the weights; half precision may overflow",
        )
    return vectors


def check_known(ids: Collection[str], known: Collection[str]) -> None:
    """Raise `NotFoundError` for an id that is not known."""
    if unknown := set(ids).difference(known):
        raise unknown_id_error(min(unknown))


def unknown_id_error(id: str) -> NotFoundError:
    return NotFoundError(f"no example has the id {id!r}", hint="bottega ls shows the ids")


def dropped_view_error() -> StoreError:
    return StoreError(
        "another process started to reindex this view with another embedder",
        hint="let one run finish, then reindex again if needed",
    )


def is_numeric(metadata: RowMetadata) -> bool:
    numbers = [metadata.created, metadata.uses, metadata.last_used or 0, metadata.saved_usd]
    return all(isinstance(number, int | float) and abs(number) < MAX_NUMBER for number in numbers)
