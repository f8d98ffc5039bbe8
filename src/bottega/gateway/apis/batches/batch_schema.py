"""Tables of batches.db. The fields of `StoredFile` and `Batch` declare their columns."""

from __future__ import annotations

from bottega._util.sql_tables import SQLITE, TableSchema
from bottega._util.sqlite import FileKind
from bottega.gateway.apis.batches.batch_records import Batch, StoredFile

FILES = TableSchema("files", StoredFile)
BATCHES = TableSchema("batches", Batch)
# Rows are listed in the order of their insertion.
NUMBERED = "number INTEGER PRIMARY KEY AUTOINCREMENT, UNIQUE (id)"
TABLES = f"""
{FILES.create(SQLITE, more=NUMBERED)}
CREATE INDEX files_by_account ON files (account, number);
{BATCHES.create(SQLITE, more=NUMBERED)}
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
"""
BATCHES_DB = FileKind("batch store", (TABLES,), application_id=0x42746274)  # "Btbt"
