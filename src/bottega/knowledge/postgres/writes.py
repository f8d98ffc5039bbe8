"""Statements that change rows, within a transaction. An insertion is one statement per batch,
because each statement costs a round trip."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from bottega._util.identity import question_digest
from bottega.errors import StoreError
from bottega.knowledge.eviction import Capacity
from bottega.knowledge.postgres.schema import (
    MAX_DIMENSION,
    WRITE_LOCK,
    create_vectors,
    vectors_table,
)
from bottega.knowledge.records import (
    COLUMNS,
    EmbeddedBatch,
    RowMetadata,
    StoredView,
    check_dimensions,
    check_views,
    dropped_view_error,
    more_views_error,
    to_row,
)
from bottega.knowledge.stores import (
    CHECK_EVERY,
    KEPT_CHANGES,
    KEPT_SHARE,
    UNFINISHED,
    unfinished_error,
)
from bottega.protocols import Vectors
from bottega.types import Example

if TYPE_CHECKING:
    from asyncpg import Connection

VIEWS = "SELECT number, name, fingerprint, dimension FROM kb_views WHERE complete ORDER BY number"

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


@asynccontextmanager
async def write_transaction(connection: Connection) -> AsyncIterator[None]:
    """Run a transaction that holds the writers' lock. Its start takes one round trip."""
    await connection.execute(
        f"BEGIN ISOLATION LEVEL READ COMMITTED; SELECT pg_advisory_xact_lock({WRITE_LOCK})"
    )
    try:
        yield
        await connection.execute("COMMIT")
    except BaseException:
        try:
            await connection.execute("ROLLBACK")
        except BaseException:
            connection.terminate()  # the pool must not reuse a connection that holds the lock
        raise


async def log_changes(connection: Connection, op: str, keys: Sequence[int]) -> None:
    await connection.execute(
        "INSERT INTO kb_changes (op, key, id, namespace) SELECT $1, key, id, namespace"
        " FROM kb_examples WHERE key = ANY($2::bigint[]) ORDER BY key",
        op,
        list(keys),
    )


async def claim_views(connection: Connection, views: Mapping[str, EmbeddedBatch]) -> list[int]:
    """Return the numbers of the views, in order. The first batch defines the views."""
    stored = {row["name"]: StoredView(*row) for row in await connection.fetch(VIEWS)}
    if not stored:
        note = "SELECT value FROM kb_notes WHERE name = $1"
        # This handle may be older than the copy.
        if source := await connection.fetchval(note, UNFINISHED):
            raise unfinished_error("the database", source)
        if await connection.fetchval("SELECT EXISTS (SELECT 1 FROM kb_examples)"):
            raise StoreError(
                "the stored examples have no vectors",
                hint="run bottega verify --repair, or verify(repair=True)",
            )
        for name, made in views.items():
            await drop_views(connection, name, "fingerprint = $2", made.fingerprint)
            await new_view(connection, name, made.fingerprint, made.vectors.shape[1], True)
        return await claim_views(connection, views)
    check_views(stored, {name: made.fingerprint for name, made in views.items()})
    check_dimensions(stored, {name: made.vectors.shape[1] for name, made in views.items()})
    if missing := stored.keys() - views.keys():
        raise more_views_error(missing)
    return [stored[name].number for name in views]


async def new_view(
    connection: Connection, name: str, fingerprint: str, dimension: int, complete: bool
) -> int:
    number = await connection.fetchval(
        "SELECT nextval(pg_get_serial_sequence('kb_views', 'number'))"
    )
    view = StoredView(number, name, fingerprint, dimension)
    await create_view(connection, view, complete=complete)
    return int(number)


async def create_view(connection: Connection, view: StoredView, *, complete: bool) -> None:
    """Create a view with this number. Raises `StoreError` if its vectors are too long."""
    if view.dimension > MAX_DIMENSION:
        raise StoreError(
            f"the vectors of the view {view.name!r} must have at most {MAX_DIMENSION} numbers in"
            f" PostgreSQL, got {view.dimension}",
            hint="use an embedder with shorter vectors, or keep the knowledge base in a file",
        )
    await connection.execute(
        "INSERT INTO kb_views (number, name, fingerprint, dimension, complete)"
        " VALUES ($1, $2, $3, $4, $5)",
        *(view.number, view.name, view.fingerprint, view.dimension, complete),
    )
    await connection.execute(create_vectors(view.number, view.dimension))


async def drop_views(connection: Connection, name: str, which: str, value: object) -> None:
    dropped = await connection.fetch(
        f"DELETE FROM kb_views WHERE name = $1 AND {which} RETURNING number", name, value
    )
    for row in dropped:
        await connection.execute(f"DROP TABLE {vectors_table(row['number'])}")


async def check_view(connection: Connection, number: int) -> bool:
    """Return whether the view is complete. Raises `StoreError` if another run has dropped it."""
    complete = await connection.fetchval("SELECT complete FROM kb_views WHERE number = $1", number)
    if complete is None:
        raise dropped_view_error()
    return bool(complete)


