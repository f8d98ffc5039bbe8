"""Migration to format 6: choices become part of a question, so rows with choices get new ids."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import orjson

from bottega.knowledge.records import CONTEXT, ID_LENGTH, digest, question_parts

PAGE = 1000
# Rows from before format 5 have no digest, because SQLite could not compute it.
STALE = (
    "SELECT key, id, question, answer, choices, tags FROM examples"
    " WHERE key > ? AND (choices != '[]' OR question_digest IS NULL) ORDER BY key LIMIT ?"
)
HASHES = "SELECT key, sha256 FROM example_images WHERE key BETWEEN ? AND ? ORDER BY key, place"
LOGGED = (
    "INSERT INTO changes (op, key, id, namespace)"
    " SELECT ?, key, id, namespace FROM examples WHERE key = ?"
)


def add_choices_to_identities(connection: sqlite3.Connection) -> None:
    """Give rows with choices the id and the question digest that they would get today.

    Keys stay, so vectors, uses and index files remain valid. The change log records the earlier id
    as deleted and the new one as added. A row whose earlier id does not match its content is
    damaged and keeps its id; `verify` reports it.
    """
    # The new column name makes writes of older versions that have the file open fail: they would
    # write ids without choices.
    connection.execute("ALTER TABLE examples RENAME COLUMN asked TO question_digest")
    connection.execute("DROP INDEX examples_by_asked")
    connection.execute(
        "CREATE INDEX examples_by_question ON examples (namespace, question_digest)"
        " WHERE question_digest IS NOT NULL"
    )
    key = 0
    with _any_text(connection):
        while rows := connection.execute(STALE, (key, PAGE)).fetchall():
            first, key = rows[0][0], rows[-1][0]
            hashes = defaultdict[int, list[str]](list)
            for shown, sha256 in connection.execute(HASHES, (first, key)):
                hashes[shown].append(sha256)
            for row in rows:
                _renew(connection, row, hashes[row[0]])


def _renew(connection: sqlite3.Connection, row: tuple[object, ...], hashes: list[str]) -> None:
    key, id, question, answer, choices, tags = row
    try:
        found = _identities(hashes, question, answer, choices, tags)
    except (TypeError, ValueError, AttributeError):  # damaged: `verify` reports it
        return
    earlier, current, question_digest = found
    if id != earlier:
        return
    if current != earlier:
        connection.execute(LOGGED, ("delete", key))
    connection.execute(
        "UPDATE examples SET id = ?, question_digest = ? WHERE key = ?",
        (current, question_digest, key),
    )
    if current != earlier:
        connection.execute(LOGGED, ("put", key))


def _identities(
    hashes: list[str], question: object, answer: object, choices: object, tags: object
) -> tuple[str, str, str]:
    """Return the id of format 5, the current id, and the question's digest."""
    if not (isinstance(question, str) and isinstance(choices, str) and isinstance(tags, str)):
        raise TypeError("a column holds no text")
    context = orjson.loads(tags).get(CONTEXT)
    before = question_parts(hashes, question, context, ())
    now = question_parts(hashes, question, context, orjson.loads(choices))
    return digest(*before, answer)[:ID_LENGTH], digest(*now, answer)[:ID_LENGTH], digest(*now)


@contextmanager
def _any_text(connection: sqlite3.Connection) -> Iterator[None]:
    """Also read texts that are not UTF-8: a damaged one must not prevent opening the file."""
    before = connection.text_factory
    connection.text_factory = lambda data: data.decode(errors="surrogateescape")
    try:
        yield
    finally:
        connection.text_factory = before
