"""Tables of batches.db."""

from __future__ import annotations

from bottega._util.sqlite import FileKind

BATCHES_DB = FileKind(
    "batch store",
    application_id=0x42746274,  # "Btbt"
    migrations=(
        """
        CREATE TABLE files (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            account TEXT NOT NULL,
            filename TEXT NOT NULL,
            purpose TEXT NOT NULL,
            size INTEGER NOT NULL,
            created REAL NOT NULL,
            expires REAL NOT NULL
        );
        CREATE INDEX files_by_account ON files (account, number);
        CREATE TABLE batches (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            account TEXT NOT NULL,
            endpoint TEXT NOT NULL,
            input_file TEXT NOT NULL,
            status TEXT NOT NULL,
            created REAL NOT NULL,
            expires REAL NOT NULL,
            metadata TEXT NOT NULL,
            times TEXT NOT NULL,
            errors TEXT NOT NULL,
            total INTEGER NOT NULL,
            completed INTEGER NOT NULL,
            failed INTEGER NOT NULL,
            output_file TEXT,
            error_file TEXT
        );
        CREATE INDEX batches_by_account ON batches (account, number);
        CREATE INDEX batches_by_status ON batches (status);
        CREATE TABLE results (
            batch TEXT NOT NULL,
            line INTEGER NOT NULL,
            failed INTEGER NOT NULL,
            payload BLOB NOT NULL,
            PRIMARY KEY (batch, line)
        );
        CREATE INDEX results_by_outcome ON results (batch, failed);
        """,
    ),
)
FILE_COLUMNS = "id, account, filename, purpose, size, created, expires"
BATCH_COLUMNS = (
    "id, account, endpoint, input_file, status, created, expires, metadata, times, errors, total,"
    " completed, failed, output_file, error_file"
)
