"""Vectors of views in a SQLite file: stored for another embedder, then used by one commit."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from bottega.errors import StoreError
from bottega.knowledge.records import StoredView, check_dimensions
from bottega.knowledge.sqlite.database import IN_JSON, Database, blob_and_checksum, json_array
from bottega.protocols import Vectors

MISSING_VECTORS = (
    "FROM examples WHERE NOT EXISTS"
    " (SELECT 1 FROM vectors WHERE vectors.key = examples.key AND view = ?)"
)


class ViewRows(Database):
    """Views of a file, in all namespaces."""

    def begin_view(self, name: str, fingerprint: str, dimension: int) -> tuple[int, bool]:
        """Return the number of the view to fill, and whether searches already use it."""
        with self.transaction() as connection:
            _drop(connection, name, "NOT complete AND fingerprint != ?", fingerprint)
            connection.execute(
                "INSERT OR IGNORE INTO views (name, fingerprint, dimension, complete)"
                " VALUES (?, ?, ?, 0)",
                (name, fingerprint, dimension),
            )
            number, complete, *stored = connection.execute(
                "SELECT number, complete, number, name, fingerprint, dimension FROM views"
                " WHERE name = ? AND fingerprint = ?",
                (name, fingerprint),
            ).fetchone()
            check_dimensions({name: StoredView(*stored)}, {name: dimension})
        return int(number), bool(complete)

    def count_vectors(self, number: int) -> int:
        counted = "SELECT count(*) FROM examples JOIN vectors USING (key) WHERE view = ?"
        return int(self.read(counted, number)[0][0])

    def missing_keys(self, number: int) -> list[int]:
        """Return the keys of the examples that lack a vector of this view."""
        return [row[0] for row in self.read(f"SELECT key {MISSING_VECTORS} ORDER BY key", number)]

    def set_vectors(self, number: int, vectors: Mapping[int, Vectors], *, logged: bool) -> None:
        """Store vectors by key. Raises `StoreError` if another run has dropped the view."""
        with self.transaction() as connection:
            _check_view(connection, number)
            # Only for rows that still exist: embedding ran outside of the transaction.
            connection.executemany(
                "INSERT OR REPLACE INTO vectors (key, view, vector, checksum)"
                " SELECT key, ?, ?, ? FROM examples WHERE key = ?",
                [(number, *blob_and_checksum(v), key) for key, v in vectors.items()],
            )
            if logged:
                connection.execute(
                    "INSERT INTO changes (op, key, id, namespace) SELECT 'put', key, id, namespace"
                    f" FROM examples WHERE key IN {IN_JSON}",
                    [json_array(list(vectors))],
                )

    def complete_view(self, name: str, number: int) -> bool:
        """Replace the old view if no example lacks the new vector; return whether that is the
        case."""
        with self.transaction() as connection:
            complete = _check_view(connection, number)
            if connection.execute(f"SELECT 1 {MISSING_VECTORS} LIMIT 1", [number]).fetchone():
                return False
            if complete:
                return True
            _drop(connection, name, "number != ?", number)
            connection.execute("UPDATE views SET complete = 1 WHERE number = ?", [number])
            # Notifies other handles that their vectors were replaced.
            connection.execute("INSERT INTO changes (op, key) VALUES ('view', 0)")
        return True

    def drop_view(self, name: str) -> None:
        """Delete the view and its vectors."""
        with self.transaction() as connection:
            _drop(connection, name, "number != ?", 0)  # numbers begin at 1
            connection.execute("INSERT INTO changes (op, key) VALUES ('view', 0)")

    def checked_vectors(self, keys: Sequence[int], view: StoredView) -> dict[int, Vectors | None]:
        """Return the vector of each key, None if missing or damaged. Keys that another process has
        deleted since they were read are absent."""
        found = self.read(
            "SELECT examples.key, CAST(vector AS BLOB), checksum FROM json_each(?1) AS chosen"
            " CROSS JOIN examples ON examples.key = chosen.value"
            " LEFT JOIN vectors ON vectors.key = examples.key AND view = ?2"
            " WHERE EXISTS (SELECT 1 FROM views WHERE number = ?2)",
            json_array(keys),
            view.number,
        )
        return {key: _valid_vector(blob, checksum, view.dimension) for key, blob, checksum in found}


def _check_view(connection: sqlite3.Connection, number: int) -> bool:
    """Return whether the view is complete. Raises `StoreError` if another run has dropped it."""
    found = connection.execute("SELECT complete FROM views WHERE number = ?", [number]).fetchone()
    if found is None:
        raise dropped_view_error()
    return bool(found[0])


def dropped_view_error() -> StoreError:
    return StoreError(
        "another process started to reindex this view with another embedder",
        hint="let one run finish, then reindex again if needed",
    )


def _drop(connection: sqlite3.Connection, name: str, which: str, value: str | int) -> None:
    chosen = f"SELECT number FROM views WHERE name = ? AND {which}"
    connection.execute(f"DELETE FROM vectors WHERE view IN ({chosen})", (name, value))
    connection.execute(f"DELETE FROM views WHERE number IN ({chosen})", (name, value))


def _valid_vector(blob: bytes | None, checksum: int | None, dimension: int) -> Vectors | None:
    """Return the vector, or None if it is missing or damaged."""
    if blob is None or len(blob) != 4 * dimension or zlib.crc32(blob) != checksum:
        return None
    vector = np.frombuffer(blob, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        length = np.vdot(vector, vector)  # not finite for NaN, infinity or overflow
    return vector if np.isfinite(length) else None
