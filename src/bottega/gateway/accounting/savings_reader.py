"""Queries of the savings report."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson

from bottega.gateway.accounting.entries import Row, Value
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.rollups import SINCE, since_values

# Up to this many master answers in a namespace each cost is read; above, only their sums.
MANY = 2_000
SHADOWS = "SELECT with_score, without_score FROM shadows WHERE {where}"
# Times of the first and the last entry; each subquery uses an index.
SPAN = """
SELECT (SELECT time FROM entries WHERE {where} ORDER BY time LIMIT 1),
    (SELECT time FROM entries WHERE {where} ORDER BY time DESC LIMIT 1)
"""
SPAN_OF_NAMESPACE = """
SELECT max(min(day) * 86400, ?), (max(day) + 1) * 86400 FROM {source} WHERE namespace = ?
"""
ROUTES = """
SELECT how, CASE WHEN how = 'replayed' THEN '' ELSE route END AS tier, shots AS shown,
    sum(requests), sum(prompt_tokens), sum(completion_tokens), sum(cached_tokens),
    total(cost_usd), CASE WHEN how = 'replayed' THEN 0 ELSE sum(requests) - sum(priced) END,
    sum(seconds) / sum(requests), sum(similarity) / nullif(sum(compared), 0), sum(compared)
FROM {source} {where} GROUP BY how, tier, shown
ORDER BY how = 'shadow', how = 'refused', how = 'failed', how = 'passed', how = 'answered',
    tier = ?, tier, shown
"""
# Requests answered without a master call. Replays count: their answer was paid for before.
OTHERS = """
SELECT namespace, sum(requests) FROM {source}
WHERE how NOT IN ('failed', 'refused', 'shadow') AND (route != ? OR how = 'replayed') {and_where}
GROUP BY namespace
"""
OWN = """
SELECT namespace, how, sum(priced), total(net_usd), total(net_usd_squared) FROM {source}
WHERE route = ? AND how IN ('answered', 'passed', 'shadow', 'failed', 'refused')
GROUP BY namespace, how HAVING sum(priced) > 0
"""
COSTS = """
SELECT namespace, cost_usd - dismissed_usd FROM json_each(?) AS few CROSS JOIN entries
WHERE route = ? AND namespace = few.value AND time >= ? AND state IN ('answered', 'shadow')
    AND cost_usd IS NOT NULL
ORDER BY namespace, time, entries.rowid
"""


@dataclass(frozen=True)
class Route:
    """Requests with the same state, tier and shots. `seconds` and `similarity` are means, the
    latter over the `compared` requests, for which examples were retrieved."""

    state: str
    tier: str
    shots: int
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost_usd: float
    unpriced: int
    seconds: float
    similarity: float | None
    compared: int

    @property
    def is_answer(self) -> bool:
        return self.state in ("answered", "replayed", "passed")


@dataclass(frozen=True)
class Costs:
    """Costs of the master's priced answers in one namespace in US dollars: number, mean and
    standard deviation, and each cost in `values` unless there are more than `MANY`."""

    n: int
    mean: float
    deviation: float
    values: Sequence[float] = ()


@dataclass(frozen=True)
class SavingsReader:
    """Reader of the ledger for the savings report; uses daily sums where possible."""

    ledger: Ledger
    since: float
    namespace: str | None
    master: str

    def routes(self) -> tuple[Route, ...]:
        where = "" if self.namespace is None else "WHERE namespace = ?"
        return tuple(Route(*row) for row in self._sums(ROUTES, where, *self._named, self.master))

    def others(self) -> dict[str, int]:
        """Return the number of requests of each namespace that the master did not answer."""
        where = "" if self.namespace is None else "AND namespace = ?"
        return dict(self._sums(OTHERS, where, self.master, *self._named))

    def paid(self) -> float:
        """Return the cost of the master's own requests, without shadow samples."""
        return sum(
            float(cost)
            for where, how, _, cost, _ in self._sums(OWN, "", self.master)
            if how != "shadow" and self.namespace in (None, where)
        )

    def costs(self) -> dict[str, Costs]:
        """Return the costs of the master's answers in each namespace."""
        sums = defaultdict[str, tuple[float, float, float]](lambda: (0, 0.0, 0.0))
        for where, how, n, total, squares in self._sums(OWN, "", self.master):
            if how in ("answered", "shadow"):
                before = sums[where]
                sums[where] = (before[0] + n, before[1] + total, before[2] + squares)
        few = orjson.dumps([where for where, (n, *_) in sums.items() if n <= MANY]).decode()
        values = defaultdict[str, list[float]](list)
        for where, cost in self.ledger.read(COSTS, few, self.master, self.since):
            values[where].append(cost)
        return {where: _costs(*found, values[where]) for where, found in sums.items()}

    def span(self) -> tuple[float | None, float | None]:
        """Return the times of the first and the last entry."""
        where, values = "time >= ?", tuple[Value, ...]((self.since,))
        if self.namespace is not None:
            source = SPAN_OF_NAMESPACE.format(source=SINCE)
            days = since_values(self.since)
            ((begin, end),) = self.ledger.read(source, self.since, *days, self.namespace)
            where = "time >= ? AND time < ? AND namespace = ?"
            values = (begin, end, self.namespace)
        ((first, last),) = self.ledger.read(SPAN.format(where=where), *values, *values)
        return first, last

    def shadows(self) -> list[Row]:
        where = "time >= ?" if self.namespace is None else "time >= ? AND namespace = ?"
        return self.ledger.read(SHADOWS.format(where=where), self.since, *self._named)

    @property
    def _named(self) -> tuple[str, ...]:
        return () if self.namespace is None else (self.namespace,)

    def _sums(self, statement: str, where: str, *values: Value) -> list[Row]:
        whole = statement.format(source=SINCE, where=where, and_where=where)
        return self.ledger.read(whole, *since_values(self.since), *values)


def _costs(n: float, total: float, squares: float, values: Sequence[float]) -> Costs:
    if values:  # exact, unlike the rounded sums
        return Costs(len(values), float(np.mean(values)), float(np.std(values)), values)
    mean = total / n
    return Costs(int(n), mean, math.sqrt(max(0.0, squares / n - mean**2)))
