"""Knowledge bases in PostgreSQL as source and target of a copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bottega._util.sql_tables import postgres_statement
from bottega.errors import StoreError
from bottega.knowledge.copy_store import (
    ALL_VIEWS,
    CopyStore,
    RepeatedStatement,
    StoredRow,
    other_source_error,
)
from bottega.knowledge.postgres.rows import PostgresRows
from bottega.knowledge.postgres.schema import vectors_table
from bottega.knowledge.postgres.writes import create_view
from bottega.knowledge.records import StoredView
from bottega.knowledge.stores import UNFINISHED

if TYPE_CHECKING:
    from asyncpg import Connection

IS_EMPTY = (
    "SELECT NOT EXISTS (SELECT 1 FROM kb_examples) AND NOT EXISTS (SELECT 1 FROM kb_views)"
    " AND NOT EXISTS (SELECT 1 FROM kb_changes) AND NOT EXISTS (SELECT 1 FROM kb_notes)"
)
NOTE = "SELECT value FROM kb_notes WHERE name = $1"


class DatabaseCopy(CopyStore):
    """Knowledge base in a database."""

    image_bytes = "octet_length(data)"
    insert_change = "INSERT INTO kb_changes (seq, op, key, id, namespace) OVERRIDING SYSTEM VALUE"
    continue_numbers = (
        "SELECT setval(pg_get_serial_sequence('kb_examples', 'key'), greatest(1,"
        " (SELECT max(key) FROM kb_examples), (SELECT max(key) FROM kb_changes)))",
        "SELECT setval(pg_get_serial_sequence('kb_changes', 'seq'), greatest(1,"
        " (SELECT max(seq) FROM kb_changes)))",
        "SELECT setval(pg_get_serial_sequence('kb_views', 'number'), greatest(1,"
        " (SELECT max(number) FROM kb_views)))",
    )

    def __init__(self, url: str, *, is_target: bool) -> None:
        self._database = PostgresRows(url, create=is_target)
        super().__init__(self._database, name=self._database.name, location=self._database.name)

    def read(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self._database.read(postgres_statement(statement), *values)]

    def write(self, statements: Iterable[RepeatedStatement]) -> None:
        async def work(connection: Connection) -> None:
            if await connection.fetchval(NOTE, UNFINISHED) is None:
                raise StoreError(
                    f"another process has finished the copy to {self.name}",
                    hint="run only one bottega migrate per target at a time",
                )
            for statement, runs in statements:
                await connection.executemany(postgres_statement(statement), runs)

        self._database.write(work)

    def begin(self, source: str, views: Sequence[StoredView]) -> None:
        async def work(connection: Connection) -> None:
            await self._claim(connection, source)
            found = {StoredView(*row) for row in await connection.fetch(ALL_VIEWS)}
            for view in found - set(views):
                await connection.execute("DELETE FROM kb_views WHERE number = $1", view.number)
                await connection.execute(f"DROP TABLE {vectors_table(view.number)}")
            for view in views:
                if view not in found:
                    await create_view(connection, view, complete=False)

        self._database.write(work)

    async def _claim(self, connection: Connection, source: str) -> None:
        """Record the source. Raises `StoreError` if the database contains anything else."""
        stored = await connection.fetchval(NOTE, UNFINISHED)
        if stored is None:
            if not await connection.fetchval(IS_EMPTY):
                raise StoreError(
                    f"{self.name} already contains a knowledge base",
                    hint="set TO to the URL of a new database, created with createdb NAME",
                )
            await connection.execute("INSERT INTO kb_notes VALUES ($1, $2)", UNFINISHED, source)
        elif stored != source:
            raise other_source_error(self.name, stored, source, "create a new database")
        if await connection.fetchval("SELECT EXISTS (SELECT 1 FROM kb_views WHERE complete)"):
            raise StoreError(
                f"{self.name} is an unfinished copy of {source}, to which another process has"
                " added examples",
                hint="stop that process, and set TO to a new database",
            )

    def pruned_by_namespace(self) -> dict[str, int]:
        return dict(self.read("SELECT namespace, seq FROM kb_pruned"))

    def write_pruned(self, pruned: Mapping[str, int]) -> list[RepeatedStatement]:
        return [
            ("DELETE FROM kb_pruned", [()]),
            ("INSERT INTO kb_pruned VALUES (?1, ?2)", list(pruned.items())),
        ]

    def insert_vectors(self, view: StoredView, rows: Sequence[StoredRow]) -> RepeatedStatement:
        return f"INSERT INTO {vectors_table(view.number)} VALUES (?1, ?2, ?3::vector)", [
            (row.key, row.namespace, row.vectors[view.name]) for row in rows
        ]
