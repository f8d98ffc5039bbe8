"""Feedback on requests: one row for each request and key, beside the ledger."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from bottega.gateway.accounting.database import Row, Value, text_of
from bottega.gateway.accounting.ledger import Ledger

COLUMNS = "time, request_id, account, namespace, tier, rating, correction, comment, example"
# Fields that are not given keep their earlier values.
INSERT = (
    f"INSERT INTO feedback AS old ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (request_id, account) DO UPDATE SET time = excluded.time,"
    " rating = coalesce(excluded.rating, old.rating),"
    " correction = coalesce(excluded.correction, old.correction),"
    " comment = coalesce(excluded.comment, old.comment),"
    " example = coalesce(excluded.example, old.example)"
)
FIND_REQUEST = (
    "SELECT account, namespace, tier FROM entries"
    " WHERE time >= ? AND time <= ? AND request_id = ? AND state != 'shadow' LIMIT 1"
)
REQUEST_ID = re.compile(r"req_([0-9a-f]{12})[0-9a-f]{20}")
CLOCK_SECONDS = 2.0  # between the id of a request and its entry, if the clock is set


@dataclass(frozen=True)
class Feedback:
    """Feedback of one account on one request. `rating` is from 0 to 1; `example` is the id of the
    demonstration that the correction became."""

    time: float
    request_id: str
    account: str
    namespace: str
    tier: str
    rating: float | None = None
    correction: str | None = None
    comment: str | None = None
    example: str | None = None


@dataclass(frozen=True)
class LedgerRequest:
    """Request in the ledger."""

    account: str
    namespace: str
    tier: str


def find_request(ledger: Ledger, request_id: str) -> LedgerRequest | None:
    """Return a request that has been written to the ledger. Blocks. Raises `StoreError`."""
    moment = request_time(request_id)
    if moment is None:
        return None
    rows = ledger.read(FIND_REQUEST, moment - CLOCK_SECONDS, moment + CLOCK_SECONDS, request_id)
    return LedgerRequest(*rows[0]) if rows else None


def request_time(request_id: str) -> float | None:
    """Return the time in an id of the gateway in unix seconds. An index of random ids would triple
    the time to write an entry."""
    found = REQUEST_ID.fullmatch(request_id)
    return None if found is None else int(found[1], 16) / 1000


def add_feedback(ledger: Ledger, feedback: Feedback) -> None:
    """Store feedback. Later feedback of the account on the same request replaces the fields that it
    has. Blocks. Raises `StoreError`."""
    values: list[Value] = [
        text_of(value) if isinstance(value, str) else value for value in vars(feedback).values()
    ]
    ledger.execute(INSERT, *values)


def read_feedback(
    ledger: Ledger, *, namespace: str | None = None, since: float = 0.0
) -> Iterator[Feedback]:
    """Yield the feedback since a time, the oldest first. Blocks. Raises `StoreError`."""
    where, values = "time >= ?", list[Value]([since])
    if namespace is not None:
        where, values = f"{where} AND namespace = ?", [*values, namespace]
    rows: list[Row] = ledger.read(
        f"SELECT {COLUMNS} FROM feedback WHERE {where} ORDER BY time, request_id", *values
    )
    yield from (Feedback(*row) for row in rows)
