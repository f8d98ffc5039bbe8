"""Examples in one SQLite file: the truth from which indexes are derived."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock

import numpy as np
import orjson

from bottega.errors import EmbedderMismatchError
from bottega.image import Image, path_text
from bottega.knowledge.connection import MEMORY, connect
from bottega.knowledge.ports import Change, Footprint
from bottega.knowledge.records import Value, from_row, to_row
from bottega.knowledge.schema import KNOWLEDGE_BASE
from bottega.protocols import Vectors
from bottega.types import Example, Query

# A list of any length as one parameter.
LISTED = "(SELECT value FROM json_each(?))"
LABELS = "json_each(coalesce(labels, json_array(answer)))"


class SqliteRows:
    """Reads and writes go over two connections, so that no reader waits for a writer's disk."""

    def __init__(self, path: str, *, create: bool = True, busy_seconds: float = 10.0) -> None:
        self._name = "the knowledge base in memory" if path == MEMORY else path_text(path)
        with KNOWLEDGE_BASE.translated(self._name):
            self._writer = connect(path, create=create, busy_seconds=busy_seconds)
            self._reader = self._writer
            self._writing = self._reading = RLock()
            try:
                KNOWLEDGE_BASE.migrate(self._writer, self._name)
                if path != MEMORY:
                    self._reader = connect(path, create=False, busy_seconds=busy_seconds)
                    self._reading = RLock()
            except BaseException:
                self._writer.close()
                raise
        self._reader.row_factory = sqlite3.Row

    def put(self, examples: Sequence[Example], vectors: Vectors, fingerprint: str) -> int:
        with self._transaction() as connection:
            self._claim(connection, fingerprint, vectors.shape[1])
            pairs = zip(examples, vectors, strict=True)
            return sum(_insert(connection, example, vector) for example, vector in pairs)

    def delete(self, ids: Collection[str]) -> int:
        with self._transaction() as connection:
            found = connection.execute(
                f"SELECT key FROM examples WHERE id IN {LISTED}", [_listed(ids)]
            )
            keys = [row[0] for row in found]
            _remove(connection, keys)
            return len(keys)

    def get(self, ids: Collection[str]) -> dict[str, Example]:
        return {str(found.id): found for found in self._examples("id", ids).values()}

    def by_keys(self, keys: Collection[int]) -> dict[int, Example]:
        return self._examples("key", keys)

    def keys(self, ids: Collection[str]) -> dict[str, int]:
        found = self._read(f"SELECT id, key FROM examples WHERE id IN {LISTED}", _listed(ids))
        return {row["id"]: row["key"] for row in found}

    def own_keys(self, query: Query) -> set[int]:
        found = self._read(
            f"SELECT key FROM example_images WHERE sha256 IN {LISTED}"
            " UNION SELECT key FROM examples WHERE id = ?",
            _listed({image.sha256 for image in query.images}),
            query.id,
        )
        return {row[0] for row in found}

    def ids_with_prefix(self, prefix: str, limit: int) -> list[str]:
        # "g" follows the last hexadecimal digit.
        found = self._read(
            "SELECT id FROM examples WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
            prefix,
            prefix + "g",
            limit,
        )
        return [row[0] for row in found]

    def ids_where(
        self,
        *,
        label: str | None = None,
        source: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> list[str]:
        conditions: list[str] = []
        values: list[Value] = []
        if label is not None:
            conditions.append(f"EXISTS (SELECT 1 FROM {LABELS} WHERE value = ?)")
            values.append(label)
        if source is not None:
            conditions.append("source = ?")
            values.append(source)
        for name, value in (tags or {}).items():
            conditions.append("EXISTS (SELECT 1 FROM json_each(tags) WHERE key = ? AND value = ?)")
            values += [name, value]
        where = " AND ".join(conditions) or "true"
        found = self._read(f"SELECT id FROM examples WHERE {where} ORDER BY examples.key", *values)
        return [row[0] for row in found]

    def labels(self) -> dict[str, list[str]]:
        found = self._read(
            f"SELECT label.value, examples.id FROM examples, {LABELS} AS label"
            " ORDER BY examples.key, label.key"
        )
        ids: defaultdict[str, list[str]] = defaultdict(list)
        for label, id_ in found:
            ids[label].append(id_)
        return dict(ids)

    def is_multi_label(self) -> bool:
        (row,) = self._read(
            "SELECT EXISTS (SELECT 1 FROM examples"
            " WHERE labels IS NOT NULL AND json_array_length(labels) != 1)"
        )
        return bool(row[0])

    def note(self, name: str) -> str | None:
        found = self._read("SELECT value FROM notes WHERE name = ?", name)
        return found[0][0] if found else None

    def set_note(self, name: str, value: str) -> None:
        with self._transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, value))

    def last_seq(self) -> int:
        return int(self._read("SELECT coalesce(max(seq), 0) FROM changes")[0][0])

    def changes_since(self, seq: int, limit: int) -> list[Change]:
        found = self._read(
            "SELECT seq, changes.key, vector FROM changes LEFT JOIN vectors USING (key)"
            " WHERE seq > ? ORDER BY seq LIMIT ?",
            seq,
            limit,
        )
        with KNOWLEDGE_BASE.reading(self._name):
            return [
                Change(seq, key, None if blob is None else np.frombuffer(blob, np.float32))
                for seq, key, blob in found
            ]

    def footprint(self) -> Footprint:
        (row,) = self._read(
            "SELECT (SELECT count(*) FROM examples), (SELECT count(*) FROM images),"
            " (SELECT page_count FROM pragma_page_count)"
            " * (SELECT page_size FROM pragma_page_size),"
            " (SELECT value FROM meta WHERE name = 'embedder'),"
            " (SELECT CAST(value AS INTEGER) FROM meta WHERE name = 'dimension'),"
            " (SELECT user_version FROM pragma_user_version)"
        )
        return Footprint(*row)

    def close(self) -> None:
        with self._writing, self._reading, KNOWLEDGE_BASE.translated(self._name):
            self._reader.close()
            self._writer.close()

    def _claim(self, connection: sqlite3.Connection, fingerprint: str, dimension: int) -> None:
        """The first batch decides which embedder this file belongs to."""
        connection.executemany(
            "INSERT OR IGNORE INTO meta VALUES (?, ?)",
            [("embedder", fingerprint), ("dimension", str(dimension))],
        )
        stored = connection.execute("SELECT value FROM meta WHERE name = 'embedder'").fetchone()[0]
        if stored != fingerprint:
            raise EmbedderMismatchError(stored, fingerprint)

    def _read(self, statement: str, *values: Value) -> list[sqlite3.Row]:
        with self._reading, KNOWLEDGE_BASE.translated(self._name):
            return self._reader.execute(statement, values).fetchall()

    def _examples(self, column: str, values: Collection[str | int]) -> dict[int, Example]:
        chosen = f"(SELECT key FROM examples WHERE {column} IN {LISTED})"
        listed = _listed(values)
        # One snapshot for both: another process may delete an example between them.
        with self._reading, KNOWLEDGE_BASE.translated(self._name), _snapshot(self._reader):
            rows = self._read(f"SELECT * FROM examples WHERE key IN {chosen}", listed)
            pictures = self._read(
                "SELECT key, data, media_type, sha256, width, height, source"
                " FROM example_images JOIN images USING (sha256)"
                f" WHERE key IN {chosen} ORDER BY key, place",
                listed,
            )
        images: defaultdict[int, list[Image]] = defaultdict(list)
        for key, *fields in pictures:
            images[key].append(Image(*fields))
        with KNOWLEDGE_BASE.reading(self._name):
            return {row["key"]: from_row(row, images[row["key"]]) for row in rows}

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._writing, KNOWLEDGE_BASE.translated(self._name):
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                # On a full disk SQLite has already rolled back.
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise


