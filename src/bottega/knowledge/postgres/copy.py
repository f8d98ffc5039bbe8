"""Knowledge bases in PostgreSQL as source and target of a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bottega.errors import StoreError
from bottega.knowledge.copy_store import (
    ALL_COLUMNS,
    LogEntry,
    RowHeader,
    StoredRow,
    example_values,
    image_values,
    other_source_error,
    shown_values,
    unfinished_views,
    use_values,
)
from bottega.knowledge.postgres.rows import PostgresRows
from bottega.knowledge.postgres.schema import vectors_table
from bottega.knowledge.postgres.writes import create_view
from bottega.knowledge.records import StoredView
from bottega.knowledge.stores import UNFINISHED

if TYPE_CHECKING:
    from asyncpg import Connection

INSERT = (
    f"INSERT INTO kb_examples ({', '.join(ALL_COLUMNS)})"
    f" VALUES ({', '.join(f'${n}' for n in range(1, len(ALL_COLUMNS) + 1))})"
)
ALL_VIEWS = "SELECT number, name, fingerprint, dimension FROM kb_views"
IS_EMPTY = (
    "SELECT NOT EXISTS (SELECT 1 FROM kb_examples) AND NOT EXISTS (SELECT 1 FROM kb_views)"
    " AND NOT EXISTS (SELECT 1 FROM kb_changes) AND NOT EXISTS (SELECT 1 FROM kb_notes)"
)
# New numbers begin above those of the source: keys in the log must not be reused.
CONTINUE_NUMBERS = """
SELECT setval(pg_get_serial_sequence('kb_examples', 'key'), greatest(1,
    (SELECT max(key) FROM kb_examples), (SELECT max(key) FROM kb_changes)));
SELECT setval(pg_get_serial_sequence('kb_changes', 'seq'), greatest(1,
    (SELECT max(seq) FROM kb_changes)));
SELECT setval(pg_get_serial_sequence('kb_views', 'number'), greatest(1,
    (SELECT max(number) FROM kb_views)))
