"""gateway.db: who may ask, and what every request cost."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from bottega.errors import StoreError
from bottega.gateway.accounting.rollups import add_rollups
from bottega.image import path_text
from bottega.sqlite import FileKind

FILE = "gateway.db"
BUSY_SECONDS = 3.0
GATEWAY_DB = FileKind(
    "gateway database",
    application_id=0x42746777,  # "Btgw"
    migrations=(
        """
        CREATE TABLE accounts (
            id TEXT PRIMARY KEY,
            name TEXT NOT NULL,
            namespace TEXT NOT NULL,
            admin INTEGER NOT NULL,
            may_store INTEGER NOT NULL,
            requests_per_minute INTEGER,
            usd_per_month REAL,
            created REAL NOT NULL,
            revoked REAL,
            secret BLOB NOT NULL
        ) WITHOUT ROWID;
        CREATE TABLE entries (
            time REAL NOT NULL,
            request_id TEXT NOT NULL,
            account TEXT NOT NULL,
            namespace TEXT NOT NULL,
            route TEXT NOT NULL,
            model TEXT NOT NULL,
            state TEXT NOT NULL,
            shots INTEGER NOT NULL,
            similarity REAL,
            prompt_tokens INTEGER NOT NULL,
            completion_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            cost_usd REAL,
            dismissed_usd REAL NOT NULL,
            seconds REAL NOT NULL,
            status INTEGER NOT NULL
        );
        CREATE INDEX entries_by_time ON entries (time);
        CREATE TABLE shadows (
            time REAL NOT NULL,
            request_id TEXT NOT NULL,
            namespace TEXT NOT NULL,
            similarity REAL NOT NULL,
            with_score REAL NOT NULL,
            without_score REAL NOT NULL
        );
        CREATE INDEX shadows_by_time ON shadows (time);
        CREATE TABLE spending (
            month TEXT NOT NULL,
            account TEXT NOT NULL,
            usd REAL NOT NULL,
            dearest REAL NOT NULL,
            PRIMARY KEY (month, account)
        ) WITHOUT ROWID;
        CREATE TABLE notes (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
        """,
        """
        ALTER TABLE accounts ADD COLUMN max_concurrent INTEGER;
        ALTER TABLE accounts ADD COLUMN tiers TEXT;
        ALTER TABLE accounts ADD COLUMN max_namespaces INTEGER;
        CREATE TABLE namespaces (
            account TEXT NOT NULL,
            namespace TEXT NOT NULL,
            PRIMARY KEY (account, namespace)
        ) WITHOUT ROWID;
        """,
        add_rollups,
    ),
)


def connect(path: Path, *, create: bool) -> sqlite3.Connection:
    """A connection that every thread may use. Its commits survive a crash of the process; a crash
    of the machine may lose the last ones but never damages the file."""
    name = path_text(path)
    if not create and not path.exists():
        raise StoreError(
            f"there is no {name}", hint="check --data, or make a key: bottega keys add NAME"
        )
    if not path.parent.is_dir():
        raise StoreError(f"there is no folder {path_text(path.parent)}", hint="create it first")
    with GATEWAY_DB.translated(name):
        connection = sqlite3.connect(
            path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            GATEWAY_DB.migrate(connection, name)
            connection.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            connection.close()
            raise
    return connection
