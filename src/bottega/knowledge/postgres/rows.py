"""Examples of a knowledge base in PostgreSQL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from bottega._util.identity import Exclude, query_digests, question_digest
from bottega.errors import StoreError, StoreFullError
from bottega.image import Image
from bottega.knowledge.eviction import CHECK_EVERY, KEPT_CHANGES, KEPT_SHARE, Capacity
from bottega.knowledge.filters import Filter
from bottega.knowledge.postgres.database import PostgresDatabase
from bottega.knowledge.postgres.filters import LABELS, Parameters, to_condition
from bottega.knowledge.postgres.schema import (
    KNOWLEDGE_BASE,
    MAX_DIMENSION,
    WRITE_LOCK,
    create_vectors,
    vectors_table,
)
from bottega.knowledge.records import (
    COLUMNS,
    EmbeddedBatch,
    Footprint,
    RowMetadata,
    StoredView,
    UsageRecord,
    check_dimensions,
    check_views,
    from_row,
    more_views_error,
    to_row,
)
from bottega.knowledge.view_rows import dropped_view_error
from bottega.protocols import Vectors
from bottega.types import Example, ExampleChange, Query

if TYPE_CHECKING:
    from asyncpg import Connection

ALL_COLUMNS = (*COLUMNS, "namespace", "question_digest")
INSERT = (
    f"INSERT INTO kb_examples ({', '.join(ALL_COLUMNS)})"
    f" VALUES ({', '.join(f'${n}' for n in range(1, len(ALL_COLUMNS) + 1))})"
    " ON CONFLICT (namespace, id) DO NOTHING RETURNING key"
)
# One statement: another process may delete an example between two.
SELECT_EXAMPLES = (
    "SELECT examples.*, image.sha256, data, media_type, width, height, shown.source AS shown_source"
    " FROM unnest($1::bigint[]) WITH ORDINALITY AS chosen (key, place)"
    " JOIN kb_examples AS examples USING (key)"
    " LEFT JOIN kb_example_images AS shown USING (key)"
    " LEFT JOIN kb_images AS image ON image.sha256 = shown.sha256"
    " ORDER BY chosen.place, position"
)
VIEWS = "SELECT number, name, fingerprint, dimension FROM kb_views WHERE complete ORDER BY number"


class PostgresRows(PostgresDatabase):
    """Durable examples of one namespace of a database. Methods are safe to call from several
    threads while other processes write."""

    def __init__(self, url: str, namespace: str = "") -> None:
        super().__init__(url)
        self.namespace = namespace

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
            await _lock(connection)
            numbers = await _claim_views(connection, views)
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
            await _lock(connection)
            found = await connection.fetchrow(
                "SELECT key FROM kb_examples WHERE namespace = $1 AND id = $2", self.namespace, id
            )
            if found is None:
                return False
            await _log(connection, "delete", [found["key"]])
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
            await _log(connection, "put", [key])
            await _prune(connection, 1)
            return True

        return self.write(work)

    def delete(self, ids: Collection[str]) -> int:
        async def work(connection: Connection) -> int:
            await _lock(connection)
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

    def note(self, name: str) -> str | None:
        found = self.read("SELECT value FROM kb_notes WHERE name = $1", name)
        return str(found[0]["value"]) if found else None

    def get(self, ids: Collection[str]) -> dict[str, Example]:
        found = self.by_keys(self.keys(ids).values())
        return {str(example.id): example for example in found.values()}

    def by_keys(self, keys: Collection[int]) -> dict[int, Example]:
        rows: dict[int, Any] = {}
        images: defaultdict[int, list[Image]] = defaultdict(list)
        for row in self.read(SELECT_EXAMPLES, list(keys)):
            rows[row["key"]] = row
            if row["sha256"] is not None:
                images[row["key"]].append(
                    Image(
                        *(row["data"], row["media_type"], row["sha256"]),
                        *(row["width"], row["height"], row["shown_source"]),
                    )
                )
        return {key: from_row(row, images[key]) for key, row in rows.items()}

    def keys(self, ids: Collection[str]) -> dict[str, int]:
        found = self.read(
            "SELECT id, key FROM kb_examples WHERE namespace = $1 AND id = ANY($2::text[])",
            self.namespace,
            list(ids),
        )
        return {row["id"]: row["key"] for row in found}

    def pinned_ids(self, question_digests: Collection[str]) -> dict[str, str]:
        found = self.read(
            "SELECT question_digest, id FROM kb_examples JOIN kb_uses USING (key)"
            " WHERE namespace = $1 AND question_digest = ANY($2::text[]) AND pinned",
            self.namespace,
            list(question_digests),
        )
        return {row["question_digest"]: row["id"] for row in found}

    def excluded_keys(self, query: Query, exclude: Exclude) -> set[int]:
        parameters = Parameters()
        excluded = self.excluded(query, exclude, parameters)
        return {row["key"] for row in self.read(excluded, *parameters.values)}

    def excluded(self, query: Query, exclude: Exclude, parameters: Parameters) -> str:
        """Return the statement for the keys that `exclude` rules out, and add its values."""
        namespace = parameters.add(self.namespace, "text")
        own = parameters.add(query.id, "text")
        by_id = f"SELECT key FROM kb_examples WHERE namespace = {namespace} AND id = {own}"
        if exclude == "same-question":
            digests = parameters.add(sorted(query_digests(query)), "text[]")
            return (
                f"{by_id} UNION SELECT key FROM kb_examples WHERE namespace = {namespace}"
                f" AND question_digest = ANY({digests})"
            )
        hashes = parameters.add(sorted({image.sha256 for image in query.images}), "text[]")
        return f"{by_id} UNION SELECT key FROM kb_example_images WHERE sha256 = ANY({hashes})"

    def same_image_keys(self, keys: Collection[int]) -> dict[int, set[int]]:
        found = self.read(
            "SELECT own.key AS own, other.key AS other FROM kb_example_images AS own"
            " JOIN kb_example_images AS other USING (sha256) WHERE own.key = ANY($1::bigint[])",
            list(keys),
        )
        same = {key: {key} for key in keys}
        for row in found:
            same[row["own"]].add(row["other"])
        return same

    def ids_where(self, where: Filter | None = None) -> list[str]:
        parameters = Parameters(self.namespace)
        condition = "true" if where is None else to_condition(where, parameters)
        found = self.read(
            "SELECT id FROM kb_examples AS examples WHERE namespace = $1"
            f" AND {condition} ORDER BY key",
            *parameters.values,
        )
        return [row["id"] for row in found]

    def ids_with_prefix(self, prefix: str, limit: int) -> list[str]:
        found = self.read(
            "SELECT id FROM kb_examples WHERE namespace = $1 AND id >= $2 AND id < $3"
            " ORDER BY id LIMIT $4",
            *(self.namespace, prefix, prefix + "g", limit),  # "g" follows the last digit
        )
        return [row["id"] for row in found]

    def count(self) -> int:
        counted = "SELECT count(*) AS n FROM kb_examples WHERE namespace = $1"
        return int(self.read(counted, self.namespace)[0]["n"])

    def labels(self) -> dict[str, list[str]]:
        found = self.read(
            f"SELECT label.value, id FROM kb_examples AS examples, {LABELS}"
            " WITH ORDINALITY AS label (value, place) WHERE namespace = $1"
            " ORDER BY key, label.place",
            self.namespace,
        )
        ids: defaultdict[str, list[str]] = defaultdict(list)
        for row in found:
            ids[row["value"]].append(row["id"])
        return dict(ids)

    def is_multi_label(self) -> bool:
        found = self.read(
            "SELECT EXISTS (SELECT 1 FROM kb_examples WHERE namespace = $1"
            " AND labels IS NOT NULL AND jsonb_array_length(labels) != 1) AS found",
            self.namespace,
        )
        return bool(found[0]["found"])

    def contradictions(self) -> list[list[str]]:
        found = self.read(
            "SELECT array_agg(id ORDER BY key) AS ids FROM kb_examples WHERE namespace = $1"
            " GROUP BY question_digest HAVING count(DISTINCT answer) > 1 ORDER BY min(key)",
            self.namespace,
        )
        return [list(row["ids"]) for row in found]

    def images(self, sha256s: Collection[str]) -> dict[str, Image]:
        found = self.read(
            "SELECT data, media_type, sha256, width, height FROM kb_images AS image"
            " WHERE sha256 = ANY($2::text[]) AND EXISTS (SELECT 1 FROM kb_example_images AS shown"
            " JOIN kb_examples USING (key) WHERE shown.sha256 = image.sha256 AND namespace = $1)",
            self.namespace,
            list(sha256s),
        )
        return {row["sha256"]: Image(*row) for row in found}

    def namespaces(self) -> dict[str, int]:
        counted = (
            "SELECT namespace, count(*) AS n FROM kb_examples GROUP BY namespace ORDER BY namespace"
        )
        return {row["namespace"]: row["n"] for row in self.read(counted)}

    def metadata_by_id(self, keys: Collection[int]) -> dict[int, RowMetadata]:
        found = self.read(
            "SELECT key, created, coalesce(count, 0), last_used, coalesce(saved_usd, 0),"
            " coalesce(pinned, false) FROM kb_examples LEFT JOIN kb_uses USING (key)"
            " WHERE key = ANY($1::bigint[])",
            list(keys),
        )
        return {row[0]: RowMetadata(*list(row)[1:]) for row in found}

    def footprint(self) -> Footprint:
        [row] = self.read(
            "SELECT (SELECT count(*) FROM kb_examples WHERE namespace = $1),"
            " (SELECT count(DISTINCT sha256) FROM kb_example_images JOIN kb_examples USING (key)"
            " WHERE namespace = $1),"
            " (SELECT count(*) FROM kb_uses JOIN kb_examples USING (key)"
            " WHERE namespace = $1 AND pinned),"
            " (SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class"
            " WHERE relkind = 'r' AND relname LIKE 'kb\\_%')",
            self.namespace,
        )
        examples, images, pinned, size = row
        return Footprint(examples, images, pinned, size, KNOWLEDGE_BASE.version)

    def example_changes_since(self, seq: int, limit: int) -> list[ExampleChange]:
        found = self.read(
            "SELECT seq, id, NOT EXISTS (SELECT 1 FROM kb_examples AS kept"
            " WHERE kept.key = kb_changes.key) AS deleted"
            " FROM kb_changes WHERE namespace = $1 AND seq > $2 ORDER BY seq LIMIT $3",
            *(self.namespace, seq, limit),
        )
        return [ExampleChange(row["seq"], row["id"], row["deleted"]) for row in found]

    def pruned(self) -> int:
        found = self.read("SELECT seq FROM kb_pruned WHERE namespace = $1", self.namespace)
        return int(found[0]["seq"]) if found else 0

    def views(self) -> dict[str, StoredView]:
        return {row["name"]: StoredView(*row) for row in self.read(VIEWS)}

    def vectors(self, keys: Collection[int], view: int) -> dict[int, Vectors]:
        found = self.read(
            f"SELECT key, vector FROM {vectors_table(view)} WHERE key = ANY($1::bigint[])",
            list(keys),
        )
        return {row["key"]: row["vector"] for row in found}

    def vectors_of_images(self, sha256s: Collection[str], view: int) -> dict[str, Vectors]:
        found = self.read(
            f"SELECT shown.sha256, vector FROM kb_example_images AS shown"
            f" JOIN {vectors_table(view)} USING (key)"
            " WHERE shown.sha256 = ANY($1::text[]) AND NOT EXISTS"
            " (SELECT 1 FROM kb_example_images AS o WHERE o.key = shown.key AND o.position > 0)",
            list(sha256s),
        )
        return {row["sha256"]: row["vector"] for row in found}

    def begin_view(self, name: str, fingerprint: str, dimension: int) -> tuple[int, bool]:
        async def work(connection: Connection) -> tuple[int, bool]:
            await _lock(connection)
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

    def count_vectors(self, number: int) -> int:
        return int(self.read(f"SELECT count(*) AS n FROM {vectors_table(number)}")[0]["n"])

    def missing_keys(self, number: int) -> list[int]:
        return [row["key"] for row in self.read(f"SELECT key {_missing(number)} ORDER BY key")]

    def set_vectors(self, number: int, vectors: Mapping[int, Vectors], *, logged: bool) -> None:
        async def work(connection: Connection) -> None:
            await _lock(connection)
            await _check_view(connection, number)
            await connection.executemany(
                f"INSERT INTO {vectors_table(number)} SELECT key, namespace, $2::vector"
                " FROM kb_examples WHERE key = $1"
                " ON CONFLICT (key) DO UPDATE SET vector = excluded.vector",
                list(vectors.items()),
            )
            if logged:
                await _log(connection, "put", list(vectors))

        self.write(work)

    def complete_view(self, name: str, number: int) -> bool:
        async def work(connection: Connection) -> bool:
            await _lock(connection)
            complete = await _check_view(connection, number)
            if await connection.fetchval(f"SELECT 1 {_missing(number)} LIMIT 1"):
                return False
            if not complete:
                await _drop_views(connection, name, "number != $2", number)
                await connection.execute(
                    "UPDATE kb_views SET complete = true WHERE number = $1", number
                )
            return True

        return self.write(work)

    def checked_vectors(self, keys: Sequence[int], view: StoredView) -> dict[int, Vectors | None]:
        """Return the vector of each key, None if it is missing."""
        found = self.read(
            "SELECT key, vector FROM kb_examples"
            f" LEFT JOIN {vectors_table(view.number)} USING (key) WHERE key = ANY($1::bigint[])",
            list(keys),
        )
        return {row["key"]: row["vector"] for row in found}

    def ids_of(self, keys: Sequence[int]) -> list[str]:
        chosen = "SELECT id FROM kb_examples WHERE key = ANY($1::bigint[]) ORDER BY key"
        return [row["id"] for row in self.read(chosen, list(keys))]

    def sizes(self) -> tuple[int, int, int]:
        examples, images = (
            int(self.read(f"SELECT count(*) AS n FROM {table}")[0]["n"])
            for table in ("kb_examples", "kb_images")
        )
        vectors = sum(self.count_vectors(view.number) for view in self.views().values())
        return examples, images, vectors

    def all_keys(self, after: int, limit: int) -> list[int]:
        chosen = "SELECT key FROM kb_examples WHERE key > $1 ORDER BY key LIMIT $2"
        return [row["key"] for row in self.read(chosen, after, limit)]

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
        excess = total - capacity.rows
        if excess <= 0:
            return
        if pinned >= capacity.rows:
            raise StoreFullError(
                f"the capacity of {capacity.rows} is full of pinned examples, got {pinned}",
                hint="unpin examples (bottega unpin), or open with a larger capacity",
            )
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


async def _lock(connection: Connection) -> None:
    await connection.execute("SELECT pg_advisory_xact_lock($1)", WRITE_LOCK)


async def _claim_views(connection: Connection, views: Mapping[str, EmbeddedBatch]) -> list[int]:
    """Return the numbers of the views, in order. The first batch defines the views."""
    stored = {row["name"]: StoredView(*row) for row in await connection.fetch(VIEWS)}
    if not stored:
        if await connection.fetchval("SELECT EXISTS (SELECT 1 FROM kb_examples)"):
            raise StoreError(
                "the stored examples have no vectors",
                hint="run bottega verify --repair, or verify(repair=True)",
            )
        for name, made in views.items():
            await _drop_views(connection, name, "fingerprint = $2", made.fingerprint)
            await _create_view(connection, name, made.fingerprint, made.vectors.shape[1], True)
        return await _claim_views(connection, views)
    check_views(stored, {name: made.fingerprint for name, made in views.items()})
    check_dimensions(stored, {name: made.vectors.shape[1] for name, made in views.items()})
    if missing := stored.keys() - views.keys():
        raise more_views_error(missing)
    return [stored[name].number for name in views]


async def _create_view(
    connection: Connection, name: str, fingerprint: str, dimension: int, complete: bool
) -> int:
    if dimension > MAX_DIMENSION:
        raise StoreError(
            f"the vectors {name!r} have {dimension} numbers, and PostgreSQL indexes up to"
            f" {MAX_DIMENSION}",
            hint="use an embedder with shorter vectors, or a file",
        )
    number = await connection.fetchval(
        "INSERT INTO kb_views (name, fingerprint, dimension, complete) VALUES ($1, $2, $3, $4)"
        " RETURNING number",
        *(name, fingerprint, dimension, complete),
    )
    await connection.execute(create_vectors(number, dimension))
    return int(number)


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


def _missing(number: int) -> str:
    return (
        "FROM kb_examples WHERE NOT EXISTS (SELECT 1 FROM"
        f" {vectors_table(number)} AS made WHERE made.key = kb_examples.key)"
    )


async def _log(connection: Connection, op: str, keys: Sequence[int]) -> None:
    await connection.execute(
        "INSERT INTO kb_changes (op, key, id, namespace) SELECT $1, key, id, namespace"
        " FROM kb_examples WHERE key = ANY($2::bigint[]) ORDER BY key",
        op,
        list(keys),
    )


async def _remove(connection: Connection, keys: Sequence[int]) -> None:
    """Delete rows with their vectors, uses and unused images, and log it."""
    if not keys:
        return
    seen = await connection.fetch(
        "SELECT DISTINCT sha256 FROM kb_example_images WHERE key = ANY($1::bigint[])", list(keys)
    )
    await _log(connection, "delete", keys)  # before the deletion, because it reads the rows
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
