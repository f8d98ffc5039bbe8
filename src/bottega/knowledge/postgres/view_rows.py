"""Views in PostgreSQL. A new view is filled first, and then activated by one commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bottega.errors import StoreError
from bottega.knowledge.copy_store import UNFINISHED, unfinished_error
from bottega.knowledge.postgres.database import log_changes
from bottega.knowledge.postgres.reader import VIEWS, PostgresReader, without_vector
from bottega.knowledge.postgres.schema import MAX_DIMENSION, create_vectors, vectors_table
from bottega.knowledge.records import (
    EmbeddedBatch,
    StoredView,
    check_dimensions,
    check_views,
    more_views_error,
)
from bottega.knowledge.sqlite.view_rows import dropped_view_error
from bottega.protocols import Vectors

if TYPE_CHECKING:
    from asyncpg import Connection


class PostgresViewRows(PostgresReader):
    """Writer of views and their vectors, in all namespaces."""

    def begin_view(self, name: str, fingerprint: str, dimension: int) -> tuple[int, bool]:
        async def work(connection: Connection) -> tuple[int, bool]:
            await _drop_views(connection, name, "NOT complete AND fingerprint != $2", fingerprint)
            row = await connection.fetchrow(
                "SELECT number, complete, dimension FROM kb_views"
                " WHERE name = $1 AND fingerprint = $2",
                name,
                fingerprint,
            )
            if row is None:
                return await _create_view(connection, name, fingerprint, dimension, False), False
            stored = StoredView(row["number"], name, fingerprint, row["dimension"])
            check_dimensions({name: stored}, {name: dimension})
            return row["number"], row["complete"]

        return self.write(work)

    def set_vectors(self, number: int, vectors: Mapping[int, Vectors], *, logged: bool) -> None:
        async def work(connection: Connection) -> None:
            await _check_view(connection, number)
            await connection.executemany(
                f"INSERT INTO {vectors_table(number)} SELECT key, namespace, $2::vector"
                " FROM kb_examples WHERE key = $1"
                " ON CONFLICT (key) DO UPDATE SET vector = excluded.vector",
                list(vectors.items()),
            )
            if logged:
                await log_changes(connection, "put", list(vectors))

        self.write(work)

    def complete_view(self, name: str, number: int) -> bool:
        async def work(connection: Connection) -> bool:
            complete = await _check_view(connection, number)
            if await connection.fetchval(f"SELECT 1 {without_vector(number)} LIMIT 1"):
                return False
            if not complete:
                await _drop_views(connection, name, "number != $2", number)
                await connection.execute(
                    "UPDATE kb_views SET complete = true WHERE number = $1", number
                )
            return True

        return self.write(work)

    def drop_view(self, name: str) -> None:
        """Delete the view and its vectors."""
        self.write(lambda connection: _drop_views(connection, name, "number != $2", 0))


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
            await _drop_views(connection, name, "fingerprint = $2", made.fingerprint)
            await _create_view(connection, name, made.fingerprint, made.vectors.shape[1], True)
        return await claim_views(connection, views)
    check_views(stored, {name: made.fingerprint for name, made in views.items()})
    check_dimensions(stored, {name: made.vectors.shape[1] for name, made in views.items()})
    if missing := stored.keys() - views.keys():
        raise more_views_error(missing)
    return [stored[name].number for name in views]


async def _create_view(
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


async def _drop_views(connection: Connection, name: str, which: str, value: object) -> None:
    dropped = await connection.fetch(
        f"DELETE FROM kb_views WHERE name = $1 AND {which} RETURNING number", name, value
    )
    for row in dropped:
        await connection.execute(f"DROP TABLE {vectors_table(row['number'])}")


async def _check_view(connection: Connection, number: int) -> bool:
    """Return whether the view is complete. Raises `StoreError` if another run has dropped it."""
    complete = await connection.fetchval("SELECT complete FROM kb_views WHERE number = $1", number)
    if complete is None:
        raise dropped_view_error()
    return bool(complete)