def without_vector(number: int) -> str:
    return (
        "FROM kb_examples WHERE NOT EXISTS (SELECT 1 FROM"
        f" {vectors_table(number)} AS vectors WHERE vectors.key = kb_examples.key)"
    )


async def remove_rows(connection: Connection, keys: Sequence[int]) -> None:
    """Delete rows with their vectors, usage and unused images, and log the changes."""
    if not keys:
        return
    seen = await connection.fetch(
        "SELECT DISTINCT sha256 FROM kb_example_images WHERE key = ANY($1::bigint[])", list(keys)
    )
    await log_changes(connection, "delete", keys)  # before the deletion, because it reads the rows
    await connection.execute("DELETE FROM kb_examples WHERE key = ANY($1::bigint[])", list(keys))
    # Other examples, also of other namespaces, may share an image.
    await connection.execute(
        "DELETE FROM kb_images WHERE sha256 = ANY($1::text[]) AND NOT EXISTS"
        " (SELECT 1 FROM kb_example_images AS kept WHERE kept.sha256 = kb_images.sha256)",
        [row["sha256"] for row in seen],
    )


async def set_metadata(connection: Connection, key: int, metadata: RowMetadata) -> None:
    await connection.execute(
        "UPDATE kb_examples SET created = $2 WHERE key = $1", key, metadata.created
    )
    await connection.execute(
        "INSERT INTO kb_uses (key, count, last_used, saved_usd, pinned)"
        " VALUES ($1, $2, $3, $4, $5)",
        *(key, metadata.uses, metadata.last_used, metadata.saved_usd, metadata.pinned),
    )


def is_pruning_due(added: int, last: int) -> bool:
    """Return whether one of the last `2 * added` change numbers is a multiple of `CHECK_EVERY`."""
    return last % CHECK_EVERY < 2 * added


async def prune(connection: Connection, added: int, last: int) -> None:
    """Delete old log entries of deleted rows. `last` is the number of the newest change."""
    if not is_pruning_due(added, last):
        return
    rows = await connection.fetchval("SELECT count(*) FROM kb_examples")
    before = last - max(KEPT_CHANGES, rows // KEPT_SHARE)
    droppable = (
        "DELETE FROM kb_changes WHERE seq <= $1"
        " AND NOT EXISTS (SELECT 1 FROM kb_examples AS kept WHERE kept.key = kb_changes.key)"
        " AND seq NOT IN (SELECT max(seq) FROM kb_changes GROUP BY namespace)"
        " RETURNING namespace, seq"
    )
    await connection.execute(
        f"WITH dropped AS ({droppable}) INSERT INTO kb_pruned"
        " SELECT namespace, max(seq) FROM dropped GROUP BY namespace"
        " ON CONFLICT (namespace) DO UPDATE SET seq = excluded.seq",
        before,
    )


async def pinned_questions(
    connection: Connection, namespace: str, examples: Sequence[Example]
) -> set[str]:
    """Return the digests of the questions that have a pinned answer."""
    found = await connection.fetch(
        "SELECT question_digest FROM kb_examples JOIN kb_uses USING (key)"
        " WHERE namespace = $1 AND question_digest = ANY($2::text[]) AND pinned",
        namespace,
        [question_digest(example) for example in examples],
    )
    return {row["question_digest"] for row in found}


async def remove_answers(
    connection: Connection, namespace: str, examples: Sequence[Example]
) -> None:
    """Delete all answers to the questions of these examples."""
    found = await connection.fetch(
        "SELECT key FROM kb_examples WHERE namespace = $1 AND question_digest = ANY($2::text[])",
        namespace,
        [question_digest(example) for example in examples],
    )
    await remove_rows(connection, [row["key"] for row in found])


async def evict_excess(connection: Connection, namespace: str, capacity: Capacity) -> None:
    """Delete rows above the capacity. This precedes the commit, so no reader sees more rows."""
    total, pinned = await connection.fetchrow(
        "SELECT count(*), count(*) FILTER (WHERE pinned) FROM kb_examples"
        " LEFT JOIN kb_uses USING (key) WHERE namespace = $1",
        namespace,
    )
    excess = capacity.excess(total, pinned)
    if not excess:
        return
    newest = (
        "(SELECT key FROM kb_examples WHERE namespace = $1"
        f" ORDER BY key DESC LIMIT 1 OFFSET {capacity.evict.protect})"
    )
    found = await connection.fetch(
        "SELECT examples.key FROM kb_examples AS examples"
        " LEFT JOIN kb_uses AS uses USING (key)"
        " WHERE namespace = $1 AND NOT coalesce(pinned, false)"
        f" ORDER BY examples.key > {newest}, {capacity.evict.order()}, examples.key LIMIT $2",
        namespace,
        excess,
    )
    await remove_rows(connection, [row["key"] for row in found])
