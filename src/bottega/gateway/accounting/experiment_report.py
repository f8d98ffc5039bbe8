"""Report of an experiment: quality, cost and latency of its variants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bottega._util.sql_tables import SqlRow
from bottega.errors import NotFoundError
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import CURRENT_RULES, REJECTED
from bottega.gateway.accounting.sequential import (
    ALPHA,
    Floats,
    SequentialEstimate,
    bounded_estimate,
    difference,
    mean_estimate,
)

VARIANTS = ("a", "b")
LATEST = "SELECT variant FROM gateway_entries WHERE variant != '' ORDER BY time DESC LIMIT 1"
# Requests that failed with 4xx are not the variant's failures: the client's error, or 499, a
# client that left.
SELECT_ENTRIES = f"""
SELECT variant, state, tier, cost_usd, seconds FROM gateway_entries
WHERE variant IN (?1, ?2) AND time >= ?3
    AND (state IN ('answered', 'replayed')
        OR (state = 'failed' AND status != 499 AND NOT ({REJECTED.format("")})))
ORDER BY time, request_id
"""
# The master agrees with itself. Without `sampled`, the answer was dismissed, or measured because it
# has demonstrations and the gate has too few samples.
AGREEMENT = f"""
SELECT e.variant, CASE WHEN s.was_shown THEN s.with_score ELSE s.without_score END
FROM gateway_shadows AS s JOIN gateway_entries AS e ON e.request_id = s.request_id
WHERE s.sampled AND e.variant IN (?1, ?2) AND e.time >= ?3 AND e.state = 'answered'
    AND e.tier != ?4 AND {CURRENT_RULES}
ORDER BY s.time, s.request_id
"""
RATINGS = """
SELECT e.variant, f.rating FROM gateway_feedback AS f
    JOIN gateway_entries AS e ON e.request_id = f.request_id
WHERE e.variant IN (?1, ?2) AND e.time >= ?3 AND e.state != 'shadow' AND f.rating IS NOT NULL
ORDER BY f.time, f.request_id
"""
Estimator = Callable[[Floats, float], SequentialEstimate | None]


@dataclass(frozen=True)
class VariantComparison:
    """Means of the variants a and b and their difference, b minus a. Each of the three intervals
    holds at all times together with 95 % probability; None without values."""

    metric: str
    a: SequentialEstimate | None
    b: SequentialEstimate | None
    difference: SequentialEstimate | None


@dataclass(frozen=True)
class ExperimentReport:
    """Report of one experiment. `requests` and `replayed` are numbers for the variants a and b.
    Comparisons exclude replayed requests, except that of ratings; "agreement" is that of the pairs
    that the rules decide, "undecided" the share of the others."""

    experiment: str
    requests: tuple[int, int]
    replayed: tuple[int, int]
    comparisons: tuple[VariantComparison, ...]


def experiment_report(
    ledger: Ledger, experiment: str | None = None, *, since: float = 0.0
) -> ExperimentReport:
    """Return the report of an experiment, by default of the latest. `since` is in unix seconds.
    Blocks. Raises `StoreError`, and `NotFoundError` without a request."""
    name = _latest(ledger) if experiment is None else experiment
    master = ledger.master() or "master"
    chosen: tuple[object, ...] = (*(f"{name}:{one}" for one in VARIANTS), since)
    rows = ledger.read(SELECT_ENTRIES, *chosen)
    if not rows:
        raise NotFoundError(
            f"no request belongs to the experiment {name!r}",
            hint="check [experiment] and --experiment; requests with options of their own belong to"
            " no variant",
        )
    sent = [row for row in rows if row[1] != "replayed"]
    answered = [row for row in sent if row[1] == "answered"]
    priced = [(variant, cost) for variant, _, _, cost, _ in answered if cost is not None]
    agreed = ledger.read(AGREEMENT, *chosen, master)
    comparisons = [
        _compared("agreement", [row for row in agreed if row[1] is not None], bounded_estimate),
        _compared("undecided", [(row[0], row[1] is None) for row in agreed], bounded_estimate),
        _compared("rating", ledger.read(RATINGS, *chosen), bounded_estimate),
        _compared("failed", [(row[0], row[1] == "failed") for row in sent], bounded_estimate),
        _compared("master", [(row[0], row[2] == master) for row in answered], bounded_estimate),
        _compared("cost_usd", priced, mean_estimate),
        _compared("seconds", [(row[0], row[4]) for row in answered], mean_estimate),
    ]
    return ExperimentReport(name, _counts(rows), _counts(rows, "replayed"), tuple(comparisons))


def _latest(ledger: Ledger) -> str:
    rows = ledger.read(LATEST)
    if not rows:
        raise NotFoundError(
            "no request belongs to an experiment", hint="set [experiment] and restart the gateway"
        )
    return str(rows[0][0]).rpartition(":")[0]


def _counts(rows: Sequence[SqlRow], state: str | None = None) -> tuple[int, int]:
    found = [row[0][-1] for row in rows if state in (None, row[1])]
    return found.count("a"), found.count("b")


def _compared(metric: str, rows: Sequence[SqlRow], estimate: Estimator) -> VariantComparison:
    """Compare the values of the variants, in the order of their times."""
    values = [
        np.array([float(row[1]) for row in rows if row[0].endswith(f":{variant}")], np.float64)
        for variant in VARIANTS
    ]
    a, b = (estimate(one, ALPHA) for one in values)
    halves = (estimate(one, ALPHA / 2) for one in values)
    return VariantComparison(metric, a, b, difference(*halves))
