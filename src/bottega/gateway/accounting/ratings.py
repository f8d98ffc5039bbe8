"""Feedback on requests: one row for each request and key, beside the ledger."""

from __future__ import annotations

from collections.abc import Iterator

from bottega._util.sql_tables import optional
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import FEEDBACK
from bottega.gateway.accounting.row_types import Feedback

# Fields that are not given keep their earlier values.
GIVEN = ", ".join(
    f"{name} = coalesce(excluded.{name}, old.{name})"
    for name in ("rating", "correction", "comment", "example")
)
INSERT = (
    f"INSERT INTO gateway_feedback AS old ({FEEDBACK.column_list}) VALUES ({FEEDBACK.placeholders})"
    f" ON CONFLICT (request_id, account) DO UPDATE SET time = excluded.time, {GIVEN}"
)
READ = (
    f"SELECT {FEEDBACK.column_list} FROM gateway_feedback WHERE time >= ?1"
    f" AND {optional('namespace', 2)} ORDER BY time, request_id"
)


def add_feedback(ledger: Ledger, feedback: Feedback) -> None:
    """Store feedback. Later feedback of the account on the same request replaces the fields that it
    has. Blocks. Raises `StoreError`."""
    ledger.execute(INSERT, *FEEDBACK.row(feedback))


def read_feedback(
    ledger: Ledger, *, namespace: str | None = None, since: float = 0.0
) -> Iterator[Feedback]:
    """Yield the feedback since a time, the oldest first. Blocks. Raises `StoreError`."""
    yield from (Feedback(*row) for row in ledger.read(READ, since, namespace))
