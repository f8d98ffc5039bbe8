"""Interfaces of the source and the target of a copy, with keys and change numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from bottega._util.identity import json_digest, question_digest
from bottega.errors import StoreError
from bottega.knowledge.records import (
    COLUMNS,
    NO_NUMBERS,
    RowMetadata,
    StoredView,
    find_damage,
    is_numeric,
    to_row,
)
from bottega.knowledge.stores import RowStore
from bottega.protocols import Vectors
from bottega.types import Example

ALL_COLUMNS = ("key", *COLUMNS, "namespace", "question_digest")

END = 2**62  # above all keys and change numbers
BATCH_ROWS = 256
BATCH_BYTES = 32_000_000


class RowHeader(NamedTuple):
    key: int
    namespace: str
    bytes: int  # of its images


class LogEntry(NamedTuple):
    """Entry of the change log."""

    seq: int
    op: str
    key: int
    id: str
    namespace: str


@dataclass(frozen=True)
class StoredRow:
    """Row of any namespace with its vectors by view name, None for a missing or damaged vector."""

    key: int
    namespace: str
    example: Example
    metadata: RowMetadata
    vectors: Mapping[str, Vectors | None]

    def damage(self) -> str | None:
        """Return a description of the damage, or None."""
        for name, vector in self.vectors.items():
            if vector is None:
                return f"its vector {name!r} is missing or damaged"
        return find_damage(self.example) or (None if is_numeric(self.metadata) else NO_NUMBERS)

    def digests(self) -> RowDigests:
        one, query, use = self.example, self.example.query, self.metadata
        return RowDigests(
            json_digest(
                [
                    *(self.key, self.namespace, one.id, query.text, one.answer, query.choices),
                    *(one.labels, one.rationale, dict(one.tags), one.source),
                    *(float(use.created), use.uses, use.last_used, float(use.saved_usd)),
                    bool(use.pinned),
                ],
                sort_keys=True,
            ),
            json_digest(
                [
                    [
                        *(hashlib.sha256(image.data).hexdigest(), image.media_type),
                        *(image.width, image.height, image.source),
                    ]
                    for image in query.images
                ]
            ),
            json_digest(
                [
                    [name, None if vector is None else hashlib.sha256(vector.tobytes()).hexdigest()]
                    for name, vector in self.vectors.items()
                ]
            ),
        )


class RowDigests(NamedTuple):
    """Digests of a row by its parts; `images` and `vectors` are computed from the bytes."""

    examples: str
    images: str
    vectors: str


class CopySource(RowStore, Protocol):
    """Store to read, with the rows and changes of all namespaces."""

    @property
    def location(self) -> str:
        """Absolute path of the file, or name of the database."""
        ...

    def headers(self, after: int, last: int, limit: int) -> list[RowHeader]:
        """Return the next rows with keys above `after` up to `last`, ascending."""
        ...

    def logged(self, after: int, limit: int) -> list[LogEntry]:
        """Return the next entries of the change log that name an example."""
        ...

    def notes(self) -> dict[str, str]: ...

    def pruned_by_namespace(self) -> dict[str, int]: ...

    def count_images(self) -> int: ...

    def uncopied(self) -> list[str]:
        """Return descriptions of stored content that a copy omits."""
        ...


class CopyTarget(CopySource, Protocol):
    """Store to write: a new one, or one with an unfinished copy."""

    def all_views(self) -> list[StoredView]:
        """Return all views, complete or not."""
        ...

    def begin(self, source: str, views: Sequence[StoredView]) -> None:
        """Record the source and create its views. Raises `StoreError` if the target contains
        anything but an unfinished copy of the same source."""
        ...

    def replace_rows(
        self, after: int, last: int, rows: Sequence[StoredRow], views: Sequence[StoredView]
    ) -> None:
        """Replace the rows with keys above `after` up to `last`, in one transaction."""
        ...

    def replace_log(self, after: int, last: int, entries: Sequence[LogEntry]) -> None:
        """Replace the log entries above `after` up to `last`, in one transaction."""
        ...

    def write_settings(self, notes: Mapping[str, str], pruned: Mapping[str, int]) -> None:
        """Replace the notes, and continue keys and change numbers after those of the source."""
        ...

    def publish(self) -> None:
        """Make the copy usable, in one step. Call no other method afterwards."""
        ...


def row_batches(
    store: CopySource, views: Sequence[StoredView], after: int = 0, last: int = END
) -> Iterator[tuple[int, list[StoredRow]]]:
    """Yield the rows with keys above `after` up to `last`, in batches of limited rows
    and bytes, each with the highest key that it covers. Concurrently deleted rows are absent."""
    while headers := _limited(store.headers(after, last, BATCH_ROWS)):
        keys = [header.key for header in headers]
        examples, metadata = store.by_keys(keys), store.metadata_by_id(keys)
        vectors = {view.name: store.checked_vectors(keys, view) for view in views}
        parts: list[Container[int]] = [examples, metadata, *vectors.values()]
        yield (
            keys[-1],
            [
                StoredRow(
                    *(key, namespace, examples[key], metadata[key]),
                    {name: found[key] for name, found in vectors.items()},
                )
                for key, namespace, _ in headers
                if all(key in found for found in parts)
            ],
        )
        after = keys[-1]


def _limited(headers: list[RowHeader]) -> list[RowHeader]:
    """Return the first rows, at most `BATCH_BYTES` in total but at least one row."""
    total = 0
    for count, header in enumerate(headers):
        total += header.bytes
        if count and total > BATCH_BYTES:
            return headers[:count]
    return headers


def unfinished_views(views: Iterable[tuple[str, str, int]]) -> list[str]:
    return [
        f"vectors of an unfinished reindex of the view {name!r} with {fingerprint} ({count})"
        for name, fingerprint, count in views
    ]


def other_source_error(target: str, stored: str, given: str, remedy: str) -> StoreError:
    return StoreError(
        f"{target} contains an unfinished copy of {stored}, not of {given}",
        hint=f"set FROM to {stored}, or set another TO, or {remedy}",
    )


def example_values(row: StoredRow) -> tuple[object, ...]:
    """Return the values of `key`, `COLUMNS`, `namespace` and `question_digest`."""
    *fields, _ = to_row(row.example)  # `to_row` sets `created` to the present time
    digest = question_digest(row.example)
    return (row.key, *fields, float(row.metadata.created), row.namespace, digest)


def image_values(rows: Sequence[StoredRow]) -> list[tuple[object, ...]]:
    """Return hash, media type, width, height and bytes of each image once, by hash."""
    images = {image.sha256: image for row in rows for image in row.example.query.images}
    return [
        (one.sha256, one.media_type, one.width, one.height, one.data)
        for _, one in sorted(images.items())
    ]


def shown_values(rows: Sequence[StoredRow]) -> list[tuple[object, ...]]:
    return [
        (row.key, position, image.sha256, image.source)
        for row in rows
        for position, image in enumerate(row.example.query.images)
    ]


def use_values(rows: Sequence[StoredRow]) -> list[tuple[object, ...]]:
    uses = [(row.key, row.metadata) for row in rows]
    return [
        (key, use.uses, use.last_used, float(use.saved_usd), bool(use.pinned)) for key, use in uses
    ]
