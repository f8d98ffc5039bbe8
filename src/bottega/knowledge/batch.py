"""Embedding of examples: batches before they are stored, and stored ones for another view."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from bottega._util.executor import computed_ahead
from bottega._util.identity import CONTEXT, identity, question_digest
from bottega.errors import EmbeddingError, ImageError, LoadError, OnError, SettingError, StoreError
from bottega.image import CHECKED_SIDE
from bottega.knowledge.database import IN_JSON, blob_and_checksum, json_array
from bottega.knowledge.eviction import Capacity
from bottega.knowledge.records import (
    EmbeddedBatch,
    StoredView,
    View,
    check_dimensions,
    check_name,
    is_text,
    with_id,
)
from bottega.knowledge.rows import SqliteRows
from bottega.protocols import Vectors, embed_concurrency
from bottega.types import Example

TEXT_HINT = (
    "use texts that UTF-8 can encode, without NULs, for question, choices, answer, labels,"
    " rationale, tags and sources"
)


class EmbeddedExamples(NamedTuple):
    """Batch of `size` examples: those to store with their vectors by view, and the number of failed
    ones."""

    size: int
    valid: list[Example]
    vectors: dict[str, EmbeddedBatch]
    failed: int


def embedded_batches(
    batches: Iterable[Sequence[Example]],
    rows: SqliteRows,
    views: Mapping[str, View],
    on_error: OnError,
) -> Iterator[EmbeddedExamples]:
    """Embed the examples of each batch that are not stored.

    An embedder with workers gets the next batches while the caller stores a batch. One of two equal
    examples may then be embedded in vain.
    """
    ahead = max((embed_concurrency(view.embed) for view in views.values()), default=1)
    prepared = (_prepared(batch, rows, on_error) for batch in batches)
    for batch, vectors in computed_ahead(
        prepared, lambda batch: _vectors(batch.decoded, views), ahead
    ):
        valid, embedded = _embed_all(batch.decoded, vectors, views, on_error)
        failed = batch.failed + len(batch.decoded) - len(valid)
        yield EmbeddedExamples(batch.size, valid, embedded, failed)


class _Prepared(NamedTuple):
    size: int
    decoded: list[Example]
    failed: int


def _prepared(examples: Sequence[Example], rows: SqliteRows, on_error: OnError) -> _Prepared:
    """Return the examples to embed: different ones that are not stored and can be decoded."""
    storable = [example for example in examples if _is_storable(example, on_error)]
    named: dict[str, Example] = {}
    for example in storable:
        named.setdefault(identity(example), example)
    stored = rows.keys(named)
    unstored = [with_id(example, id) for id, example in named.items() if id not in stored]
    decoded = [example for example in unstored if _decodes(example, on_error)]
    failed = len(examples) - len(storable) + len(unstored) - len(decoded)
    return _Prepared(len(examples), decoded, failed)


def replace_batch(
    examples: Sequence[Example],
    rows: SqliteRows,
    views: Mapping[str, View],
    on_error: OnError,
    capacity: Capacity | None = None,
) -> list[str | None]:
    """Store newer answers and return, for each, the id that now answers its question.

    That is the id of a pinned answer if one exists, and None for an example that failed.
    """
    digests = [
        question_digest(example) if _is_storable(example, on_error) else None
        for example in examples
    ]
    pairs = zip(digests, examples, strict=True)
    newest = {digest: example for digest, example in pairs if digest is not None}
    (batch,) = embedded_batches([list(newest.values())], rows, views, on_error)
    if batch.valid:
        rows.put(batch.valid, batch.vectors, capacity, supersede=True)
    ids = {digest: identity(example) for digest, example in newest.items()}
    stored = rows.keys(ids.values())
    answered = {digest: id for digest, id in ids.items() if id in stored}
    pinned = rows.pinned_ids(ids.keys() - answered.keys())
    return [None if digest is None else (pinned | answered).get(digest) for digest in digests]


def check_annotation(rationale: str | None, tags: Mapping[str, str]) -> None:
    """Raise `LoadError` for values that cannot be stored, and `SettingError` for a tag that is part
    of the example's identity."""
    if not all(map(is_text, (*tags, *tags.values(), *([] if rationale is None else [rationale])))):
        raise LoadError("the annotation cannot be stored", hint=TEXT_HINT)
    if CONTEXT in tags:
        raise SettingError(
            f"the tag {CONTEXT!r} is part of the example's id and cannot be changed",
            hint="delete the example and add it with the new context",
        )


