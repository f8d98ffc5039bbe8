"""Tables of a knowledge base file, and the migrations from older formats."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import orjson

from bottega._util.identity import CONTEXT, ID_LENGTH, json_digest, question_parts
from bottega._util.sqlite import FileKind

PAGE = 1000
# Rows from before format 5 have no digest, which SQLite cannot compute.
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
    """Give rows with choices the id and the question digest of the current format.

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
    earlier, current = (json_digest([*parts, answer])[:ID_LENGTH] for parts in (before, now))
    return earlier, current, json_digest(now)


@contextmanager
def _any_text(connection: sqlite3.Connection) -> Iterator[None]:
    """Decode texts that are not UTF-8 too: one damaged text must not prevent opening the file."""
    before = connection.text_factory
    connection.text_factory = lambda data: data.decode(errors="surrogateescape")
    try:
        yield
    finally:
        connection.text_factory = before


KNOWLEDGE_BASE = FileKind(
    "knowledge base",
    application_id=0x42747467,  # "Bttg"
    migrations=(
        """
        CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
        CREATE TABLE notes (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
        CREATE TABLE examples (
            key INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            question TEXT NOT NULL,
            answer TEXT NOT NULL,
            choices TEXT NOT NULL,
            labels TEXT,
            rationale TEXT,
            tags TEXT NOT NULL,
            source TEXT,
            created REAL NOT NULL
        );
        CREATE TABLE vectors (key INTEGER PRIMARY KEY, vector BLOB NOT NULL);
        CREATE TABLE images (
            sha256 TEXT PRIMARY KEY,
            media_type TEXT NOT NULL,
            width INTEGER NOT NULL,
            height INTEGER NOT NULL,
            data BLOB NOT NULL
        );
        CREATE TABLE example_images (
            key INTEGER NOT NULL,
            place INTEGER NOT NULL,
            sha256 TEXT NOT NULL,
            source TEXT,
            PRIMARY KEY (key, place)
        ) WITHOUT ROWID;
        CREATE INDEX example_images_by_sha256 ON example_images (sha256);
        CREATE TABLE changes (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            op TEXT NOT NULL,
            key INTEGER NOT NULL
        );
        """,
        # Namespaces, several named vectors per example, and counters for eviction. SQLite cannot
        # drop a UNIQUE, so `examples` is copied, with its counter, because keys are never reused.
        """
        CREATE TABLE spaced (
            key INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL,
            question TEXT NOT NULL,
            answer TEXT NOT NULL,
            choices TEXT NOT NULL,
            labels TEXT,
            rationale TEXT,
            tags TEXT NOT NULL,
            source TEXT,
            created REAL NOT NULL,
            namespace TEXT NOT NULL,
            UNIQUE (namespace, id)
        );
        INSERT INTO spaced SELECT *, '' FROM examples ORDER BY key;
        DELETE FROM sqlite_sequence WHERE name = 'spaced';
        INSERT INTO sqlite_sequence
            SELECT 'spaced', seq FROM sqlite_sequence WHERE name = 'examples';
        DROP TABLE examples;
        ALTER TABLE spaced RENAME TO examples;
        CREATE INDEX examples_by_namespace ON examples (namespace);
        CREATE TABLE views (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            name TEXT NOT NULL,
            fingerprint TEXT NOT NULL,
            dimension INTEGER NOT NULL,
            complete INTEGER NOT NULL,
            UNIQUE (name, fingerprint)
        );
        INSERT INTO views
            SELECT 1, 'default', kept.value, CAST(width.value AS INTEGER), 1
            FROM meta AS kept, meta AS width
            WHERE kept.name = 'embedder' AND width.name = 'dimension';
        DELETE FROM meta WHERE name IN ('embedder', 'dimension');
        CREATE TABLE viewed (
            key INTEGER NOT NULL,
            view INTEGER NOT NULL,
            vector BLOB NOT NULL,
            PRIMARY KEY (key, view)
        );
        INSERT INTO viewed SELECT key, 1, vector FROM vectors ORDER BY key;
        DROP TABLE vectors;
        ALTER TABLE viewed RENAME TO vectors;
        ALTER TABLE changes ADD COLUMN id TEXT;
        ALTER TABLE changes ADD COLUMN namespace TEXT NOT NULL DEFAULT '';
        UPDATE changes
            SET id = (SELECT id FROM examples WHERE examples.key = changes.key);
        CREATE TABLE uses (
            key INTEGER PRIMARY KEY,
            count INTEGER NOT NULL DEFAULT 0,
            last REAL,
            saved_usd REAL NOT NULL DEFAULT 0,
            pinned INTEGER NOT NULL DEFAULT 0
        );
        """,
        # Versions before this one would not notice that the log has lost entries.
        """
        INSERT INTO meta VALUES ('pruned', '0');
        """,
        # A restored copy assigns the same numbers again; a mark identifies each change.
        # ALTER TABLE cannot add a column with this default, so `changes` is copied.
        """
        CREATE TABLE marked (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            op TEXT NOT NULL,
            key INTEGER NOT NULL,
            id TEXT,
            namespace TEXT NOT NULL DEFAULT '',
            mark INTEGER NOT NULL DEFAULT (random())
        );
        INSERT INTO marked (seq, op, key, id, namespace)
            SELECT seq, op, key, id, namespace FROM changes ORDER BY seq;
        DELETE FROM sqlite_sequence WHERE name = 'marked';
        INSERT INTO sqlite_sequence
            SELECT 'marked', seq FROM sqlite_sequence WHERE name = 'changes';
        DROP TABLE changes;
        ALTER TABLE marked RENAME TO changes;
        """,
        # Digests let a newer answer find the older ones to its question. Earlier rows have
        # no digest, which SQLite cannot compute.
        """
        ALTER TABLE examples ADD COLUMN asked TEXT;
        CREATE INDEX examples_by_asked ON examples (namespace, asked) WHERE asked IS NOT NULL;
        """,
        # Answer choices become part of a question, and therefore of ids.
        add_choices_to_identities,
        # Vectors from before this version have no checksum: computing it would read all of them.
        """
        ALTER TABLE vectors ADD COLUMN checksum INTEGER;
        """,
        # Plainer column names.
        """
        ALTER TABLE example_images RENAME COLUMN place TO position;
        ALTER TABLE uses RENAME COLUMN last TO last_used;
        """,
    ),
)