@contextmanager
def _snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("COMMIT")


def _listed(values: Collection[str | int]) -> str:
    return orjson.dumps(list(values)).decode()


def _insert(connection: sqlite3.Connection, example: Example, vector: Vectors) -> bool:
    row = to_row(example)
    places = ", ".join("?" * len(row))
    cursor = connection.execute(f"INSERT OR IGNORE INTO examples VALUES (NULL, {places})", row)
    if not cursor.rowcount:
        return False
    key = cursor.lastrowid
    for place, image in enumerate(example.query.images):
        connection.execute(
            "INSERT OR IGNORE INTO images VALUES (?, ?, ?, ?, ?)",
            (image.sha256, image.media_type, image.width, image.height, image.data),
        )
        connection.execute(
            "INSERT INTO example_images VALUES (?, ?, ?, ?)",
            (key, place, image.sha256, image.source),
        )
    blob = np.ascontiguousarray(vector, np.float32).tobytes()
    connection.execute("INSERT INTO vectors VALUES (?, ?)", (key, blob))
    connection.execute("INSERT INTO changes (op, key) VALUES ('put', ?)", (key,))
    return True


def _remove(connection: sqlite3.Connection, keys: list[int]) -> None:
    listed = _listed(keys)
    seen = connection.execute(
        f"SELECT DISTINCT sha256 FROM example_images WHERE key IN {LISTED}", [listed]
    )
    hashes = _listed([row[0] for row in seen])
    for table in ("examples", "vectors", "example_images"):
        connection.execute(f"DELETE FROM {table} WHERE key IN {LISTED}", [listed])
    connection.execute(
        f"DELETE FROM images WHERE sha256 IN {LISTED}"
        " AND NOT EXISTS (SELECT 1 FROM example_images AS kept WHERE kept.sha256 = images.sha256)",
        [hashes],
    )
    connection.executemany(
        "INSERT INTO changes (op, key) VALUES ('delete', ?)", [(key,) for key in keys]
    )