"""


class PostgresCopy(PostgresRows):
    """Knowledge base in a database, as source or target of a copy."""

    @property
    def location(self) -> str:
        return self.name

    def headers(self, after: int, last: int, limit: int) -> list[RowHeader]:
        found = self.read(
            "SELECT key, namespace, (SELECT coalesce(sum(octet_length(data)), 0)"
            " FROM kb_example_images AS shown JOIN kb_images USING (sha256)"
            " WHERE shown.key = kb_examples.key)"
            " FROM kb_examples WHERE key > $1 AND key <= $2 ORDER BY key LIMIT $3",
            *(after, last, limit),
        )
        return [RowHeader(*row) for row in found]

    def logged(self, after: int, limit: int) -> list[LogEntry]:
        found = self.read(
            "SELECT seq, op, key, id, namespace FROM kb_changes WHERE seq > $1 ORDER BY seq"
            " LIMIT $2",
            *(after, limit),
        )
        return [LogEntry(*row) for row in found]

    def notes(self) -> dict[str, str]:
        found = self.read("SELECT name, value FROM kb_notes WHERE name != $1", UNFINISHED)
        return {row["name"]: row["value"] for row in found}

    def pruned_by_namespace(self) -> dict[str, int]:
        found = self.read("SELECT namespace, seq FROM kb_pruned")
        return {row["namespace"]: row["seq"] for row in found}

    def count_images(self) -> int:
        counted = "SELECT count(DISTINCT sha256) AS n FROM kb_example_images"
        return int(self.read(counted)[0]["n"])

    def uncopied(self) -> list[str]:
        views = self.read("SELECT number, name, fingerprint FROM kb_views WHERE NOT complete")
        return unfinished_views(
            (row["name"], row["fingerprint"], self.count_vectors(row["number"])) for row in views
        )

    def all_views(self) -> list[StoredView]:
        return [StoredView(*row) for row in self.read(f"{ALL_VIEWS} ORDER BY number")]

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

        self.write(work)

    async def _claim(self, connection: Connection, source: str) -> None:
        """Record the source. Raises `StoreError` if the database contains anything else."""
        note = "SELECT value FROM kb_notes WHERE name = $1"
        stored = await connection.fetchval(note, UNFINISHED)
        if stored is None:
            if not await connection.fetchval(IS_EMPTY):
                raise StoreError(
                    f"{self.name} already contains a knowledge base",
                    hint="set TO to the URL of a new database, created with createdb NAME",
                )
            await connection.execute("INSERT INTO kb_notes VALUES ($1, $2)", UNFINISHED, source)
        elif stored != source:
            remedy = "create a new database"
            raise other_source_error(self.name, stored, source, remedy)
        if await connection.fetchval("SELECT EXISTS (SELECT 1 FROM kb_views WHERE complete)"):
            raise StoreError(
                f"{self.name} is an unfinished copy of {source}, to which another process has"
                " added examples",
                hint="stop that process, and set TO to a new database",
            )

    def replace_rows(
        self, after: int, last: int, rows: Sequence[StoredRow], views: Sequence[StoredView]
    ) -> None:
        async def work(connection: Connection) -> None:
            await self._resume(connection)
            await connection.execute(
                "DELETE FROM kb_examples WHERE key > $1 AND key <= $2", after, last
            )
            await connection.executemany(INSERT, map(example_values, rows))
            await connection.executemany(
                "INSERT INTO kb_images AS kept VALUES ($1, $2, $3, $4, $5) ON CONFLICT (sha256)"
                " DO UPDATE SET data = excluded.data WHERE kept.data != excluded.data",
                image_values(rows),
            )
            await connection.executemany(
                "INSERT INTO kb_example_images VALUES ($1, $2, $3, $4)", shown_values(rows)
            )
            await connection.executemany(
                "INSERT INTO kb_uses (key, count, last_used, saved_usd, pinned)"
                " VALUES ($1, $2, $3, $4, $5)",
                use_values(rows),
            )
            for view in views:
                await connection.executemany(
                    f"INSERT INTO {vectors_table(view.number)} VALUES ($1, $2, $3::vector)",
                    [(row.key, row.namespace, row.vectors[view.name]) for row in rows],
                )

        self.write(work)

    def replace_log(self, after: int, last: int, entries: Sequence[LogEntry]) -> None:
        async def work(connection: Connection) -> None:
            await self._resume(connection)
            await connection.execute(
                "DELETE FROM kb_changes WHERE seq > $1 AND seq <= $2", after, last
            )
            await connection.executemany(
                "INSERT INTO kb_changes (seq, op, key, id, namespace)"
                " OVERRIDING SYSTEM VALUE VALUES ($1, $2, $3, $4, $5)",
                entries,
            )

        self.write(work)

    def write_settings(self, notes: Mapping[str, str], pruned: Mapping[str, int]) -> None:
        async def work(connection: Connection) -> None:
            await self._resume(connection)
            await connection.execute("DELETE FROM kb_notes WHERE name != $1", UNFINISHED)
            await connection.executemany("INSERT INTO kb_notes VALUES ($1, $2)", notes.items())
            await connection.execute("DELETE FROM kb_pruned")
            await connection.executemany("INSERT INTO kb_pruned VALUES ($1, $2)", pruned.items())
            await connection.execute(
                "DELETE FROM kb_images WHERE NOT EXISTS"
                " (SELECT 1 FROM kb_example_images AS kept WHERE kept.sha256 = kb_images.sha256)"
            )
            await connection.execute(CONTINUE_NUMBERS)

        self.write(work)

    def publish(self) -> None:
        async def work(connection: Connection) -> None:
            await self._resume(connection)
            await connection.execute("UPDATE kb_views SET complete = true")
            await connection.execute("DELETE FROM kb_notes WHERE name = $1", UNFINISHED)

        self.write(work)

    async def _resume(self, connection: Connection) -> None:
        """Raise `StoreError` if another run has finished the copy."""
        if not await connection.fetchval("SELECT 1 FROM kb_notes WHERE name = $1", UNFINISHED):
            raise StoreError(
                f"another process has finished the copy to {self.name}",
                hint="run only one bottega migrate per target at a time",
            )