def _is_storable(example: Example, on_error: OnError) -> bool:
    try:
        storable = all(map(is_text, _texts(example)))
    except (TypeError, AttributeError):  # a field has another type
        storable = False
    if not storable:
        name = example.source or example.query.text
        on_error(LoadError(f"{name!a} cannot be stored", hint=TEXT_HINT))
    return storable


def _texts(example: Example) -> Iterator[str]:
    query, tags = example.query, example.tags
    yield from (query.text, *query.choices, example.answer, *(example.labels or ()))
    yield from (*tags, *tags.values())
    optional = [example.rationale, example.source, *(image.source for image in query.images)]
    yield from (text for text in optional if text is not None)


def _decodes(example: Example, on_error: OnError) -> bool:
    # Needed for text embedders too: the image is shown later, in a demonstration.
    try:
        for image in example.query.images:
            image.decode(at_least=CHECKED_SIDE)
    except ImageError as error:
        on_error(error)
        return False
    return True


def _embed_all(
    examples: list[Example],
    vectors: Callable[[], dict[str, EmbeddedBatch]],
    views: Mapping[str, View],
    on_error: OnError,
) -> tuple[list[Example], dict[str, EmbeddedBatch]]:
    """Return the vectors of the batch; if that fails, embed one by one to leave out only the
    failing ones."""
    try:
        return examples, vectors()
    except EmbeddingError:
        valid = []
        for example in examples:
            try:
                _vectors([example], views)
                valid.append(example)
            except EmbeddingError as error:
                name = example.source or repr(example.query.text)
                on_error(EmbeddingError(f"{name}: {error}", hint=error.hint))
        return valid, _vectors(valid, views)


def _vectors(examples: Sequence[Example], views: Mapping[str, View]) -> dict[str, EmbeddedBatch]:
    return {
        name: EmbeddedBatch(view.embed.fingerprint, view.vectors(examples))
        for name, view in views.items()
    }


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
        keys = [row[0] for row in missing]
        batches = (keys[start : start + batch_size] for start in range(0, len(keys), batch_size))
        stored = (rows.by_keys(batch) for batch in batches)
        ahead = embed_concurrency(view.embed)
        for examples, vectors in computed_ahead(stored, partial(_view_vectors, view), ahead):
            # Indexes of a complete view lack these vectors, so the log must name them.
            _store_vectors(rows, list(examples), number, vectors(), logged=complete)
            done += len(examples)
            if progress is not None:
                progress(len(examples))
    return done


def embed_again(rows: SqliteRows, keys: Sequence[int], number: int, view: View) -> None:
    """Replace the vectors of these rows and log the changes for the indexes."""
    examples = rows.by_keys(keys)
    _store_vectors(rows, list(examples), number, _view_vectors(view, examples), logged=True)


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


def _view_vectors(view: View, examples: Mapping[int, Example]) -> Vectors:
    try:
        return view.vectors(list(examples.values()))
    except EmbeddingError as error:
        # Embed one by one to name the example that fails.
        for example in examples.values():
            try:
                view.vectors([example])
            except EmbeddingError as single_error:
                hint = (
                    single_error.hint
                    or f"bottega rm FILE {example.id} removes it; the rest is kept"
                )
                raise EmbeddingError(f"example {example.id}: {single_error}", hint=hint) from error
        raise


def _store_vectors(
    rows: SqliteRows, keys: Sequence[int], number: int, vectors: Vectors, *, logged: bool
) -> None:
    with rows.transaction() as connection:
        _check_view(connection, number)
        # Only for rows that still exist: embedding ran outside of the transaction.
        connection.executemany(
            "INSERT OR REPLACE INTO vectors (key, view, vector, checksum)"
            " SELECT key, ?, ?, ? FROM examples WHERE key = ?",
            [(number, *blob_and_checksum(v), key) for key, v in zip(keys, vectors, strict=True)],
        )
        if logged:
            connection.execute(
                "INSERT INTO changes (op, key, id, namespace) SELECT 'put', key, id, namespace"
                f" FROM examples WHERE key IN {IN_JSON}",
                [json_array(keys)],
            )


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
