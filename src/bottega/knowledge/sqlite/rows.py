"""Examples in one SQLite file; search indexes are derived from these rows."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock

import numpy as np
import orjson

from bottega._util import sqlite
from bottega._util.identity import Exclude, query_digests
from bottega._util.progress import Stages
from bottega._util.sqlite import MEMORY
from bottega.errors import SettingError
from bottega.image import Image, path_text
from bottega.knowledge.eviction import Capacity
from bottega.knowledge.filters import Filter
from bottega.knowledge.index.index_files import index_files
from bottega.knowledge.index.vector_index import VectorMetric
from bottega.knowledge.records import (
    Change,
    ColumnValue,
    EmbeddedBatch,
    Footprint,
    RowMetadata,
    StoredView,
    UsageRecord,
    Views,
    check_known,
    from_row,
    storable_text,
)
from bottega.knowledge.sqlite import writes
from bottega.knowledge.sqlite.filters import LABELS, to_sql
from bottega.knowledge.sqlite.schema import KNOWLEDGE_BASE, connect
from bottega.knowledge.sqlite.search import HNSW_ABOVE, FileSearch
from bottega.knowledge.sqlite.verification import file_checks
from bottega.knowledge.sqlite.writes import (
    COMPLETE_VIEWS,
    IN_JSON,
    LOST_PREFIX,
    MISSING_VECTORS,
    PINNED_IDS,
)
from bottega.knowledge.stores import StoreChecks
from bottega.protocols import Vectors
from bottega.types import Example, ExampleChange, Query

LISTED_THIRD = "(SELECT value FROM json_each(?3))"
# CROSS JOIN fixes the join order: SQLite walks the list and looks up each key.
SELECT_EXAMPLES = (
    "SELECT examples.* FROM json_each(?) AS chosen CROSS JOIN examples"
    " ON examples.key = chosen.value"
)
SELECT_IMAGES = (
    "SELECT shown.key, data, media_type, sha256, width, height, source"
    " FROM json_each(?) AS chosen CROSS JOIN example_images AS shown ON shown.key = chosen.value"
    " CROSS JOIN images USING (sha256) ORDER BY shown.key, position"
)
NUL = "\\u0000"


class SqliteRows:
    """Durable examples of one namespace of a file; the rows of other namespaces are hidden.

    A write that has returned survives a crash. Methods are safe to call from several threads while
    other processes write to the same file. One connection reads and one writes, so readers do not
    wait for a writer's disk.
    """

    def __init__(
        self, path: str, *, create: bool = True, busy_seconds: float = 10.0, namespace: str = ""
    ) -> None:
        self.namespace = namespace
        # Absolute: the working folder may change, and index files are beside the database.
        self.path = path if path == MEMORY else str(Path(path).absolute())
        self.name = "the knowledge base in memory" if path == MEMORY else path_text(path)
        with KNOWLEDGE_BASE.translated(self.name):
            self._writer = connect(path, create=create, busy_seconds=busy_seconds)
            self._reader = self._writer
            self._writing = self._reading = RLock()
            try:
                KNOWLEDGE_BASE.migrate(self._writer, self.name)
                if path != MEMORY:
                    self._reader = connect(path, create=False, busy_seconds=busy_seconds)
                    self._reading = RLock()
            except BaseException:
                self._writer.close()
                raise
        self._reader.row_factory = sqlite3.Row
        self._last_seq = (-1, 0)

    def close(self) -> None:
        # In this order, the order of every caller that takes both.
        with self._writing, self._reading, KNOWLEDGE_BASE.translated(self.name):
            self._reader.close()
            self._writer.close()

    def read(self, statement: str, *values: ColumnValue) -> list[sqlite3.Row]:
        with self._reading, KNOWLEDGE_BASE.translated(self.name):
            return self._reader.execute(statement, values).fetchall()

    def open_search(self, views: Views, metric: VectorMetric, hnsw_above: int | None) -> FileSearch:
        return FileSearch(self, views, metric, HNSW_ABOVE if hnsw_above is None else hnsw_above)

    def checks(self, stages: Stages) -> StoreChecks:
        return file_checks(self, stages)

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let all reads inside see one moment, regardless of other processes' commits."""
        with self._reading, KNOWLEDGE_BASE.translated(self.name):
            # `:memory:` has one connection, whose own transaction may be open.
            if self._reader.in_transaction:
                yield
                return
            self._reader.execute("BEGIN")
            try:
                yield
            finally:
                self._reader.execute("COMMIT")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with (
            self._writing,
            KNOWLEDGE_BASE.translated(self.name),
            sqlite.transaction(self._writer) as connection,
        ):
            yield connection

    def checkpoint(self) -> bool:
        """Move the write-ahead log into the file; return whether another process prevents it."""
        with self._writing, KNOWLEDGE_BASE.translated(self.name):
            return bool(self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Translate errors while values are built from rows."""
        with KNOWLEDGE_BASE.reading(self.name):
            yield

    def put(
        self,
        examples: Sequence[Example],
        views: Mapping[str, EmbeddedBatch],
        capacity: Capacity | None = None,
        metadata_by_id: Mapping[str, RowMetadata] | None = None,
        supersede: bool = False,
        pin: bool = False,
    ) -> int:
        """Store the examples with new ids in one transaction and return their number.

        `metadata_by_id` sets age, pin and counters before eviction. With `supersede`, each example
        replaces older answers to the same question; it is skipped if one of those is pinned, unless
        `pin`: then it replaces those, too, and is pinned. Raises `EmbedderMismatchError` if the
        stored vectors have another fingerprint.
        """
        with self.transaction() as connection:
            numbers = writes.claim_views(connection, views)
            new = 0
            for example, *vectors in zip(
                examples, *(made.vectors for made in views.values()), strict=True
            ):
                if supersede:
                    if not pin and writes.has_pinned_answer(connection, self.namespace, example):
                        continue
                    writes.remove_answers(connection, self.namespace, example)
                by_number = dict(zip(numbers, vectors, strict=True))
                key = writes.insert_row(connection, example, by_number, self.namespace)
                if key is None:
                    continue
                new += 1
                metadata = (metadata_by_id or {}).get(example.id or "")
                if metadata is not None:
                    writes.set_metadata(connection, key, metadata)
                if pin:
                    connection.execute("INSERT INTO uses (key, pinned) VALUES (?, 1)", [key])
            # Evicted before the commit: no reader sees more rows than the capacity.
            if new:
                if capacity is not None:
                    writes.evict_excess(connection, self.namespace, capacity)
                writes.prune(connection, new)
            return new

    def annotate(self, id: str, fields: Mapping[str, str | None], tags: Mapping[str, str]) -> bool:
        """Set these fields and add these tags. Return False if the id does not exist.

        The row gets a new key, because the content of a key never changes; vectors, uses and age
        stay.
        """
        with self.transaction() as connection, self.decoding():
            done = writes.annotate_row(connection, self.namespace, id, fields, tags)
            writes.prune(connection, int(done))
            return done

    def delete(self, ids: Collection[str]) -> int:
        with self.transaction() as connection:
            found = connection.execute(
                f"SELECT key FROM examples WHERE namespace = ? AND id IN {IN_JSON}",
                (self.namespace, json_array(ids)),
            )
            keys = [row[0] for row in found]
            writes.remove_rows(connection, keys)
            return len(keys)

    def pin(self, ids: Collection[str], pinned: bool) -> int:
        with self.transaction() as connection:
            found = connection.execute(
                f"SELECT id FROM examples WHERE namespace = ? AND id IN {IN_JSON}",
                (self.namespace, json_array(ids)),
            )
            check_known(ids, {row[0] for row in found})
            cursor = connection.execute(
                "INSERT INTO uses (key, pinned)"
                " SELECT key, ? FROM examples LEFT JOIN uses USING (key)"
                f" WHERE namespace = ? AND id IN {IN_JSON} AND coalesce(pinned, 0) != ?"
                " ON CONFLICT (key) DO UPDATE SET pinned = excluded.pinned",
                (pinned, self.namespace, json_array(ids), pinned),
            )
            return cursor.rowcount

    def add_uses(self, uses: Mapping[str, UsageRecord]) -> None:
        """Add to the counters; deleted examples are ignored."""
        with self.transaction() as connection:
            connection.executemany(
                "INSERT INTO uses (key, count, last_used, saved_usd)"
                " SELECT key, ?, ?, ? FROM examples WHERE namespace = ? AND id = ?"
                " ON CONFLICT (key) DO UPDATE SET count = count + excluded.count,"
                " last_used = max(coalesce(last_used, 0), excluded.last_used),"
                " saved_usd = saved_usd + excluded.saved_usd",
                [
                    (use.count, use.last_used, use.saved_usd, self.namespace, id)
                    for id, use in uses.items()
                ],
            )

    def set_note(self, name: str, value: str) -> None:
        with self.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, value))

    def get(self, ids: Collection[str]) -> dict[str, Example]:
        # One snapshot for both reads: another process may delete an example in between.
        with self.snapshot():
            found = self.by_keys(self.keys(ids).values())
        return {str(example.id): example for example in found.values()}

    def by_keys(self, keys: Collection[int]) -> dict[int, Example]:
        chosen = json_array(keys)
        with self.snapshot():
            rows = self.read(SELECT_EXAMPLES, chosen)
            image_rows = self.read(SELECT_IMAGES, chosen)
        images: defaultdict[int, list[Image]] = defaultdict(list)
        for key, *fields in image_rows:
            images[key].append(Image(*fields))
        with self.decoding():
            return {row["key"]: from_row(row, images[row["key"]]) for row in rows}

    def keys(self, ids: Collection[str]) -> dict[str, int]:
        found = self.read(
            f"SELECT id, key FROM examples WHERE namespace = ? AND id IN {IN_JSON}",
            *(self.namespace, json_array(ids)),
        )
        return {row["id"]: row["key"] for row in found}

    def all_keys(self, after: int, limit: int) -> list[int]:
        chosen = "SELECT key FROM examples WHERE key > ? ORDER BY key LIMIT ?"
        return [row[0] for row in self.read(chosen, after, limit)]

    def ids_of(self, keys: Sequence[int]) -> list[str]:
        chosen = f"SELECT id FROM examples WHERE key IN {IN_JSON} ORDER BY key"
        return [str(row[0]) for row in self.read(chosen, json_array(keys))]

    def last_key(self) -> int:
        """Return the highest key of any namespace."""
        return int(self.read("SELECT coalesce(max(key), 0) FROM examples")[0][0])

    def keys_digest(self) -> tuple[int, int]:
        """Return the number and the sum of the keys, to compare with those of an index."""
        (row,) = self.read(
            "SELECT count(*), coalesce(sum(key), 0) FROM examples WHERE namespace = ?",
            self.namespace,
        )
        return row[0], row[1]

    def pinned_ids(self, question_digests: Collection[str]) -> dict[str, str]:
        """Return the ids of pinned examples by question digest."""
        found = self.read(PINNED_IDS, self.namespace, json_array(question_digests))
        return {row["question_digest"]: row["id"] for row in found}

    def excluded_keys(self, query: Query, exclude: Exclude) -> set[int]:
        """Return the keys of the rows that `exclude` rules out: the query's own id, and rows that
        share an image with it or are the same question."""
        own_id = "SELECT key FROM examples WHERE namespace = ?1 AND id = ?2"
        if exclude == "same-question":
            same_question = f"namespace = ?1 AND question_digest IN {LISTED_THIRD}"
            either = f"{own_id} UNION SELECT key FROM examples WHERE {same_question}"
            wanted = json_array(query_digests(query))
            found = self.read(either, self.namespace, query.id, wanted)
        elif query.images or query.id is not None:
            same_image = f"SELECT key FROM example_images WHERE sha256 IN {LISTED_THIRD}"
            wanted = json_array({image.sha256 for image in query.images})
            found = self.read(f"{own_id} UNION {same_image}", self.namespace, query.id, wanted)
        else:
            return set()
        return {row[0] for row in found}

    def same_image_keys(self, keys: Collection[int]) -> dict[int, set[int]]:
        """Return for each key itself and the keys of the rows that share an image with it."""
        found = self.read(
            "SELECT own.key, other.key FROM example_images AS own"
            f" JOIN example_images AS other USING (sha256) WHERE own.key IN {IN_JSON}",
            json_array(keys),
        )
        same = {key: {key} for key in keys}
        for key, other in found:
            same[key].add(other)
        return same

    def ids_where(self, where: Filter | None = None) -> list[str]:
        """Return the ids that match, in insertion order."""
        text, values = ("true", []) if where is None else to_sql(where)
        found = self.read(
            f"SELECT id FROM examples WHERE namespace = ? AND {text} ORDER BY examples.key",
            self.namespace,
            *values,
        )
        return [row[0] for row in found]

    def keys_where(self, where: Filter, after: int = 0) -> list[int]:
        """Return the keys above `after` that match, ascending."""
        text, values = to_sql(where)
        found = self.read(
            "SELECT examples.key FROM examples WHERE namespace = ? AND examples.key > ?"
            f" AND {text} ORDER BY examples.key",
            self.namespace,
            after,
            *values,
        )
        return [row[0] for row in found]

    def ids_with_prefix(self, prefix: str, limit: int) -> list[str]:
        found = self.read(
            "SELECT id FROM examples WHERE namespace = ? AND id >= ? AND id < ?"
            " ORDER BY id LIMIT ?",
            self.namespace,
            prefix,
            prefix + "g",  # "g" follows the last hexadecimal digit
            limit,
        )
        return [row[0] for row in found]

    def count(self) -> int:
        found = self.read("SELECT count(*) FROM examples WHERE namespace = ?", self.namespace)
        return int(found[0][0])

    def labels(self) -> dict[str, list[str]]:
        """Return the ids of each label, with labels in order of first appearance."""
        found = self.read(
            f"SELECT label.value, examples.id FROM examples, {LABELS} AS label"
            " WHERE namespace = ? ORDER BY examples.key, label.key",
            self.namespace,
        )
        ids: defaultdict[str, list[str]] = defaultdict(list)
        for label, id_ in found:
            ids[label].append(id_)
        return dict(ids)

    def is_multi_label(self) -> bool:
        (row,) = self.read(
            "SELECT EXISTS (SELECT 1 FROM examples WHERE namespace = ?"
            " AND labels IS NOT NULL AND json_array_length(labels) != 1)",
            self.namespace,
        )
        return bool(row[0])

    def contradictions(self) -> list[list[str]]:
        found = self.read(
            "SELECT group_concat(id, ' ') FROM examples WHERE namespace = ?"
            " GROUP BY question_digest HAVING count(DISTINCT answer) > 1 ORDER BY min(key)",
            self.namespace,
        )
        return [str(row[0]).split() for row in found]

    def images(self, sha256s: Collection[str]) -> dict[str, Image]:
        found = self.read(
            "SELECT data, media_type, sha256, width, height FROM images"
            f" WHERE sha256 IN {IN_JSON} AND EXISTS (SELECT 1 FROM example_images AS shown"
            " JOIN examples USING (key)"
            " WHERE shown.sha256 = images.sha256 AND namespace = ?)",
            *(json_array(sha256s), self.namespace),
        )
        return {row["sha256"]: Image(*row) for row in found}

    def note(self, name: str) -> str | None:
        found = self.read("SELECT value FROM notes WHERE name = ?", name)
        with self.decoding():
            return storable_text(found[0][0]) if found else None

    def namespaces(self) -> dict[str, int]:
        counted = "SELECT namespace, count(*) FROM examples GROUP BY namespace ORDER BY namespace"
        return {row[0]: row[1] for row in self.read(counted)}

    def metadata_by_id(self, keys: Collection[int]) -> dict[int, RowMetadata]:
        found = self.read(
            "SELECT examples.key, created, coalesce(count, 0), last_used, coalesce(saved_usd, 0),"
            " coalesce(pinned, 0) FROM json_each(?) AS chosen CROSS JOIN examples"
            " ON examples.key = chosen.value LEFT JOIN uses ON uses.key = examples.key",
            json_array(keys),
        )
        return {row[0]: RowMetadata(row[1], row[2], row[3], row[4], bool(row[5])) for row in found}

    def footprint(self) -> Footprint:
        (row,) = self.read(
            "SELECT (SELECT count(*) FROM examples WHERE namespace = ?1),"
            " (SELECT count(DISTINCT sha256) FROM example_images JOIN examples USING (key)"
            " WHERE namespace = ?1),"
            " (SELECT count(*) FROM uses JOIN examples USING (key)"
            " WHERE namespace = ?1 AND pinned),"
            " (SELECT page_count FROM pragma_page_count)"
            " * (SELECT page_size FROM pragma_page_size),"
            " (SELECT user_version FROM pragma_user_version)",
            self.namespace,
        )
        return Footprint(*row)

    def sizes(self) -> tuple[int, int, int]:
        examples, images, vectors = (
            int(self.read(f"SELECT count(*) FROM {table}")[0][0])
            for table in ("examples", "images", "vectors")
        )
        return examples, images, vectors

    def last_seq(self) -> int:
        """Return the number of the newest change by any process."""
        with self._reading, KNOWLEDGE_BASE.translated(self.name):
            # Read first: a later commit changes the next version, so none is missed. In memory,
            # the single connection does not count its own commits.
            version = self._reader.execute("PRAGMA data_version").fetchone()[0]
            if self._reader is self._writer or version != self._last_seq[0]:
                newest = "SELECT coalesce(max(seq), 0) FROM changes"
                self._last_seq = (version, self._reader.execute(newest).fetchone()[0])
            return self._last_seq[1]

    def changes_since(self, seq: int, limit: int, view: int = 1) -> list[Change]:
        """Return up to `limit` changes after `seq`. Those of other namespaces are included without
        a vector: to this index they are rows that it never had."""
        found = self.read(
            "SELECT seq, changes.key, vector FROM changes LEFT JOIN vectors"
            " ON vectors.key = changes.key AND view = ? AND namespace = ?"
            " WHERE seq > ? ORDER BY seq LIMIT ?",
            *(view, self.namespace, seq, limit),
        )
        with self.decoding():
            return [
                Change(seq, key, None if blob is None else np.frombuffer(blob, np.float32))
                for seq, key, blob in found
            ]

    def example_changes_since(self, seq: int, limit: int) -> list[ExampleChange]:
        found = self.read(
            "SELECT seq, id, NOT EXISTS (SELECT 1 FROM examples WHERE key = changes.key)"
            " FROM changes WHERE namespace = ? AND op != 'view' AND seq > ? ORDER BY seq LIMIT ?",
            *(self.namespace, seq, limit),
        )
        return [ExampleChange(seq, id, bool(deleted)) for seq, id, deleted in found]

    def mark(self, seq: int) -> int | None:
        """Return the random number of change `seq`, or None if the log has lost the change.

        Two files with the same mark share that change: a restored copy that diverged has other
        marks.
        """
        found = self.read("SELECT mark FROM changes WHERE seq = ?", seq)
        return int(found[0][0]) if found else None

    def pruned(self) -> int:
        """Return the last change of the namespace that the log has lost. A reader of an earlier
        change may miss a deletion.

        Call it after `changes_since`, because another process may prune in between.
        """
        found = self.read("SELECT value FROM meta WHERE name = ?", f"{LOST_PREFIX}{self.namespace}")
        return int(found[0][0]) if found else 0

    def views(self) -> dict[str, StoredView]:
        """Return the complete views by name, in order of creation."""
        return {row["name"]: StoredView(*row) for row in self.read(COMPLETE_VIEWS)}

    def begin_view(self, name: str, fingerprint: str, dimension: int) -> tuple[int, bool]:
        """Return the number of the view to fill, and whether searches already use it."""
        with self.transaction() as connection:
            return writes.begin_view(connection, name, fingerprint, dimension)

    def count_vectors(self, number: int) -> int:
        counted = "SELECT count(*) FROM examples JOIN vectors USING (key) WHERE view = ?"
        return int(self.read(counted, number)[0][0])

    def missing_keys(self, number: int) -> list[int]:
        """Return the keys of the examples that lack a vector of this view."""
        return [row[0] for row in self.read(f"SELECT key {MISSING_VECTORS} ORDER BY key", number)]

    def set_vectors(self, number: int, vectors: Mapping[int, Vectors], *, logged: bool) -> None:
        """Store vectors by key. Raises `StoreError` if another run has dropped the view."""
        with self.transaction() as connection:
            writes.check_view(connection, number)
            # Only for rows that still exist: embedding ran outside of the transaction.
            connection.executemany(
                "INSERT OR REPLACE INTO vectors (key, view, vector, checksum)"
                " SELECT key, ?, ?, ? FROM examples WHERE key = ?",
                [(number, *writes.blob_and_checksum(v), key) for key, v in vectors.items()],
            )
            if logged:
                writes.log_change(connection, "put", list(vectors))

    def complete_view(self, name: str, number: int) -> bool:
        """Replace the old view if no example lacks the new vector; return whether that is the
        case."""
        with self.transaction() as connection:
            complete = writes.check_view(connection, number)
            if connection.execute(f"SELECT 1 {MISSING_VECTORS} LIMIT 1", [number]).fetchone():
                return False
            if complete:
                return True
            writes.drop_views(connection, name, "number != ?", number)
            connection.execute("UPDATE views SET complete = 1 WHERE number = ?", [number])
            # Notifies other handles that their vectors were replaced.
            connection.execute("INSERT INTO changes (op, key) VALUES ('view', 0)")
        return True

    def drop_view(self, name: str) -> None:
        """Delete the view, its vectors and its index files."""
        for path in index_files(self.path, [name]):
            with suppress(OSError):
                path.unlink()
        with self.transaction() as connection:
            writes.drop_views(connection, name, "number != ?", 0)  # numbers begin at 1
            connection.execute("INSERT INTO changes (op, key) VALUES ('view', 0)")

    def vectors(self, keys: Collection[int], view: int) -> dict[int, Vectors]:
        found = self.read(
            f"SELECT key, vector FROM vectors WHERE view = ? AND key IN {IN_JSON}",
            *(view, json_array(keys)),
        )
        with self.decoding():
            return {key: np.frombuffer(blob, np.float32) for key, blob in found}

    def vectors_of_images(self, sha256s: Collection[str], view: int) -> dict[str, Vectors]:
        """Return the vectors of examples with exactly one image, by its hash."""
        found = self.read(
            "SELECT shown.sha256, vector FROM example_images AS shown JOIN vectors USING (key)"
            f" WHERE shown.sha256 IN {IN_JSON} AND view = ? AND NOT EXISTS"
            " (SELECT 1 FROM example_images AS o WHERE o.key = shown.key AND o.position > 0)",
            *(json_array(sha256s), view),
        )
        with self.decoding():
            return {sha256: np.frombuffer(blob, np.float32) for sha256, blob in found}

    def vectors_after(self, key: int, limit: int, view: int) -> list[tuple[int, Vectors]]:
        found = self.read(
            "SELECT examples.key, vector FROM examples JOIN vectors USING (key)"
            " WHERE namespace = ? AND view = ? AND examples.key > ?"
            " ORDER BY examples.key LIMIT ?",
            *(self.namespace, view, key, limit),
        )
        with self.decoding():
            return [(key, np.frombuffer(blob, np.float32)) for key, blob in found]

    def checked_vectors(self, keys: Sequence[int], view: StoredView) -> dict[int, Vectors | None]:
        """Return the vector of each key, None if missing or damaged. Keys that another process has
        deleted since they were read are absent."""
        found = self.read(
            "SELECT examples.key, CAST(vector AS BLOB), checksum FROM json_each(?1) AS chosen"
            " CROSS JOIN examples ON examples.key = chosen.value"
            " LEFT JOIN vectors ON vectors.key = examples.key AND view = ?2"
            " WHERE EXISTS (SELECT 1 FROM views WHERE number = ?2)",
            *(json_array(keys), view.number),
        )
        return {
            key: writes.valid_vector(blob, checksum, view.dimension)
            for key, blob, checksum in found
        }


def json_array(values: Collection[str | int]) -> str:
    try:
        text = orjson.dumps(list(values)).decode()
    except TypeError:
        text = NUL
    if NUL in text:  # SQLite would cut the text at the NUL
        raise SettingError(
            f"ids must be texts without NULs, got {list(values)!a}", hint="bottega ls shows the ids"
        )
    return text
