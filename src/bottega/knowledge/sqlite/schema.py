"""Tables of a knowledge base file, and connections to it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from bottega._util import sqlite
from bottega._util.sqlite import MEMORY, FileKind
from bottega.errors import StoreError
from bottega.image import path_text
from bottega.knowledge.stores import WAY_OUT

TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE notes (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE examples (
    key INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused: indexes and caches rely on it
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
    question_digest TEXT NOT NULL,
    UNIQUE (namespace, id)
);
CREATE INDEX examples_by_namespace ON examples (namespace);
CREATE INDEX examples_by_question ON examples (namespace, question_digest);
CREATE TABLE uses (
    key INTEGER PRIMARY KEY,
    count INTEGER NOT NULL DEFAULT 0,
    last_used REAL,
    saved_usd REAL NOT NULL DEFAULT 0,
    pinned INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE images (
    sha256 TEXT PRIMARY KEY,
    media_type TEXT NOT NULL,
    width INTEGER NOT NULL,
    height INTEGER NOT NULL,
    data BLOB NOT NULL
);
CREATE TABLE example_images (
    key INTEGER NOT NULL,
    position INTEGER NOT NULL,
    sha256 TEXT NOT NULL,
    source TEXT,
    PRIMARY KEY (key, position)
) WITHOUT ROWID;
CREATE INDEX example_images_by_sha256 ON example_images (sha256);
CREATE TABLE views (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    dimension INTEGER NOT NULL,
    complete INTEGER NOT NULL,
    UNIQUE (name, fingerprint)
);
CREATE TABLE vectors (
    key INTEGER NOT NULL,
    view INTEGER NOT NULL,
    vector BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (key, view)
);
CREATE TABLE changes (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    op TEXT NOT NULL,
    key INTEGER NOT NULL,
    id TEXT,  -- of an example; a change of a view has none
    namespace TEXT NOT NULL DEFAULT '',
    mark INTEGER NOT NULL DEFAULT (random())  -- a restored copy assigns the same numbers again
);
"""

KNOWLEDGE_BASE = FileKind("knowledge base", (TABLES,), 0x42747467, way_out=WAY_OUT)  # "Bttg"


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
