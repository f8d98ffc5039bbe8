"""Reports on the ledger's entries: single requests, lists, sums of a period, and feedback."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bottega._util.sql_tables import optional, placeholders
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import ENTRIES, FEEDBACK, REJECTED, Entry, Feedback

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

SELECT = f"SELECT {ENTRIES.column_list} FROM gateway_entries"
FIND = f"{SELECT} WHERE time >= ?1 AND time <= ?2 AND request_id = ?3 AND state != 'shadow' LIMIT 1"
IN_NAMESPACE = optional("namespace", 2)
BUCKETS = f"""
SELECT {{bucket}} AS bucket, tier, state,
    CASE WHEN {REJECTED.format("")} THEN 1 ELSE 0 END AS rejected,
    count(*), coalesce(sum(cost_usd), 0.0)
FROM gateway_entries WHERE time >= ?1 AND {IN_NAMESPACE} GROUP BY bucket, tier, state, rejected
ORDER BY bucket, tier, state, rejected
"""
ANSWERS = f"""
SELECT seconds, similarity FROM gateway_entries
WHERE time >= ?1 AND state = 'answered' AND {IN_NAMESPACE} ORDER BY time DESC LIMIT ?3
"""
STATUSES = f"""
SELECT status, count(*) FROM gateway_entries
WHERE time >= ?1 AND status >= 400 AND {IN_NAMESPACE}
GROUP BY status ORDER BY count(*) DESC, status DESC LIMIT ?3
"""
REQUEST_ID = re.compile(r"req_([0-9a-f]{12})[0-9a-f]{20}")
CLOCK_SECONDS = 2.0  # between the id of a request and its entry, if the clock is set


@dataclass(frozen=True)
class EntryFilter:
    """Filter of entries; None is any value. Without a `state`, shadow samples are excluded. Times
    are in unix seconds."""

    state: str | None = None
    namespace: str | None = None
    tier: str | None = None
    since: float | None = None
    before: float | None = None


@dataclass(frozen=True)
class Bucket:
    """Requests with one tier and state in one time step; `number` is the time in steps since 1970.
    `is_rejected` is set for requests that failed by the client's error."""

    number: int
    tier: str
    state: str
    is_rejected: bool
    requests: int
    cost_usd: float


def find_request(ledger: Ledger, request_id: str, around: float | None = None) -> Entry | None:
    """Return the entry of a request near a time, by default the time in its id. Return None if no
    such entry is written. Blocks. Raises `StoreError`."""
    moment = request_time(request_id) if around is None else around
    if moment is None:
        return None
    times = moment - CLOCK_SECONDS, moment + CLOCK_SECONDS
    rows = ledger.read(FIND, *times, request_id)
    return Entry(*rows[0]) if rows else None


def request_time(request_id: str) -> float | None:
    """Return the time in an id of the gateway in unix seconds. Requests are found by their time,
    because an index of random ids would triple the time to write an entry."""
    found = REQUEST_ID.fullmatch(request_id)
    return None if found is None else int(found[1], 16) / 1000


def list_requests(ledger: Ledger, chosen: EntryFilter, limit: int) -> list[Entry]:
    """Return the newest entries of a filter, the newest first."""
    conditions = {
        "state = ?": chosen.state,
        "namespace = ?": chosen.namespace,
        "tier = ?": chosen.tier,
        "time >= ?": chosen.since,
        "time < ?": chosen.before,
    }
    given = {sql: value for sql, value in conditions.items() if value is not None}
    where = [f"{sql}{number}" for number, sql in enumerate(given, 2)]
    if chosen.state is None:
        where.append("state != 'shadow'")
    rows = ledger.read(
        f"{SELECT} WHERE {' AND '.join(where)} ORDER BY time DESC LIMIT ?1", limit, *given.values()
    )
    return [Entry(*row) for row in rows]


def requests_at(ledger: Ledger, times: Sequence[float]) -> list[Entry]:
    """Return the requests with exactly these times."""
    marks = placeholders(len(times))
    rows = ledger.read(f"{SELECT} WHERE time IN ({marks}) AND state != 'shadow'", *times)
    return [Entry(*row) for row in rows]


def buckets(ledger: Ledger, since: float, seconds: int, namespace: str | None) -> list[Bucket]:
    """Return the requests since a time in steps of `seconds`; of all namespaces if None."""
    bucket = ledger.dialect.floor.format(f"time / {seconds}")
    rows = ledger.read(BUCKETS.format(bucket=bucket), since, namespace)
    return [
        Bucket(number, tier, state, bool(rejected), requests, usd)
        for number, tier, state, rejected, requests, usd in rows
    ]


def newest_answers(
    ledger: Ledger, since: float, namespace: str | None, limit: int
) -> list[tuple[float, float | None]]:
    """Return seconds and similarity of the newest answers since a time."""
    return [tuple(row) for row in ledger.read(ANSWERS, since, namespace, limit)]


def frequent_errors(
    ledger: Ledger, since: float, namespace: str | None, limit: int
) -> list[tuple[int, int]]:
    """Return the most frequent error statuses since a time, with their numbers."""
    return [(int(status), int(n)) for status, n in ledger.read(STATUSES, since, namespace, limit)]


def add_feedback(ledger: Ledger, feedback: Feedback) -> None:
    """Store feedback. Later feedback of the account on the same request replaces the fields that it
    has. Blocks. Raises `StoreError`."""
    ledger.execute(INSERT, *FEEDBACK.row(feedback))


def read_feedback(
    ledger: Ledger, *, namespace: str | None = None, since: float = 0.0
) -> Iterator[Feedback]:
    """Yield the feedback since a time, the oldest first. Blocks. Raises `StoreError`."""
    yield from (Feedback(*row) for row in ledger.read(READ, since, namespace))
