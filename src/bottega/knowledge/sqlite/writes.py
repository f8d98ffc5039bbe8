"""Statements that change the rows of a file, within a transaction."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import orjson

from bottega._util.identity import question_digest
from bottega.errors import StoreError
from bottega.knowledge.eviction import Capacity
from bottega.knowledge.records import (
    COLUMNS,
    EmbeddedBatch,
    RowMetadata,
    StoredView,
    check_dimensions,
    check_views,
    dropped_view_error,
    more_views_error,
    to_json,
    to_row,
)
from bottega.knowledge.stores import CHECK_EVERY, KEPT_CHANGES, KEPT_SHARE
from bottega.protocols import Vectors
from bottega.types import Example

# Last change examined by pruning. `meta` also has the last change lost, by namespace.
HORIZON = "SELECT coalesce((SELECT CAST(value AS INTEGER) FROM meta WHERE name = 'pruned'), 0)"
DROPPABLE = (
    "FROM changes WHERE seq <= ?"
    " AND NOT EXISTS (SELECT 1 FROM examples WHERE examples.key = changes.key)"
    " AND seq NOT IN (SELECT max(seq) FROM changes GROUP BY namespace)"
)
# Name in `meta`, with a namespace after it, of the last change that its log has lost.
LOST_PREFIX = "pruned of "
# SQL for a list of any length as one JSON parameter.
IN_JSON = "(SELECT value FROM json_each(?))"
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
MISSING_VECTORS = (
    "FROM examples WHERE NOT EXISTS"
    " (SELECT 1 FROM vectors WHERE vectors.key = examples.key AND view = ?)"
)


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
        (op, to_json(keys)),
    )


def remove_rows(connection: sqlite3.Connection, keys: Sequence[int]) -> None:
    """Delete rows with their vectors, uses and unused images, and log it."""
    chosen = to_json(keys)
    log_change(connection, "delete", keys)  # before the deletion, because it reads the rows
    # Other examples, also of other namespaces, may share an image.
    connection.execute(
        "DELETE FROM images"
        f" WHERE sha256 IN (SELECT sha256 FROM example_images WHERE key IN {IN_JSON})"
        " AND NOT EXISTS (SELECT 1 FROM example_images AS kept"
        f" WHERE kept.sha256 = images.sha256 AND kept.key NOT IN {IN_JSON})",
        (chosen, chosen),
    )
    for table in ("examples", "vectors", "example_images", "uses"):
        connection.execute(f"DELETE FROM {table} WHERE key IN {IN_JSON}", [chosen])


def has_pinned_answer(connection: sqlite3.Connection, namespace: str, example: Example) -> bool:
    """Return whether a pinned example answers the same question; nothing may replace it."""
    digests = to_json([question_digest(example)])
    return connection.execute(PINNED_IDS, (namespace, digests)).fetchone() is not None


def remove_answers(connection: sqlite3.Connection, namespace: str, example: Example) -> None:
    """Delete all answers to the question of this example."""
    found = connection.execute(
        "SELECT key FROM examples WHERE namespace = ? AND question_digest = ?",
        (namespace, question_digest(example)),
    ).fetchall()
    remove_rows(connection, [row[0] for row in found])


def evict_excess(connection: sqlite3.Connection, namespace: str, capacity: Capacity) -> None:
    """Delete the rows above the capacity. It runs before the commit, so no reader sees more."""
    total, pinned = connection.execute(
        "SELECT count(*), coalesce(sum(pinned), 0) FROM examples LEFT JOIN uses USING (key)"
        " WHERE namespace = ?",
        [namespace],
    ).fetchone()
    excess = capacity.excess(total, pinned)
    if not excess:
        return
    newest = (
        "(SELECT key FROM examples WHERE namespace = ?1"
        f" ORDER BY key DESC LIMIT 1 OFFSET {capacity.evict.protect})"
    )
    found = connection.execute(
        "SELECT examples.key FROM examples LEFT JOIN uses USING (key)"
        " WHERE namespace = ?1 AND coalesce(pinned, 0) = 0"
        f" ORDER BY examples.key > {newest}, {capacity.evict.order()}, examples.key LIMIT ?2",
        (namespace, excess),
    )
    remove_rows(connection, [row[0] for row in found])


def prune(connection: sqlite3.Connection, added: int) -> None:
    """Drop old log entries, within the transaction that added that many rows.

    Pruning reads the whole log, so it runs only after the log has grown by a fifth of the rows.
    """
    last, pruned = connection.execute(f"SELECT max(seq), ({HORIZON}) FROM changes").fetchone()
    # Each new row may have evicted another one.
    if last % CHECK_EVERY >= 2 * added or last - pruned <= 2 * KEPT_CHANGES:
        return
    rows = connection.execute("SELECT count(*) FROM examples").fetchone()[0]
    kept = max(KEPT_CHANGES, rows // KEPT_SHARE)
    if last - pruned > 2 * kept:
        _drop_changes(connection, last - kept)


def _drop_changes(connection: sqlite3.Connection, upto: int) -> None:
    connection.execute(
        f"INSERT OR REPLACE INTO meta SELECT '{LOST_PREFIX}' || namespace, max(seq) {DROPPABLE}"
        " GROUP BY namespace",
        [upto],
    )
    connection.execute(f"DELETE {DROPPABLE}", [upto])
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('pruned', ?)", [upto])


def check_view(connection: sqlite3.Connection, number: int) -> bool:
    """Return whether the view is complete. Raises `StoreError` if another run has dropped it."""
    found = connection.execute("SELECT complete FROM views WHERE number = ?", [number]).fetchone()
    if found is None:
        raise dropped_view_error()
    return bool(found[0])


def drop_views(connection: sqlite3.Connection, name: str, which: str, value: str | int) -> None:
    chosen = f"SELECT number FROM views WHERE name = ? AND {which}"
    connection.execute(f"DELETE FROM vectors WHERE view IN ({chosen})", (name, value))
    connection.execute(f"DELETE FROM views WHERE number IN ({chosen})", (name, value))


def begin_view(
    connection: sqlite3.Connection, name: str, fingerprint: str, dimension: int
) -> tuple[int, bool]:
    """Return the number of the view to fill, and whether it is complete."""
    drop_views(connection, name, "NOT complete AND fingerprint != ?", fingerprint)
    connection.execute(
        "INSERT OR IGNORE INTO views (name, fingerprint, dimension, complete) VALUES (?, ?, ?, 0)",
        (name, fingerprint, dimension),
    )
    number, complete, *stored = connection.execute(
        "SELECT number, complete, number, name, fingerprint, dimension FROM views"
        " WHERE name = ? AND fingerprint = ?",
        (name, fingerprint),
    ).fetchone()
    check_dimensions({name: StoredView(*stored)}, {name: dimension})
    return int(number), bool(complete)


def valid_vector(blob: bytes | None, checksum: int | None, dimension: int) -> Vectors | None:
    """Return the vector, or None if it is missing or damaged."""
    if blob is None or len(blob) != 4 * dimension or zlib.crc32(blob) != checksum:
        return None
    vector = np.frombuffer(blob, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        length = np.vdot(vector, vector)  # not finite for NaN, infinity or overflow
    return vector if np.isfinite(length) else None
