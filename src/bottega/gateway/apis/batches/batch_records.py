"""Stored files and batches: their tables, and their JSON in the format of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import orjson

from bottega._util.sql_tables import SQLITE, TableSchema
from bottega._util.sqlite import FileKind

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
Purpose = Literal["batch", "batch_output"]
UNFINISHED: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")
COMPLETION_WINDOW = "24h"
# Statuses whose times the API reports.
TIMES: tuple[BatchStatus, ...] = (
    *("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"),
)
# Rows are listed in the order of their insertion.
NUMBERED = "number INTEGER PRIMARY KEY AUTOINCREMENT, UNIQUE (id)"


def _json_text(value: object) -> str:
    return orjson.dumps(value).decode()


@dataclass(frozen=True)
class StoredFile:
    """File of one account. Times are unix seconds."""

    id: str
    account: str
    filename: str
    purpose: Purpose
    size: int
    created: float
    expires: float

    def json(self) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": int(self.created),
            "expires_at": int(self.expires),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True)
class LineError:
    """Error in an input file. `line` counts from 1; None concerns the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def json(self) -> dict[str, object]:
        return dict(vars(self))


@dataclass(frozen=True)
class Batch:
    """Batch of one account. `times` are the unix seconds at which each status began. `failed`
    counts the requests whose reply is an error."""

    id: str
    account: str
    endpoint: str
    input_file: str
    status: BatchStatus
    created: float
    expires: float
    metadata: Annotated[Mapping[str, str] | None, _json_text] = None
    times: Annotated[Mapping[str, float], _json_text] = field(default_factory=dict)
    errors: Annotated[Sequence[LineError], _json_text] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file: str | None = None
    error_file: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.status not in UNFINISHED

    def json(self) -> dict[str, object]:
        errors = [error.json() for error in self.errors]
        times = {name: self.times.get(name) for name in TIMES}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file,
            "completion_window": COMPLETION_WINDOW,
            "status": self.status,
            "output_file_id": self.output_file,
            "error_file_id": self.error_file,
            "created_at": int(self.created),
            "expires_at": int(self.expires),
            **{f"{name}_at": None if at is None else int(at) for name, at in times.items()},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata,
        }


FILES = TableSchema("files", StoredFile)
BATCHES = TableSchema("batches", Batch)
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
