"""The tables of a knowledge base file, and how an older file becomes a current one."""

from __future__ import annotations

import sqlite3

from bottega.errors import StoreError

# "Bttg": tells a knowledge base from any other SQLite file.
APPLICATION_ID = 0x42747467

# Append only: entry n turns a file of version n into one of version n + 1.
MIGRATIONS = [
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
]
FORMAT_VERSION = len(MIGRATIONS)


def migrate(connection: sqlite3.Connection, name: str) -> None:
    """Brings the file to `FORMAT_VERSION`; refuses newer files and other programs' files."""
    if _version(connection, name) == FORMAT_VERSION:
        return
    # Only now: the file is ours. The mode stays with it.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN IMMEDIATE")
    # Asked again under the write lock: another process may have migrated meanwhile.
    for number in range(_version(connection, name), FORMAT_VERSION):
        for statement in MIGRATIONS[number].split(";"):
            connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
    connection.execute("COMMIT")


def _version(connection: sqlite3.Connection, name: str) -> int:
    owner = connection.execute("PRAGMA application_id").fetchone()[0]
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if owner != APPLICATION_ID and (owner or version or tables):
        raise StoreError(
            f"{name} is a SQLite file of another program, not a knowledge base",
            hint="check the path, or choose a new file name",
        )
    if version > FORMAT_VERSION:
        raise StoreError(
            f"{name} has format {version}; this version of bottega reads up to {FORMAT_VERSION}",
            hint="pip install --upgrade bottega",
        )
    return version
