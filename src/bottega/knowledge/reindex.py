"""Embedding of stored examples for a new view or with another embedder."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence

from bottega.errors import EmbeddingError, SettingError, StoreError
from bottega.knowledge.database import IN_JSON, blob_and_checksum, json_array
from bottega.knowledge.records import StoredView, View, check_dimensions, check_name
from bottega.knowledge.rows import SqliteRows
from bottega.types import Example

MISSING_VECTORS = (
    "FROM examples WHERE NOT EXISTS"
    " (SELECT 1 FROM vectors WHERE vectors.key = examples.key AND view = ?)"
)


def reindex(
    rows: SqliteRows,
    name: str,
    view: View,
    *,
    batch_size: int,
    progress: Callable[[int], None] | None,
) -> int:
    """Embed all examples of every namespace that lack the new vector and return their number.

    Searches use the old vectors until all new ones are stored; then one commit replaces them. An
    interrupted run resumes. If two runs reindex one view, the later one continues and the other
    raises `StoreError`.
    """
    check_name(name)
    if batch_size < 1:
        raise SettingError(f"batch_size must be at least 1, got {batch_size}", hint="use 64")
    number, complete = _begin(rows, name, view)
    if progress is not None:
        counted = "SELECT count(*) FROM examples JOIN vectors USING (key) WHERE view = ?"
        progress(int(rows.read(counted, number)[0][0]))
    done = 0
    # Again until none is missing: other processes may add examples meanwhile.
    while not _complete_if_done(rows, name, number):
        missing = rows.read(f"SELECT key {MISSING_VECTORS} ORDER BY key", number)
        for start in range(0, len(missing), batch_size):
            keys = [row[0] for row in missing[start : start + batch_size]]
            # Indexes of a complete view lack these vectors, so the log must name them.
            _embed(rows, keys, number, view, logged=complete)
            done += len(keys)
            if progress is not None:
                progress(len(keys))
    return done


def embed_again(rows: SqliteRows, keys: Sequence[int], number: int, view: View) -> None:
    """Replace the vectors of these rows and log the changes for the indexes."""
    _embed(rows, keys, number, view, logged=True)


def _begin(rows: SqliteRows, name: str, view: View) -> tuple[int, bool]:
    """Return the number of the view to fill, and whether searches already use it."""
    fingerprint = view.embed.fingerprint
    with rows.transaction() as connection:
        _drop(connection, name, "NOT complete AND fingerprint != ?", fingerprint)
        connection.execute(
            "INSERT OR IGNORE INTO views (name, fingerprint, dimension, complete)"
            " VALUES (?, ?, ?, 0)",
            (name, fingerprint, view.embed.dimension),
        )
        number, complete, *stored = connection.execute(
            "SELECT number, complete, number, name, fingerprint, dimension FROM views"
            " WHERE name = ? AND fingerprint = ?",
            (name, fingerprint),
        ).fetchone()
        check_dimensions({name: StoredView(*stored)}, {name: view.embed.dimension})
    return int(number), bool(complete)


def _embed(
    rows: SqliteRows, keys: Sequence[int], number: int, view: View, *, logged: bool = False
) -> None:
    examples = rows.by_keys(keys)
    try:
        vectors = view.vectors(list(examples.values()))
    except EmbeddingError as error:
        raise _name_example(error, examples, view) from error
    with rows.transaction() as connection:
        _check_view(connection, number)
        # Only for rows that still exist.
        connection.executemany(
            "INSERT OR REPLACE INTO vectors (key, view, vector, checksum)"
            " SELECT key, ?, ?, ? FROM examples WHERE key = ?",
            [
                (number, *blob_and_checksum(v), key)
                for key, v in zip(examples, vectors, strict=True)
            ],
        )
        if logged:
            connection.execute(
                "INSERT INTO changes (op, key, id, namespace) SELECT 'put', key, id, namespace"
                f" FROM examples WHERE key IN {IN_JSON}",
                [json_array(list(examples))],
            )


def _name_example(
    error: EmbeddingError, examples: Mapping[int, Example], view: View
) -> EmbeddingError:
    for example in examples.values():
        try:
            view.vectors([example])
        except EmbeddingError as own:
            hint = own.hint or f"bottega rm FILE {example.id} removes it; the rest is kept"
            return EmbeddingError(f"example {example.id}: {own}", hint=hint)
    return error


def _complete_if_done(rows: SqliteRows, name: str, number: int) -> bool:
    """Replace the old view if no example lacks the new vector; return whether that is the case."""
    with rows.transaction() as connection:
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


def _check_view(connection: sqlite3.Connection, number: int) -> bool:
    """Return whether the view is complete. Raises `StoreError` if another run has dropped it."""
    found = connection.execute("SELECT complete FROM views WHERE number = ?", [number]).fetchone()
    if found is None:
        raise StoreError(
            "another process started to reindex this view with another embedder",
            hint="let one run finish, then reindex again if needed",
        )
    return bool(found[0])


def _drop(connection: sqlite3.Connection, name: str, which: str, value: str | int) -> None:
    chosen = f"SELECT number FROM views WHERE name = ? AND {which}"
    connection.execute(f"DELETE FROM vectors WHERE view IN ({chosen})", (name, value))
    connection.execute(f"DELETE FROM views WHERE number IN ({chosen})", (name, value))
