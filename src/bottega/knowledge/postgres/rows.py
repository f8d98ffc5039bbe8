"""Examples of a knowledge base in PostgreSQL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from bottega._util.identity import Exclude, query_digests, question_digest
from bottega._util.postgres import PostgresPool
from bottega._util.postgres_database import PostgresDatabase
from bottega._util.progress import Stages
from bottega.image import Image
from bottega.knowledge.eviction import Capacity
from bottega.knowledge.filters import Filter
from bottega.knowledge.index.vector_index import VectorMetric
from bottega.knowledge.postgres import writes
from bottega.knowledge.postgres.filters import LABELS, Parameters, to_condition
from bottega.knowledge.postgres.schema import KNOWLEDGE_BASE, set_up, vectors_table
from bottega.knowledge.postgres.search import HNSW_ABOVE, PostgresSearch
from bottega.knowledge.postgres.writes import MAX_STATEMENT_BYTES, VIEWS, ExampleRow, InsertResult
from bottega.knowledge.records import (
    EmbeddedBatch,
    Footprint,
    RowMetadata,
    StoredView,
    UsageRecord,
    Views,
    check_dimensions,
    check_known,
    from_row,
)
from bottega.knowledge.stores import StoreChecks
from bottega.protocols import Vectors
from bottega.types import Example, ExampleChange, Query

if TYPE_CHECKING:
    from asyncpg import Connection

T = TypeVar("T")
ANSWER_SECONDS = 15.0
WRITE_SECONDS = 60.0  # a writer may wait for another one
# One statement: another process may delete an example between two.
SELECT_EXAMPLES = (
    "SELECT examples.*, image.sha256, data, media_type, width, height, shown.source AS shown_source"
    " FROM unnest($1::bigint[]) WITH ORDINALITY AS chosen (key, ordinal)"
    " JOIN kb_examples AS examples USING (key)"
    " LEFT JOIN kb_example_images AS shown USING (key)"
    " LEFT JOIN kb_images AS image ON image.sha256 = shown.sha256"
    " ORDER BY chosen.ordinal, position"
)


class PostgresRows(PostgresDatabase):
    """Durable examples of one namespace. Methods are safe to call from several threads while other
    processes write."""

    def __init__(self, url: str, namespace: str = "", *, create: bool = True) -> None:
        super().__init__(
            url, KNOWLEDGE_BASE, setup=set_up, answer_seconds=ANSWER_SECONDS, create=create
        )
        self.namespace = namespace
        # The views of the last insertion (name, fingerprint, dimension), and their numbers.
        self._claimed: tuple[tuple[tuple[str, str, int], ...], Sequence[int]] = ((), ())

    def write(self, work: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
        """Run work in one transaction, one writer at a time. After a lost connection it is not
        repeated, because the server may have committed it."""

        async def transaction(pool: PostgresPool) -> T:
            writing = pool.connection(seconds=WRITE_SECONDS)
            async with writing as connection, writes.write_transaction(connection):
                return await work(connection)

        return self.run(transaction)

    def open_search(
        self, views: Views, metric: VectorMetric, hnsw_above: int | None
    ) -> PostgresSearch:
        return PostgresSearch(self, views, metric, HNSW_ABOVE if hnsw_above is None else hnsw_above)

    def checks(self, stages: Stages) -> StoreChecks:
        """Return no own checks: the server checks its pages and indexes."""
        return StoreChecks()

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
            numbers = await writes.claim_views(connection, views)
            kept = rows
            if supersede:
                pinned = (
                    ()
                    if pin
                    else await writes.pinned_questions(connection, self.namespace, examples)
                )
                kept = [row for row in rows if question_digest(row.example) not in pinned]
                await writes.remove_answers(
                    connection, self.namespace, [row.example for row in kept]
                )
            new = await writes.insert_examples(connection, self.namespace, kept, numbers)
            assert new is not None  # this transaction holds the lock and has claimed the views
            self._claimed = given, numbers
            for id, metadata in (metadata_by_id or {}).items():
                if id in new.keys:
                    await writes.set_metadata(connection, new.keys[id], metadata)
            if pin:
                pinned_keys = "INSERT INTO kb_uses (key, pinned) SELECT unnest($1::bigint[]), true"
                await connection.execute(pinned_keys, list(new.keys.values()))
            if new.keys:
                if capacity is not None:
                    await writes.evict_excess(connection, self.namespace, capacity)
                await writes.prune(connection, len(new.keys), new.last_seq)
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
                return await writes.insert_examples(connection, self.namespace, rows, numbers)

        new = self.run(insert)
        if new is not None and new.keys and writes.is_pruning_due(len(new.keys), new.last_seq):
            self.write(lambda connection: writes.prune(connection, len(new.keys), new.last_seq))
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
            await writes.log_changes(connection, "delete", [found["key"]])
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
            await writes.log_changes(connection, "put", [key])
            last = await connection.fetchval("SELECT max(seq) FROM kb_changes")
            await writes.prune(connection, 1, last)
            return True

        return self.write(work)

    def delete(self, ids: Collection[str]) -> int:
        async def work(connection: Connection) -> int:
            found = await connection.fetch(
                "SELECT key FROM kb_examples WHERE namespace = $1 AND id = ANY($2::text[])",
                self.namespace,
                list(ids),
            )
            await writes.remove_rows(connection, [row["key"] for row in found])
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

    def all_keys(self, after: int, limit: int) -> list[int]:
        chosen = "SELECT key FROM kb_examples WHERE key > $1 ORDER BY key LIMIT $2"
        return [row["key"] for row in self.read(chosen, after, limit)]

    def ids_of(self, keys: Sequence[int]) -> list[str]:
        chosen = "SELECT id FROM kb_examples WHERE key = ANY($1::bigint[]) ORDER BY key"
        return [row["id"] for row in self.read(chosen, list(keys))]

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
        """Return the statement that selects the excluded keys, and add its values."""
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
            " WITH ORDINALITY AS label (value, ordinal) WHERE namespace = $1"
            " ORDER BY key, label.ordinal",
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

    def note(self, name: str) -> str | None:
        found = self.read("SELECT value FROM kb_notes WHERE name = $1", name)
        return str(found[0]["value"]) if found else None

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

    def sizes(self) -> tuple[int, int, int]:
        examples, images = (
            int(self.read(f"SELECT count(*) AS n FROM {table}")[0]["n"])
            for table in ("kb_examples", "kb_images")
        )
        vectors = sum(self.count_vectors(view.number) for view in self.views().values())
        return examples, images, vectors

    def last_seq(self) -> int:
        newest = "SELECT coalesce(max(seq), 0) AS seq FROM kb_changes WHERE namespace = $1"
        return int(self.read(newest, self.namespace)[0]["seq"])

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

    def begin_view(self, name: str, fingerprint: str, dimension: int) -> tuple[int, bool]:
        async def work(connection: Connection) -> tuple[int, bool]:
            await writes.drop_views(
                connection, name, "NOT complete AND fingerprint != $2", fingerprint
            )
            row = await connection.fetchrow(
                "SELECT number, complete, dimension FROM kb_views"
                " WHERE name = $1 AND fingerprint = $2",
                name,
                fingerprint,
            )
            if row is None:
                return await writes.new_view(connection, name, fingerprint, dimension, False), False
            stored = StoredView(row["number"], name, fingerprint, row["dimension"])
            check_dimensions({name: stored}, {name: dimension})
            return row["number"], row["complete"]

        return self.write(work)

    def count_vectors(self, number: int) -> int:
        return int(self.read(f"SELECT count(*) AS n FROM {vectors_table(number)}")[0]["n"])

    def missing_keys(self, number: int) -> list[int]:
        return [
            row["key"]
            for row in self.read(f"SELECT key {writes.without_vector(number)} ORDER BY key")
        ]

    def set_vectors(self, number: int, vectors: Mapping[int, Vectors], *, logged: bool) -> None:
        async def work(connection: Connection) -> None:
            await writes.check_view(connection, number)
            await connection.executemany(
                f"INSERT INTO {vectors_table(number)} SELECT key, namespace, $2::vector"
                " FROM kb_examples WHERE key = $1"
                " ON CONFLICT (key) DO UPDATE SET vector = excluded.vector",
                list(vectors.items()),
            )
            if logged:
                await writes.log_changes(connection, "put", list(vectors))

        self.write(work)

    def complete_view(self, name: str, number: int) -> bool:
        async def work(connection: Connection) -> bool:
            complete = await writes.check_view(connection, number)
            if await connection.fetchval(f"SELECT 1 {writes.without_vector(number)} LIMIT 1"):
                return False
            if not complete:
                await writes.drop_views(connection, name, "number != $2", number)
                await connection.execute(
                    "UPDATE kb_views SET complete = true WHERE number = $1", number
                )
            return True

        return self.write(work)

    def drop_view(self, name: str) -> None:
        """Delete the view and its vectors."""
        self.write(lambda connection: writes.drop_views(connection, name, "number != $2", 0))

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

    def checked_vectors(self, keys: Sequence[int], view: StoredView) -> dict[int, Vectors | None]:
        """Return the vector of each key, None if it is missing."""
        found = self.read(
            "SELECT key, vector FROM kb_examples"
            f" LEFT JOIN {vectors_table(view.number)} USING (key) WHERE key = ANY($1::bigint[])",
            list(keys),
        )
        return {row["key"]: row["vector"] for row in found}
