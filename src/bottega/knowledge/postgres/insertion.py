"""Insertion of examples: one statement per batch, because each statement costs a round trip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from bottega._util.identity import question_digest
from bottega.knowledge.postgres.schema import vectors_table
from bottega.knowledge.records import COLUMNS, to_row
from bottega.protocols import Vectors
from bottega.types import Example

if TYPE_CHECKING:
    from asyncpg import Connection

MAX_STATEMENT_BYTES = 16 << 20  # the protocol carries at most 1 GiB
TYPES = {"choices": "jsonb", "labels": "jsonb", "tags": "jsonb", "created": "float8"}
ALL_COLUMNS = (*COLUMNS, "question_digest")


class ExampleRow(NamedTuple):
    """Example with its vector for each view."""

    example: Example
    vectors: Sequence[Vectors]

    @property
    def size(self) -> int:
        images = sum(len(image.data) for image in self.example.query.images)
        return images + sum(vector.nbytes for vector in self.vectors)


class InsertResult(NamedTuple):
    """Keys of new rows by their ids, and the number of the last change."""

    keys: dict[str, int]
    last_seq: int


async def insert_examples(
    connection: Connection, namespace: str, rows: Sequence[ExampleRow], views: Sequence[int]
) -> InsertResult | None:
    """Insert the rows whose ids are new in the namespace, in order, and log the changes. `views`
    are the numbers of the views that the vectors belong to. If these are not all complete views of
    the database, or if another transaction holds the writers' lock, insert nothing and return None.
    Outside of a transaction, each batch of `MAX_STATEMENT_BYTES` is committed separately.
    """
    import asyncpg

    statement = _statement(tuple(views))
    keys: dict[str, int] = {}
    last = 0
    for batch in _batches(rows):
        try:
            found = await connection.fetch(statement, namespace, *_values(batch))
        except asyncpg.UndefinedTableError:  # the table of a view that another process has replaced
            return None
        if not found[0]["allowed"]:
            return None
        for row in found:
            if row["key"] is not None:
                keys[row["id"]], last = row["key"], row["seq"]
    return InsertResult(keys, last)


@lru_cache(64)
def _statement(views: tuple[int, ...]) -> str:
    """Return the INSERT statement. Its parameters are the namespace and then those of `_values`."""
    types = [f"{TYPES.get(name, 'text')}[]" for name in ALL_COLUMNS]
    columns, count = ", ".join(ALL_COLUMNS), len(ALL_COLUMNS)
    images, shown, vectors = count + 2, count + 7, count + 11
    numbers = ", ".join(map(str, sorted(views)))
    allowed = "(SELECT allowed FROM writer)"
    parts = [
        f"writer AS MATERIALIZED (SELECT kb_try_write(ARRAY[{numbers}]::bigint[]) AS allowed)",
        f"new AS (INSERT INTO kb_examples (namespace, {columns}) SELECT $1::text, {columns}"
        f" FROM {_unnest(2, types)} WITH ORDINALITY AS given ({columns}, ordinal)"
        f" WHERE {allowed} ORDER BY ordinal"
        " ON CONFLICT (namespace, id) DO NOTHING RETURNING key, id)",
        "images AS (INSERT INTO kb_images SELECT * FROM"
        f" {_unnest(images, ['text[]', 'text[]', 'integer[]', 'integer[]', 'bytea[]'])}"
        f" WHERE {allowed} ON CONFLICT DO NOTHING)",
        "shown AS (INSERT INTO kb_example_images SELECT key, position, sha256, source"
        f" FROM {_unnest(shown, ['text[]', 'integer[]', 'text[]', 'text[]'])}"
        " AS given (id, position, sha256, source) JOIN new USING (id))",
        *(
            f"view_{number} AS (INSERT INTO {vectors_table(number)} SELECT key, $1, vector"
            f" FROM {_unnest(parameter, ['text[]', 'vector[]'], [2, parameter])}"
            " AS given (id, vector) JOIN new USING (id))"
            for parameter, number in enumerate(views, start=vectors)
        ),
    ]
    changes = (
        "changes AS (INSERT INTO kb_changes (op, key, id, namespace)"
        " SELECT 'put', key, id, $1 FROM new ORDER BY key RETURNING id, key, seq)"
    )
    return (
        f"WITH {', '.join(parts)}, {changes}"
        " SELECT allowed, id, key, seq FROM writer LEFT JOIN changes ON true ORDER BY key"
    )


def _unnest(first: int, types: Sequence[str], parameters: Sequence[int] | None = None) -> str:
    numbers = parameters or range(first, first + len(types))
    arrays = (f"${n}::{type}" for n, type in zip(numbers, types, strict=True))
    return f"unnest({', '.join(arrays)})"


def _values(rows: Sequence[ExampleRow]) -> Iterator[list[object]]:
    yield from _columns(
        [(*to_row(row.example), question_digest(row.example)) for row in rows], len(ALL_COLUMNS)
    )
    shown = [
        (row.example.id, position, image)
        for row in rows
        for position, image in enumerate(row.example.query.images)
    ]
    images = {image.sha256: image for _, _, image in shown}.values()
    yield from _columns(
        [(one.sha256, one.media_type, one.width, one.height, one.data) for one in images], 5
    )
    yield from _columns([(id, position, one.sha256, one.source) for id, position, one in shown], 4)
    # asyncpg reads an array within an array as a further dimension, but not a memoryview.
    vectors = [tuple(vector.data for vector in row.vectors) for row in rows]
    yield from _columns(vectors, len(rows[0].vectors))


def _columns(rows: Sequence[tuple[object, ...]], count: int) -> Iterator[list[object]]:
    for number in range(count):
        yield [row[number] for row in rows]


def _batches(rows: Sequence[ExampleRow]) -> Iterator[list[ExampleRow]]:
    batch: list[ExampleRow] = []
    size = 0
    for row in rows:
        if batch and size + row.size > MAX_STATEMENT_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(row)
        size += row.size
    if batch:
        yield batch
