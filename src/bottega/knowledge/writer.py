"""Write statements of a knowledge base. Each runs inside a transaction of the caller."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import orjson

from bottega._util.identity import question_digest
from bottega.errors import EmbedderMismatchError, SettingError, StoreError, StoreFullError
from bottega.knowledge.database import IN_JSON, json_array
from bottega.knowledge.ports import Capacity, EmbeddedBatch, StoredView, UsageRecord
from bottega.knowledge.records import COLUMNS, RowMetadata, to_row
from bottega.protocols import Vectors
from bottega.types import Example

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
        _check_empty(connection)
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
        raise SettingError(
            f"the file has more views than given: {', '.join(sorted(missing))}",
            hint="open it with all views to add: KnowledgeBase.open(path, {name: View(...)})",
        )
    return [stored[name].number for name in views]


def _check_empty(connection: sqlite3.Connection) -> None:
    if connection.execute("SELECT EXISTS (SELECT 1 FROM examples)").fetchone()[0]:
        raise StoreError(
            "the stored examples have no vectors",
            hint="run bottega verify --repair, or verify(repair=True)",
        )


def check_views(stored: Mapping[str, StoredView], fingerprints: Mapping[str, str]) -> None:
    """Raise unless every view is stored with this fingerprint."""
    for name, fingerprint in fingerprints.items():
        if name not in stored:
            raise StoreError(
                f"view {name!r} does not exist, only {', '.join(stored)}",
                hint=f"run bottega reindex --by {name}, or knowledge.reindex({name!r}, View(...))",
            )
        if stored[name].fingerprint != fingerprint:
            raise EmbedderMismatchError(stored[name].fingerprint, fingerprint)


def check_dimensions(stored: Mapping[str, StoredView], widths: Mapping[str, int]) -> None:
    """Raise `StoreError` unless the dimensions match those of the stored views."""
    for name, width in widths.items():
        if stored[name].dimension != width:
            raise StoreError(
                f"the stored vectors {name!r} have {stored[name].dimension} numbers, but"
                f" {stored[name].fingerprint!r} now returns {width}",
                hint="change the fingerprint of an embedder when its vectors change",
            )


def insert(
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


def annotate(
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
        f"SELECT {', '.join(columns)} FROM examples WHERE namespace = ? AND id = ?",
        (namespace, id),
    ).fetchone()
    if row is None:
        return False
    old, *values = row
    updated = dict(zip(columns[1:], values, strict=True)) | dict(fields)
    updated["tags"] = orjson.dumps({**orjson.loads(updated["tags"]), **tags}).decode()
    log_change(connection, "delete", [old])
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


def remove(connection: sqlite3.Connection, keys: Sequence[int]) -> None:
    """Delete rows with their vectors, uses and unused images, and log it."""
    chosen = json_array(keys)
    seen = connection.execute(
        f"SELECT DISTINCT sha256 FROM example_images WHERE key IN {IN_JSON}", [chosen]
    )
    hashes = json_array([row[0] for row in seen])
    log_change(connection, "delete", keys)
    for table in ("examples", "vectors", "example_images", "uses"):
        connection.execute(f"DELETE FROM {table} WHERE key IN {IN_JSON}", [chosen])
    connection.execute(
        f"DELETE FROM images WHERE sha256 IN {IN_JSON}"
        " AND NOT EXISTS (SELECT 1 FROM example_images AS kept WHERE kept.sha256 = images.sha256)",
        [hashes],
    )


def has_pinned_answer(connection: sqlite3.Connection, namespace: str, example: Example) -> bool:
    """Return whether a pinned example answers the same question; nothing may replace it."""
    digests = json_array([question_digest(example)])
    return connection.execute(PINNED_IDS, (namespace, digests)).fetchone() is not None


def supersede(connection: sqlite3.Connection, namespace: str, key: int) -> None:
    """Delete the older answers to the question of this row."""
    older = connection.execute(
        "SELECT key FROM examples WHERE namespace = ?1 AND key != ?2"
        " AND question_digest = (SELECT question_digest FROM examples WHERE key = ?2)",
        (namespace, key),
    ).fetchall()
    if older:
        remove(connection, [row[0] for row in older])


def evict_excess(connection: sqlite3.Connection, namespace: str, capacity: Capacity) -> None:
    """Delete the rows above the capacity. It runs before the commit, so no reader sees more."""
    total, pinned = connection.execute(
        "SELECT count(*), coalesce(sum(pinned), 0) FROM examples LEFT JOIN uses USING (key)"
        " WHERE namespace = ?",
        [namespace],
    ).fetchone()
    excess = total - capacity.rows
    if excess <= 0:
        return
    if pinned >= capacity.rows:
        raise StoreFullError(
            f"the capacity of {capacity.rows} is full of pinned examples, got {pinned}",
            hint="unpin examples (bottega unpin), or open with a larger capacity",
        )
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
    remove(connection, [row[0] for row in found])


def add_uses(
    connection: sqlite3.Connection, namespace: str, uses: Mapping[str, UsageRecord]
) -> None:
    """Add to the counters; deleted examples are ignored."""
    connection.executemany(
        "INSERT INTO uses (key, count, last_used, saved_usd)"
        " SELECT key, ?, ?, ? FROM examples WHERE namespace = ? AND id = ?"
        " ON CONFLICT (key) DO UPDATE SET count = count + excluded.count,"
        " last_used = max(coalesce(last_used, 0), excluded.last_used),"
        " saved_usd = saved_usd + excluded.saved_usd",
        [(use.count, use.last_used, use.saved_usd, namespace, id) for id, use in uses.items()],
    )
