"""SQLite file of a knowledge base: connections, change log, and statements that write rows."""

from __future__ import annotations

import sqlite3
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Self

import numpy as np
import orjson

from bottega._util import sqlite
from bottega._util.identity import question_digest
from bottega._util.sqlite import MEMORY
from bottega.errors import SettingError, StoreError
from bottega.image import path_text
from bottega.knowledge.records import (
    COLUMNS,
    Change,
    ColumnValue,
    EmbeddedBatch,
    RowMetadata,
    StoredView,
    check_dimensions,
    check_views,
    more_views_error,
    to_row,
)
from bottega.knowledge.sqlite.schema import KNOWLEDGE_BASE
from bottega.protocols import Vectors
from bottega.types import Example, ExampleChange


def connect(path: str, *, create: bool, busy_seconds: float) -> sqlite3.Connection:
    """Open a connection whose commits wait for the disk."""
    if path != MEMORY:
        _check_path(Path(path), create)
    return sqlite.connect(path, create=create, busy_seconds=busy_seconds, synchronous="FULL")


def _check_path(path: Path, create: bool) -> None:
    name = path_text(path)
    if "\0" in name:  # SQLite would cut the name at the NUL
        raise StoreError(f"the file name contains a NUL, got {name!r}", hint="check the path")
    if path.is_dir():
        raise StoreError(
            f"{name} is a folder, not a file", hint="give the path of a file, such as kb.db"
        )
    if not path.exists() and not create:
        raise StoreError(
            f"{name} does not exist", hint="check the path, or add examples to create it"
        )
    if not path.parent.is_dir():
        raise StoreError(
            f"the folder {path_text(path.parent)} does not exist", hint="create it first"
        )
    # SQLite accepts an empty file as a new database.
    if not create and path.stat().st_size == 0:
        raise StoreError(
            f"{name} is empty, not a knowledge base", hint="check the path, or delete the file"
        )


# SQL for a list of any length as one JSON parameter.
FIRST_VIEW = 1
# Name in `meta`, with a namespace after it, of the last change that its log has lost.
LOST_PREFIX = "pruned of "
NUL = "\\u0000"
IN_JSON = "(SELECT value FROM json_each(?))"


class Database:
    """Connections to a file, and its vectors and change log in one namespace.

    One connection reads and one writes, so readers do not wait for a writer's disk.
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

    def read(self, statement: str, *values: ColumnValue) -> list[sqlite3.Row]:
        with self._reading, KNOWLEDGE_BASE.translated(self.name):
            return self._reader.execute(statement, values).fetchall()

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

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Translate errors while values are built from rows."""
        with KNOWLEDGE_BASE.reading(self.name):
            yield

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

    def vectors(self, keys: Collection[int], view: int) -> dict[int, Vectors]:
        found = self.read(
            f"SELECT key, vector FROM vectors WHERE view = ? AND key IN {IN_JSON}",
            view,
            json_array(keys),
        )
        with self.decoding():
            return {key: np.frombuffer(blob, np.float32) for key, blob in found}

    def vectors_of_images(self, sha256s: Collection[str], view: int) -> dict[str, Vectors]:
        """Return the vectors of examples with exactly one image, by its hash."""
        found = self.read(
            "SELECT shown.sha256, vector FROM example_images AS shown JOIN vectors USING (key)"
            f" WHERE shown.sha256 IN {IN_JSON} AND view = ? AND NOT EXISTS"
            " (SELECT 1 FROM example_images AS o WHERE o.key = shown.key AND o.position > 0)",
            json_array(sha256s),
            view,
        )
        with self.decoding():
            return {sha256: np.frombuffer(blob, np.float32) for sha256, blob in found}

    def vectors_after(self, key: int, limit: int, view: int) -> list[tuple[int, Vectors]]:
        found = self.read(
            "SELECT examples.key, vector FROM examples JOIN vectors USING (key)"
            " WHERE namespace = ? AND view = ? AND examples.key > ?"
            " ORDER BY examples.key LIMIT ?",
            self.namespace,
            view,
            key,
            limit,
        )
        with self.decoding():
            return [(key, np.frombuffer(blob, np.float32)) for key, blob in found]

    def keys_digest(self) -> tuple[int, int]:
        """Return the number and the sum of the keys, to compare with those of an index."""
        (row,) = self.read(
            "SELECT count(*), coalesce(sum(key), 0) FROM examples WHERE namespace = ?",
            self.namespace,
        )
        return row[0], row[1]

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

    def changes_since(self, seq: int, limit: int, view: int = FIRST_VIEW) -> list[Change]:
        """Return up to `limit` changes after `seq`. Those of other namespaces are included without
        a vector: to this index they are rows that it never had."""
        found = self.read(
            "SELECT seq, changes.key, vector FROM changes LEFT JOIN vectors"
            " ON vectors.key = changes.key AND view = ? AND namespace = ?"
            " WHERE seq > ? ORDER BY seq LIMIT ?",
            view,
            self.namespace,
            seq,
            limit,
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
            self.namespace,
            seq,
            limit,
        )
        return [ExampleChange(seq, id, bool(deleted)) for seq, id, deleted in found]

    def close(self) -> None:
        # In this order, the order of every caller that takes both.
        with self._writing, self._reading, KNOWLEDGE_BASE.translated(self.name):
            self._reader.close()
            self._writer.close()


