"""Tables of a knowledge base file."""

from __future__ import annotations

from bottega._util.sqlite import FileKind

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

WAY_OUT = "run bottega export with the version that wrote it, then bottega import with this one"
KNOWLEDGE_BASE = FileKind("knowledge base", (TABLES,), 0x42747467, way_out=WAY_OUT)  # "Bttg"
