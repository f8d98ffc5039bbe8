"""The tables of a knowledge base file."""

from __future__ import annotations

from bottega.sqlite import FileKind

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
    ),
)
