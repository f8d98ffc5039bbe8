"""Examples of a knowledge base in PostgreSQL."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import orjson

from bottega._util.identity import question_digest
from bottega.knowledge.eviction import CHECK_EVERY, KEPT_CHANGES, KEPT_SHARE, Capacity
from bottega.knowledge.postgres.database import lock_for_writing, log_changes
from bottega.knowledge.postgres.schema import (
    vectors_table,
)
from bottega.knowledge.postgres.view_rows import PostgresViewRows, claim_views
from bottega.knowledge.records import (
    COLUMNS,
    EmbeddedBatch,
    RowMetadata,
    UsageRecord,
    to_row,
)
from bottega.protocols import Vectors
from bottega.types import Example

if TYPE_CHECKING:
    from asyncpg import Connection

ALL_COLUMNS = (*COLUMNS, "namespace", "question_digest")
INSERT = (
    f"INSERT INTO kb_examples ({', '.join(ALL_COLUMNS)})"
    f" VALUES ({', '.join(f'${n}' for n in range(1, len(ALL_COLUMNS) + 1))})"
    " ON CONFLICT (namespace, id) DO NOTHING RETURNING key"
)


class PostgresRows(PostgresViewRows):
    """Durable examples of one namespace of a database. Methods are safe to call from several
    threads while other processes write."""

    def put(
        self,
        examples: Sequence[Example],
        views: Mapping[str, EmbeddedBatch],
        capacity: Capacity | None = None,
        metadata_by_id: Mapping[str, RowMetadata] | None = None,
        supersede: bool = False,
    ) -> int:
        """Store the examples with new ids in one transaction and return their number; see
        `SqliteRows.put`."""

        async def work(connection: Connection) -> int:
            await lock_for_writing(connection)
            numbers = await claim_views(connection, views)
            new = 0
            rows = zip(examples, *(made.vectors for made in views.values()), strict=True)
            for example, *vectors in rows:
                if supersede and await self._pinned(connection, example):
                    continue
                key = await self._insert(connection, example, numbers, vectors)
                if key is None:
                    continue
                new += 1
                metadata = (metadata_by_id or {}).get(example.id or "")
                if metadata is not None:
                    await _set_metadata(connection, key, metadata)
                if supersede:
                    await self._remove_superseded(connection, key)
            if new:
                if capacity is not None:
                    await self._evict(connection, capacity)
                await _prune(connection, new)
            return new

        return self.write(work)

    def annotate(self, id: str, fields: Mapping[str, str | None], tags: Mapping[str, str]) -> bool:
        """Set these fields and add these tags. Return False if the id does not exist. The row gets
        a new key, because the content of a key never changes."""

        async def work(connection: Connection) -> bool:
            await lock_for_writing(connection)
            found = await connection.fetchrow(
                "SELECT key FROM kb_examples WHERE namespace = $1 AND id = $2", self.namespace, id
            )
            if found is None:
                return False
            await log_changes(connection, "delete", [found["key"]])
            key = await connection.fetchval(
                "UPDATE kb_examples SET"
                " key = nextval(pg_get_serial_sequence('kb_examples', 'key')),"
                " tags = tags || $2::jsonb, rationale = CASE WHEN $3 THEN $4 ELSE rationale END"
                " WHERE key = $1 RETURNING key",
                found["key"],
                orjson.dumps(dict(tags)).decode(),
                "rationale" in fields,
                fields.get("rationale"),
            )
            await log_changes(connection, "put", [key])
            await _prune(connection, 1)
            return True

        return self.write(work)

    def delete(self, ids: Collection[str]) -> int:
        async def work(connection: Connection) -> int:
            await lock_for_writing(connection)
            found = await connection.fetch(
                "SELECT key FROM kb_examples WHERE namespace = $1 AND id = ANY($2::text[])",
                self.namespace,
                list(ids),
            )
            await _remove(connection, [row["key"] for row in found])
            return len(found)

        return self.write(work)

    def pin(self, ids: Collection[str], pinned: bool) -> int:
        async def work(connection: Connection) -> int:
            done = await connection.execute(
                "INSERT INTO kb_uses (key, pinned) SELECT key, $3 FROM kb_examples"
                " LEFT JOIN kb_uses AS uses USING (key) WHERE namespace = $1"
                " AND id = ANY($2::text[]) AND coalesce(uses.pinned, false) != $3 ORDER BY key"
                " ON CONFLICT (key) DO UPDATE SET pinned = excluded.pinned",
                self.namespace,
                list(ids),
                pinned,
            )
            return int(done.split()[-1])

        return self.write(work)

    def add_uses(self, uses: Mapping[str, UsageRecord]) -> None:
        """Add to the counters; deleted examples are ignored."""

        async def work(connection: Connection) -> None:
            await connection.executemany(
                "INSERT INTO kb_uses AS uses (key, count, last_used, saved_usd)"
                " SELECT key, $3, $4, $5 FROM kb_examples WHERE namespace = $1 AND id = $2"
                " ON CONFLICT (key) DO UPDATE SET count = uses.count + excluded.count,"
                " last_used = greatest(uses.last_used, excluded.last_used),"
                " saved_usd = uses.saved_usd + excluded.saved_usd",
                # In one order: two processes must not wait for each other's rows.
                [
                    (self.namespace, id, use.count, use.last_used, use.saved_usd)
                    for id, use in sorted(uses.items())
                ],
            )

        self.write(work)

    def set_note(self, name: str, value: str) -> None:
        self.run(
            self.pool.execute(
                "INSERT INTO kb_notes VALUES ($1, $2)"
                " ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                name,
                value,
            )
        )

    async def _insert(
        self,
        connection: Connection,
        example: Example,
        numbers: Sequence[int],
        vectors: Sequence[Vectors],
    ) -> int | None:
        """Insert an example and return its key, or None if its id exists."""
        values = (*to_row(example), self.namespace, question_digest(example))
        key = await connection.fetchval(INSERT, *values)
        if key is None:
            return None
        images = example.query.images
        await connection.executemany(
            "INSERT INTO kb_images VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING",
            [(one.sha256, one.media_type, one.width, one.height, one.data) for one in images],
        )
        await connection.executemany(
            "INSERT INTO kb_example_images VALUES ($1, $2, $3, $4)",
            [(key, place, one.sha256, one.source) for place, one in enumerate(images)],
        )
        for number, vector in zip(numbers, vectors, strict=True):
            await connection.execute(
                f"INSERT INTO {vectors_table(number)} VALUES ($1, $2, $3::vector)",
                *(key, self.namespace, vector),
            )
        await connection.execute(
            "INSERT INTO kb_changes (op, key, id, namespace) VALUES ('put', $1, $2, $3)",
            *(key, example.id, self.namespace),
        )
        return int(key)

    async def _pinned(self, connection: Connection, example: Example) -> bool:
        found = await connection.fetchval(
            "SELECT 1 FROM kb_examples JOIN kb_uses USING (key)"
            " WHERE namespace = $1 AND question_digest = $2 AND pinned",
            self.namespace,
            question_digest(example),
        )
        return found is not None

    async def _remove_superseded(self, connection: Connection, key: int) -> None:
        """Delete the older answers to the question of this row."""
        older = await connection.fetch(
            "SELECT key FROM kb_examples WHERE namespace = $1 AND key != $2 AND question_digest ="
            " (SELECT question_digest FROM kb_examples WHERE key = $2)",
            self.namespace,
            key,
        )
        await _remove(connection, [row["key"] for row in older])

    async def _evict(self, connection: Connection, capacity: Capacity) -> None:
        """Delete the rows above the capacity, before the commit: no reader sees more."""
        total, pinned = await connection.fetchrow(
            "SELECT count(*), count(*) FILTER (WHERE pinned) FROM kb_examples"
            " LEFT JOIN kb_uses USING (key) WHERE namespace = $1",
            self.namespace,
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
            self.namespace,
            excess,
        )
        await _remove(connection, [row["key"] for row in found])


async def _remove(connection: Connection, keys: Sequence[int]) -> None:
    """Delete rows with their vectors, uses and unused images, and log it."""
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


async def _set_metadata(connection: Connection, key: int, metadata: RowMetadata) -> None:
    await connection.execute(
        "UPDATE kb_examples SET created = $2 WHERE key = $1", key, metadata.created
    )
    await connection.execute(
        "INSERT INTO kb_uses (key, count, last_used, saved_usd, pinned)"
        " VALUES ($1, $2, $3, $4, $5)",
        *(key, metadata.uses, metadata.last_used, metadata.saved_usd, metadata.pinned),
    )


async def _prune(connection: Connection, added: int) -> None:
    """Drop old entries of deleted rows from the log, as `eviction.prune` does."""
    last = await connection.fetchval("SELECT max(seq) FROM kb_changes")
    if last % CHECK_EVERY >= 2 * added:
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
