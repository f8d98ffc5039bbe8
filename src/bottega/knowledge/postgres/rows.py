"""Examples of a knowledge base in PostgreSQL."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import orjson

from bottega._util.identity import question_digest
from bottega._util.postgres import PostgresPool
from bottega.knowledge.eviction import CHECK_EVERY, KEPT_CHANGES, KEPT_SHARE, Capacity
from bottega.knowledge.postgres.database import WRITE_SECONDS, log_changes
from bottega.knowledge.postgres.insertion import (
    MAX_STATEMENT_BYTES,
    ExampleRow,
    InsertResult,
    insert_examples,
)
from bottega.knowledge.postgres.view_rows import PostgresViewRows, claim_views
from bottega.knowledge.reader import check_known
from bottega.knowledge.records import (
    EmbeddedBatch,
    RowMetadata,
    UsageRecord,
)
from bottega.types import Example

if TYPE_CHECKING:
    from asyncpg import Connection


class PostgresRows(PostgresViewRows):
    """Durable examples of one namespace. Methods are safe to call from several threads while other
    processes write."""

    def __init__(self, url: str, namespace: str = "", *, create: bool = True) -> None:
        super().__init__(url, namespace, create=create)
        # The views of the last insertion (name, fingerprint, dimension), and their numbers.
        self._claimed: tuple[tuple[tuple[str, str, int], ...], Sequence[int]] = ((), ())

    def put(
        self,
        examples: Sequence[Example],
        views: Mapping[str, EmbeddedBatch],
        capacity: Capacity | None = None,
        metadata_by_id: Mapping[str, RowMetadata] | None = None,
        supersede: bool = False,
        pin: bool = False,
    ) -> int:
        """Store the examples with new ids in one transaction and return their number; see
        `SqliteRows.put`."""
        given = tuple(
            (name, made.fingerprint, made.vectors.shape[1]) for name, made in views.items()
        )
        vectors = zip(*(made.vectors for made in views.values()), strict=True)
        rows = [ExampleRow(*row) for row in zip(examples, vectors, strict=True)]
        claimed, numbers = self._claimed
        if claimed == given and not (supersede or capacity or metadata_by_id):
            count = self._put_in_one_statement(rows, numbers)
            if count is not None:
                return count

        async def work(connection: Connection) -> int:
            numbers = await claim_views(connection, views)
            kept = rows
            if supersede:
                pinned = () if pin else await self._pinned_questions(connection, examples)
                kept = [row for row in rows if question_digest(row.example) not in pinned]
                await self._remove_answers(connection, [row.example for row in kept])
            new = await insert_examples(connection, self.namespace, kept, numbers)
            assert new is not None  # this transaction holds the lock and has claimed the views
            self._claimed = given, numbers
            for id, metadata in (metadata_by_id or {}).items():
                if id in new.keys:
                    await _set_metadata(connection, new.keys[id], metadata)
            if pin:
                pinned_keys = "INSERT INTO kb_uses (key, pinned) SELECT unnest($1::bigint[]), true"
                await connection.execute(pinned_keys, list(new.keys.values()))
            if new.keys:
                if capacity is not None:
                    await self._evict(connection, capacity)
                await _prune(connection, len(new.keys), new.last_seq)
            return len(new.keys)

        return self.write(work)

    def _put_in_one_statement(
        self, rows: Sequence[ExampleRow], numbers: Sequence[int]
    ) -> int | None:
        """Store the rows with one statement, which is its own transaction and takes one round trip
        instead of four. Return the number of new rows. Return None and store nothing if another
        process is writing or has changed the views, or if the rows exceed
        `MAX_STATEMENT_BYTES`."""
        if sum(row.size for row in rows) > MAX_STATEMENT_BYTES:
            return None

        async def insert(pool: PostgresPool) -> InsertResult | None:
            async with pool.connection(seconds=WRITE_SECONDS) as connection:
                return await insert_examples(connection, self.namespace, rows, numbers)

        new = self.run(insert)
        if new is not None and new.keys and _is_pruning_due(len(new.keys), new.last_seq):
            self.write(lambda connection: _prune(connection, len(new.keys), new.last_seq))
        return None if new is None else len(new.keys)

    def annotate(self, id: str, fields: Mapping[str, str | None], tags: Mapping[str, str]) -> bool:
        """Set the fields and add the tags. Return False if the id does not exist. The row gets a
        new key, because the content of a key never changes."""

        async def work(connection: Connection) -> bool:
            found = await connection.fetchrow(
                "SELECT key FROM kb_examples WHERE namespace = $1 AND id = $2", self.namespace, id
            )
            if found is None:
                return False
            await log_changes(connection, "delete", [found["key"]])
            key = await connection.fetchval(
                "UPDATE kb_examples SET"
                " key = nextval(pg_get_serial_sequence('kb_examples', 'key')),"
                " tags = tags || $2::jsonb, rationale = CASE WHEN $3 THEN $4 ELSE rationale END,"
                " labels = coalesce($5::jsonb, labels)"
                " WHERE key = $1 RETURNING key",
                found["key"],
                orjson.dumps(dict(tags)).decode(),
                "rationale" in fields,
                fields.get("rationale"),
                fields.get("labels"),
            )
            await log_changes(connection, "put", [key])
            last = await connection.fetchval("SELECT max(seq) FROM kb_changes")
            await _prune(connection, 1, last)
            return True

        return self.write(work)

    def delete(self, ids: Collection[str]) -> int:
        async def work(connection: Connection) -> int:
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
            found = await connection.fetch(
                "SELECT id FROM kb_examples WHERE namespace = $1 AND id = ANY($2::text[])",
                self.namespace,
                list(ids),
            )
            check_known(ids, {row["id"] for row in found})
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
                # Sorted: two processes that lock rows in different orders could deadlock.
                [
                    (self.namespace, id, use.count, use.last_used, use.saved_usd)
                    for id, use in sorted(uses.items())
                ],
            )

        self.write(work)

    def set_note(self, name: str, value: str) -> None:
        self.read(
            "INSERT INTO kb_notes VALUES ($1, $2)"
            " ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            *(name, value),
        )

    async def _pinned_questions(
        self, connection: Connection, examples: Sequence[Example]
    ) -> set[str]:
        """Return the digests of the questions that have a pinned answer."""
        found = await connection.fetch(
            "SELECT question_digest FROM kb_examples JOIN kb_uses USING (key)"
            " WHERE namespace = $1 AND question_digest = ANY($2::text[]) AND pinned",
            self.namespace,
            [question_digest(example) for example in examples],
        )
        return {row["question_digest"] for row in found}

    async def _remove_answers(self, connection: Connection, examples: Sequence[Example]) -> None:
        """Delete all answers to the questions of these examples."""
        found = await connection.fetch(
            "SELECT key FROM kb_examples"
            " WHERE namespace = $1 AND question_digest = ANY($2::text[])",
            self.namespace,
            [question_digest(example) for example in examples],
        )
        await _remove(connection, [row["key"] for row in found])

    async def _evict(self, connection: Connection, capacity: Capacity) -> None:
        """Delete rows above the capacity. This precedes the commit, so no reader sees more rows."""
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


async def _set_metadata(connection: Connection, key: int, metadata: RowMetadata) -> None:
    await connection.execute(
        "UPDATE kb_examples SET created = $2 WHERE key = $1", key, metadata.created
    )
    await connection.execute(
        "INSERT INTO kb_uses (key, count, last_used, saved_usd, pinned)"
        " VALUES ($1, $2, $3, $4, $5)",
        *(key, metadata.uses, metadata.last_used, metadata.saved_usd, metadata.pinned),
    )


def _is_pruning_due(added: int, last: int) -> bool:
    """Return whether one of the last `2 * added` change numbers is a multiple of `CHECK_EVERY`."""
    return last % CHECK_EVERY < 2 * added


async def _prune(connection: Connection, added: int, last: int) -> None:
    """Delete old log entries of deleted rows, as `eviction.prune` does. `last` is the number of the
    newest change."""
    if not _is_pruning_due(added, last):
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