def json_array(values: Collection[str | int]) -> str:
    try:
        text = orjson.dumps(list(values)).decode()
    except TypeError as error:
        raise _id_error(values) from error
    if NUL in text:  # SQLite would cut the text at the NUL
        raise _id_error(values)
    return text


def _id_error(values: Collection[str | int]) -> SettingError:
    return SettingError(
        f"ids must be texts without NULs, got {list(values)!a}", hint="bottega ls shows the ids"
    )


class CloseOnExit(ABC):
    """Context manager that calls `close` on exit."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


PLACEHOLDERS = ", ".join("?" * (len(COLUMNS) + 2))
# Not OR IGNORE, which would also skip rows that violate a column constraint.
INSERT = (
    f"INSERT INTO examples ({', '.join(COLUMNS)}, namespace, question_digest)"
    f" VALUES ({PLACEHOLDERS})"
    " ON CONFLICT (namespace, id) DO NOTHING"
)
PINNED_IDS = (
    "SELECT question_digest, id FROM examples JOIN uses USING (key)"
    f" WHERE namespace = ? AND question_digest IN {IN_JSON} AND pinned"
)
COMPLETE_VIEWS = "SELECT number, name, fingerprint, dimension FROM views WHERE complete ORDER BY 1"


def claim_views(connection: sqlite3.Connection, views: Mapping[str, EmbeddedBatch]) -> list[int]:
    """Return the numbers of the views, in order. The first batch defines the views of the file."""
    stored = {row[1]: StoredView(*row) for row in connection.execute(COMPLETE_VIEWS)}
    if not stored:
        if connection.execute("SELECT EXISTS (SELECT 1 FROM examples)").fetchone()[0]:
            raise StoreError(
                "the stored examples have no vectors",
                hint="run bottega verify --repair, or verify(repair=True)",
            )
        connection.executemany(
            # An interrupted reindex of an empty file may have left an incomplete view.
            "INSERT INTO views (name, fingerprint, dimension, complete) VALUES (?, ?, ?, 1)"
            " ON CONFLICT (name, fingerprint)"
            " DO UPDATE SET dimension = excluded.dimension, complete = 1",
            [(name, made.fingerprint, made.vectors.shape[1]) for name, made in views.items()],
        )
        return claim_views(connection, views)
    check_views(stored, {name: made.fingerprint for name, made in views.items()})
    check_dimensions(stored, {name: made.vectors.shape[1] for name, made in views.items()})
    if missing := stored.keys() - views.keys():
        raise more_views_error(missing)
    return [stored[name].number for name in views]


def insert_row(
    connection: sqlite3.Connection, example: Example, vectors: Mapping[int, Vectors], namespace: str
) -> int | None:
    """Insert an example and return its key, or None if its id exists."""
    cursor = connection.execute(INSERT, (*to_row(example), namespace, question_digest(example)))
    if not cursor.rowcount:
        return None
    key = int(cursor.lastrowid or 0)
    for position, image in enumerate(example.query.images):
        connection.execute(
            "INSERT OR IGNORE INTO images VALUES (?, ?, ?, ?, ?)",
            (image.sha256, image.media_type, image.width, image.height, image.data),
        )
        connection.execute(
            "INSERT INTO example_images VALUES (?, ?, ?, ?)",
            (key, position, image.sha256, image.source),
        )
    connection.executemany(
        "INSERT INTO vectors (key, view, vector, checksum) VALUES (?, ?, ?, ?)",
        [(key, view, *blob_and_checksum(vector)) for view, vector in vectors.items()],
    )
    connection.execute(
        "INSERT INTO changes (op, key, id, namespace) VALUES ('put', ?, ?, ?)",
        (key, example.id, namespace),
    )
    return key


def annotate_row(
    connection: sqlite3.Connection,
    namespace: str,
    id: str,
    fields: Mapping[str, str | None],
    tags: Mapping[str, str],
) -> bool:
    """Set fields and add tags of a row. Return False if the id does not exist.

    The row gets a new key, because readers cache the content of a key.
    """
    columns = ("key", *COLUMNS, "namespace", "question_digest")
    row = connection.execute(
        f"SELECT {', '.join(columns)} FROM examples WHERE namespace = ? AND id = ?", (namespace, id)
    ).fetchone()
    if row is None:
        return False
    old, *values = row
    updated = dict(zip(columns[1:], values, strict=True)) | dict(fields)
    updated["tags"] = orjson.dumps({**orjson.loads(updated["tags"]), **tags}).decode()
    # Logged before the deletion: the log copies id and namespace from the row.
    log_change(connection, "delete", [old])
    # Deleted before the insertion: ids are unique in a namespace.
    connection.execute("DELETE FROM examples WHERE key = ?", [old])
    key = connection.execute(INSERT, tuple(updated.values())).lastrowid
    for table in ("vectors", "example_images", "uses"):
        connection.execute(f"UPDATE {table} SET key = ? WHERE key = ?", (key, old))
    log_change(connection, "put", [int(key or 0)])
    return True


def set_metadata(connection: sqlite3.Connection, key: int, metadata: RowMetadata) -> None:
    """Set age, pin and counters of an example that was just inserted."""
    connection.execute("UPDATE examples SET created = ? WHERE key = ?", (metadata.created, key))
    connection.execute(
        "INSERT INTO uses (key, count, last_used, saved_usd, pinned) VALUES (?, ?, ?, ?, ?)",
        (key, metadata.uses, metadata.last_used, metadata.saved_usd, metadata.pinned),
    )


def blob_and_checksum(vector: Vectors) -> tuple[bytes, int]:
    """Return the bytes of a vector and their checksum."""
    data = np.ascontiguousarray(vector, np.float32).tobytes()
    return data, zlib.crc32(data)


def log_change(connection: sqlite3.Connection, op: str, keys: Sequence[int]) -> None:
    """Log a change of existing rows with their ids and namespaces."""
    connection.execute(
        "INSERT INTO changes (op, key, id, namespace)"
        f" SELECT ?, key, id, namespace FROM examples WHERE key IN {IN_JSON} ORDER BY key",
        (op, json_array(keys)),
    )


def remove_rows(connection: sqlite3.Connection, keys: Sequence[int]) -> None:
    """Delete rows with their vectors, uses and unused images, and log it."""
    chosen = json_array(keys)
    seen = connection.execute(
        f"SELECT DISTINCT sha256 FROM example_images WHERE key IN {IN_JSON}", [chosen]
    )
    hashes = json_array([row[0] for row in seen])
    log_change(connection, "delete", keys)  # before the deletion, because it reads the rows
    for table in ("examples", "vectors", "example_images", "uses"):
        connection.execute(f"DELETE FROM {table} WHERE key IN {IN_JSON}", [chosen])
    # Other examples, also of other namespaces, may share an image.
    connection.execute(
        f"DELETE FROM images WHERE sha256 IN {IN_JSON}"
        " AND NOT EXISTS (SELECT 1 FROM example_images AS kept WHERE kept.sha256 = images.sha256)",
        [hashes],
    )


def has_pinned_answer(connection: sqlite3.Connection, namespace: str, example: Example) -> bool:
    """Return whether a pinned example answers the same question; nothing may replace it."""
    digests = json_array([question_digest(example)])
    return connection.execute(PINNED_IDS, (namespace, digests)).fetchone() is not None


def remove_answers(connection: sqlite3.Connection, namespace: str, example: Example) -> None:
    """Delete all answers to the question of this example."""
    found = connection.execute(
        "SELECT key FROM examples WHERE namespace = ? AND question_digest = ?",
        (namespace, question_digest(example)),
    ).fetchall()
    remove_rows(connection, [row[0] for row in found])
