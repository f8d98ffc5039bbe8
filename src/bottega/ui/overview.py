"""Overview: requests, shares of tiers, cost, savings, similarity, latency and errors."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bottega.gateway.accounting.database import Row
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.savings import Savings, savings
from bottega.ui.charts import StackedBars, stacked_bars
from bottega.ui.pages import Page, Visit

# Width of a bar in seconds, by the length of the period in seconds.
PERIODS = {
    "1h": (3600, 60),
    "6h": (6 * 3600, 300),
    "24h": (24 * 3600, 1200),
    "7d": (7 * 86_400, 7200),
    "30d": (30 * 86_400, 36_000),
}
DEFAULT_PERIOD = "24h"
SAMPLE = 20_000  # newest answers that quantiles and similarities are computed from
REFRESH_SECONDS = 5
BUCKETS = """
SELECT CAST(time / {width} AS INTEGER) AS bucket, tier, state,
    CASE WHEN state = 'failed' AND status BETWEEN 400 AND 498 THEN 1 ELSE 0 END AS rejected,
    count(*), coalesce(sum(cost_usd), 0.0)
FROM entries WHERE time >= ? {where} GROUP BY bucket, tier, state, rejected
"""
ANSWERS = """
SELECT seconds, similarity FROM entries WHERE time >= ? AND state = 'answered' {where}
ORDER BY time DESC LIMIT ?
"""
STATUSES = """
SELECT status, count(*) FROM entries WHERE time >= ? AND status >= 400 {where}
GROUP BY status ORDER BY count(*) DESC LIMIT 8
"""
HISTOGRAM = 10
REPLAYED, FAILED, REJECTED = "replayed", "failed", "rejected"


@dataclass(frozen=True)
class Figures:
    """Figures of one period. Latencies are in seconds, over the newest `sampled` answers."""

    requests: int
    cost_usd: float
    shares: Mapping[str, int]
    requests_chart: StackedBars
    cost_chart: StackedBars
    median: float | None
    slow: float | None
    sampled: int
    similarities: StackedBars | None
    statuses: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class OverviewPage:
    """Handler of the overview."""

    ledger: Ledger

    def __call__(self, visit: Visit) -> Page:
        viewer = visit.viewer
        period = visit.value("period", DEFAULT_PERIOD)
        if period not in PERIODS:
            period = DEFAULT_PERIOD
        wanted = visit.value("namespace") or None
        namespace = None if viewer.is_admin and wanted is None else viewer.namespace(wanted)
        found = figures(self.ledger, period, namespace)
        saved: Savings | None = None
        if found.requests:
            since = time.time() - PERIODS[period][0]
            saved = savings(self.ledger, namespace=namespace, since=since)
        return Page(
            "overview.html",
            {
                "title": "Overview",
                "periods": list(PERIODS),
                "period": period,
                "namespace": namespace,
                "figures": found,
                "saved": saved,
                "refresh": REFRESH_SECONDS,
            },
        )


def figures(ledger: Ledger, period: str, namespace: str | None) -> Figures:
    """Return the figures of a period that ends now. Blocks."""
    length, width = PERIODS[period]
    now = time.time()
    since = now - length
    where = "" if namespace is None else "AND namespace = ?"
    named = () if namespace is None else (namespace,)
    rows = ledger.read(BUCKETS.format(width=width, where=where), since, *named)
    sample = ledger.read(ANSWERS.format(where=where), since, *named, SAMPLE)
    statuses = ledger.read(STATUSES.format(where=where), since, *named)
    requests, cost = _by_bucket(rows)
    shares: dict[str, int] = defaultdict(int)
    for (_, name), count in requests.items():
        shares[name] += int(count)
    seconds = np.array([row[0] for row in sample], dtype=float)
    similarities = [row[1] for row in sample if row[1] is not None]
    first, last = int(since // width), int(now // width)
    times = [bucket * width for bucket in range(first, last + 1)]
    shares = dict(sorted(shares.items(), key=lambda one: -one[1]))

    def chart(sums: Sums) -> StackedBars:
        values = {(float(bucket * width), name): n for (bucket, name), n in sums.items()}
        return stacked_bars(times, width, values, list(shares))

    return Figures(
        sum(shares.values()),
        sum(cost.values()),
        shares,
        chart(requests),
        chart(cost),
        float(np.median(seconds)) if len(seconds) else None,
        float(np.quantile(seconds, 0.95)) if len(seconds) else None,
        len(seconds),
        _histogram(similarities),
        [(int(status), int(count)) for status, count in statuses],
    )


Sums = dict[tuple[int, str], float]


def _by_bucket(rows: Sequence[Row]) -> tuple[Sums, Sums]:
    """Return the requests and the cost in US dollars by bucket and series."""
    requests: Sums = defaultdict(float)
    cost: Sums = defaultdict(float)
    for bucket, tier, state, rejected, count, usd in rows:
        if usd:
            cost[int(bucket), tier or "unknown"] += usd
        if state == "shadow":  # measurements, not requests
            continue
        name = tier or "unknown"
        if state == "failed":
            name = REJECTED if rejected else FAILED
        elif state == "replayed":
            name = REPLAYED
        requests[int(bucket), name] += count
    return requests, cost


def _histogram(similarities: Sequence[float]) -> StackedBars | None:
    if not similarities:
        return None
    counts, edges = np.histogram(np.clip(similarities, 0, 1), HISTOGRAM, (0.0, 1.0))
    points = {(float(edge), "answers"): float(n) for edge, n in zip(edges, counts, strict=False)}
    return stacked_bars([float(edge) for edge in edges[:-1]], 1 / HISTOGRAM, points)
