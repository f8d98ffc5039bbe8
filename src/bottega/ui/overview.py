"""Overview: requests and cost by tier, savings, similarity, latency and errors of a period."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.reports import Bucket, buckets, frequent_errors, newest_answers
from bottega.gateway.accounting.savings import NO_REQUESTS, Savings, savings
from bottega.ui.charts import StackedBars, stacked_bars
from bottega.ui.pages import Page, Visit

# Length of each period and width of its bars, in seconds.
PERIODS = {
    "1h": (3600, 60),
    "6h": (6 * 3600, 300),
    "24h": (24 * 3600, 1200),
    "7d": (7 * 86_400, 7200),
    "30d": (30 * 86_400, 36_000),
}
DEFAULT_PERIOD = "24h"
SAMPLE = 20_000  # newest answers used for latencies and similarities
REFRESH_SECONDS = 5
NO_TIER = "without a model"  # such as embeddings
MOST_STATUSES = 8
HISTOGRAM_BINS = 10
REPLAYED, FAILED = "replayed", "failed"


@dataclass(frozen=True)
class Statistics:
    """Statistics of one period. `shares` are requests by series, without the `rejected` ones, which
    failed by an error of the client. Latencies and similarities are
    those of the newest `sampled` answers; `statuses` are the most frequent error statuses with
    their counts."""

    requests: int
    rejected: int
    cost_usd: float
    shares: Mapping[str, int]
    requests_chart: StackedBars
    cost_chart: StackedBars
    median_seconds: float | None
    p95_seconds: float | None
    sampled: int
    similarities: StackedBars | None
    statuses: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class OverviewPage:
    """Handler of the overview."""

    ledger: Ledger

    def __call__(self, visit: Visit) -> Page:
        user = visit.user
        period = visit.value("period", DEFAULT_PERIOD)
        if period not in PERIODS:
            period = DEFAULT_PERIOD
        wanted = visit.value("namespace") or None
        namespace = None if user.sees_all and wanted is None else user.namespace(wanted)
        found = statistics(self.ledger, period, namespace)
        saved: Savings | None = None
        if found.requests:
            since = time.time() - PERIODS[period][0]
            # Means of other namespaces would show their costs.
            saved = savings(self.ledger, namespace=namespace, since=since, pooled=user.sees_all)
        return Page(
            "overview.html",
            {
                "title": "Overview",
                "periods": list(PERIODS),
                "period": period,
                "namespace": namespace,
                "statistics": found,
                "saved": saved,
                "refresh": REFRESH_SECONDS,
            },
        )


def statistics(ledger: Ledger, period: str, namespace: str | None) -> Statistics:
    """Return the statistics of a period that ends now; of all namespaces if `namespace` is None."""
    length, width = PERIODS[period]
    now = time.time()
    since = now - length
    sample = newest_answers(ledger, since, namespace, SAMPLE)
    found = buckets(ledger, since, width, namespace)
    requests, cost = _by_bucket(found)
    shares: dict[str, int] = defaultdict(int)
    for (_, name), count in requests.items():
        shares[name] += int(count)
    seconds = np.array([one for one, _ in sample], dtype=float)
    similarities = [one for _, one in sample if one is not None]
    first, last = int(since // width), int(now // width)
    times = [bucket * width for bucket in range(first, last + 1)]
    shares = dict(sorted(shares.items(), key=lambda one: -one[1]))

    def chart(sums: Sums) -> StackedBars:
        values = {(float(bucket * width), name): n for (bucket, name), n in sums.items()}
        return stacked_bars(times, values, list(shares))

    return Statistics(
        sum(shares.values()),
        sum(one.requests for one in found if one.is_rejected),
        sum(cost.values()),
        shares,
        chart(requests),
        chart(cost),
        float(np.median(seconds)) if len(seconds) else None,
        float(np.quantile(seconds, 0.95)) if len(seconds) else None,
        len(seconds),
        _histogram(similarities),
        frequent_errors(ledger, since, namespace, MOST_STATUSES),
    )


Sums = dict[tuple[int, str], float]


def _by_bucket(found: Sequence[Bucket]) -> tuple[Sums, Sums]:
    """Return the number of requests and the cost in US dollars by bucket and series."""
    requests: Sums = defaultdict(float)
    cost: Sums = defaultdict(float)
    for one in found:
        name = one.tier or NO_TIER
        if one.cost_usd:
            cost[one.number, name] += one.cost_usd
        # Shadow samples have a cost but are not requests of clients; token counts have no answer.
        if one.state in NO_REQUESTS or one.is_rejected:
            continue
        if one.state == "failed":
            name = FAILED
        elif one.state == "replayed":
            name = REPLAYED
        requests[one.number, name] += one.requests
    return requests, cost


def _histogram(similarities: Sequence[float]) -> StackedBars | None:
    if not similarities:
        return None
    counts, edges = np.histogram(np.clip(similarities, 0, 1), HISTOGRAM_BINS, (0.0, 1.0))
    points = {(float(edge), "answers"): float(n) for edge, n in zip(edges, counts, strict=False)}
    return stacked_bars([float(edge) for edge in edges[:-1]], points)
