"""Rows of a store as source and target of a copy, with keys and change numbers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bottega._util.identity import json_digest, question_digest
from bottega._util.sql_tables import placeholders
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
from bottega.knowledge.stores import UNFINISHED, RowStore
from bottega.protocols import Vectors
from bottega.types import Example

ALL_COLUMNS = ("key", *COLUMNS, "namespace", "question_digest")
# Statement and its values, one list per run.
RepeatedStatement = tuple[str, Sequence[Sequence[Any]]]
ALL_VIEWS = "SELECT number, name, fingerprint, dimension FROM kb_views"
LOG_PAGE = 4096
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


class CopyStore(ABC):
    """Source or target of a copy: the rows of all namespaces with their keys and change numbers.

    Statements are valid in SQLite and PostgreSQL, with parameters such as ?1 and the table names of
    PostgreSQL. `location` is the absolute path of the file, or the name of the database.
    """

    image_bytes = "length(data)"
    row_tables: tuple[str, ...] = ("kb_examples",)
    insert_change = "INSERT INTO kb_changes (seq, op, key, id, namespace)"
    continue_numbers: tuple[str, ...]  # statements: keys in the log must not be reused

    def __init__(self, rows: RowStore, *, name: str, location: str) -> None:
        self.rows, self.name, self.location = rows, name, location

    @abstractmethod
    def read(self, statement: str, *values: Any) -> list[tuple[Any, ...]]: ...

    @abstractmethod
    def write(self, statements: Iterable[RepeatedStatement]) -> None:
        """Run each statement with each of its values, all in one transaction."""

    @abstractmethod
    def begin(self, source: str, views: Sequence[StoredView]) -> None:
        """Record the source and create its views. Raises `StoreError` if the target contains
        anything but an unfinished copy of the same source."""

    @abstractmethod
    def pruned_by_namespace(self) -> dict[str, int]: ...

    @abstractmethod
    def write_pruned(self, pruned: Mapping[str, int]) -> list[RepeatedStatement]: ...

    @abstractmethod
    def insert_vectors(self, view: StoredView, rows: Sequence[StoredRow]) -> RepeatedStatement: ...

    def headers(self, after: int, last: int, limit: int) -> list[RowHeader]:
        """Return the next rows with keys above `after` up to `last`, ascending."""
        found = self.read(
            f"SELECT key, namespace, (SELECT coalesce(sum({self.image_bytes}), 0)"
            " FROM kb_example_images AS shown JOIN kb_images USING (sha256)"
            " WHERE shown.key = kb_examples.key)"
            " FROM kb_examples WHERE key > ?1 AND key <= ?2 ORDER BY key LIMIT ?3",
            *(after, last, limit),
        )
        return [RowHeader(*row) for row in found]

    def row_batches(
        self, views: Sequence[StoredView], after: int = 0, last: int = END
    ) -> Iterator[tuple[int, list[StoredRow]]]:
        """Yield the rows with keys above `after` up to `last`, in batches of limited rows and
        bytes, each with the highest key that it covers. Concurrently deleted rows are absent."""
        while headers := _limited(self.headers(after, last, BATCH_ROWS)):
            keys = [header.key for header in headers]
            examples, metadata = self.rows.by_keys(keys), self.rows.metadata_by_id(keys)
            vectors = {view.name: self.rows.checked_vectors(keys, view) for view in views}
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

    def logged(self, after: int) -> list[LogEntry]:
        """Return the next entries of the change log that name an example."""
        found = self.read(
            "SELECT seq, op, key, id, namespace FROM kb_changes"
            f" WHERE op != 'view' AND seq > ?1 ORDER BY seq LIMIT {LOG_PAGE}",
            after,
        )
        return [LogEntry(*row) for row in found]

    def log_batches(self) -> Iterator[tuple[int, int, list[LogEntry]]]:
        """Yield ranges that together cover all change numbers, with their entries."""
        after = 0
        while entries := self.logged(after):
            yield after, entries[-1].seq, entries
            after = entries[-1].seq
        yield after, END, []

    def notes(self) -> dict[str, str]:
        found = self.read("SELECT name, value FROM kb_notes WHERE name != ?1", UNFINISHED)
        return dict(sorted(found))

    def count_images(self) -> int:
        counted = (
            "SELECT count(DISTINCT sha256) FROM kb_example_images JOIN kb_examples USING (key)"
        )
        return int(self.read(counted)[0][0])

    def all_views(self) -> list[StoredView]:
        """Return all views, complete or not."""
        return [StoredView(*row) for row in self.read(f"{ALL_VIEWS} ORDER BY number")]

    def uncopied(self) -> list[str]:
        """Return descriptions of stored content that a copy omits."""
        unfinished = [
            f"vectors of an unfinished reindex of the view {name!r} with {fingerprint}"
            f" ({self.rows.count_vectors(number)})"
            for number, name, fingerprint, _ in self.read(
                f"{ALL_VIEWS} WHERE NOT complete ORDER BY number"
            )
        ]
        ((images,),) = self.read(
            "SELECT count(*) FROM kb_images WHERE NOT EXISTS (SELECT 1 FROM kb_example_images"
            " AS shown JOIN kb_examples USING (key) WHERE shown.sha256 = kb_images.sha256)"
        )
        return [*unfinished, *([f"images that no example uses ({images})"] if images else [])]

    def replace_rows(
        self, after: int, last: int, rows: Sequence[StoredRow], views: Sequence[StoredView]
    ) -> None:
        """Replace the rows with keys above `after` up to `last`, in one transaction."""
        shown = [
            (row.key, position, image)
            for row in rows
            for position, image in enumerate(row.example.query.images)
        ]
        images = {image.sha256: image for _, _, image in shown}
        uses = [(row.key, row.metadata) for row in rows]
        self.write(
            [
                *(
                    (f"DELETE FROM {table} WHERE key > ?1 AND key <= ?2", [(after, last)])
                    for table in self.row_tables
                ),
                (
                    f"INSERT INTO kb_examples ({', '.join(ALL_COLUMNS)})"
                    f" VALUES ({placeholders(len(ALL_COLUMNS))})",
                    [_example_values(row) for row in rows],
                ),
                (
                    "INSERT INTO kb_images AS kept VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT (sha256)"
                    " DO UPDATE SET data = excluded.data WHERE kept.data != excluded.data",
                    [
                        (one.sha256, one.media_type, one.width, one.height, one.data)
                        for _, one in sorted(images.items())
                    ],
                ),
                (
                    "INSERT INTO kb_example_images VALUES (?1, ?2, ?3, ?4)",
                    [(key, position, one.sha256, one.source) for key, position, one in shown],
                ),
                (
                    "INSERT INTO kb_uses (key, count, last_used, saved_usd, pinned)"
                    " VALUES (?1, ?2, ?3, ?4, ?5)",
                    [
                        (key, use.uses, use.last_used, float(use.saved_usd), bool(use.pinned))
                        for key, use in uses
                    ],
                ),
                *(self.insert_vectors(view, rows) for view in views),
            ]
        )

    def replace_log(self, after: int, last: int, entries: Sequence[LogEntry]) -> None:
        """Replace the log entries above `after` up to `last`, in one transaction."""
        self.write(
            [
                ("DELETE FROM kb_changes WHERE seq > ?1 AND seq <= ?2", [(after, last)]),
                (f"{self.insert_change} VALUES (?1, ?2, ?3, ?4, ?5)", entries),
            ]
        )

    def write_settings(self, notes: Mapping[str, str], pruned: Mapping[str, int]) -> None:
        """Replace the notes, and continue keys and change numbers after those of the source."""
        self.write(
            [
                ("DELETE FROM kb_notes WHERE name != ?1", [(UNFINISHED,)]),
                ("INSERT INTO kb_notes VALUES (?1, ?2)", list(notes.items())),
                *self.write_pruned(pruned),
                (
                    "DELETE FROM kb_images WHERE NOT EXISTS (SELECT 1 FROM kb_example_images"
                    " AS kept WHERE kept.sha256 = kb_images.sha256)",
                    [()],
                ),
                *((statement, [()]) for statement in self.continue_numbers),
            ]
        )

    def publish(self) -> None:
        """Make the copy usable, in one step. Call no other method afterwards."""
        self.write(
            [
                ("UPDATE kb_views SET complete = true", [()]),
                ("DELETE FROM kb_notes WHERE name = ?1", [(UNFINISHED,)]),
            ]
        )

    def close(self) -> None:
        self.rows.close()


def _example_values(row: StoredRow) -> tuple[object, ...]:
    """Return the values of `ALL_COLUMNS`."""
    *fields, _ = to_row(row.example)  # `to_row` sets `created` to the present time
    digest = question_digest(row.example)
    return (row.key, *fields, float(row.metadata.created), row.namespace, digest)


def other_source_error(target: str, stored: str, given: str, remedy: str) -> StoreError:
    return StoreError(
        f"{target} contains an unfinished copy of {stored}, not of {given}",
        hint=f"set FROM to {stored}, or set another TO, or {remedy}",
    )


def _limited(headers: list[RowHeader]) -> list[RowHeader]:
    """Return the first rows, at most `BATCH_BYTES` in total but at least one row."""
    total = 0
    for count, header in enumerate(headers):
        total += header.bytes
        if count and total > BATCH_BYTES:
            return headers[:count]
    return headers
