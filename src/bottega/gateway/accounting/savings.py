"""Savings report: amount spent, compared with the estimated cost of the master alone."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import orjson

from bottega._util.sql_tables import SqlRow, optional
from bottega.gateway.accounting.experiment_report import Floats
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import CURRENT_RULES, DAY, since_values, sums_since
from bottega.routing.benefit_gate import AgreementPair, ShadowQuality, shadow_quality

MASTER = "master"
RESAMPLES = 2000
BOOTSTRAP_SIZE = 100_000  # costs that are drawn at once
MIN_ANSWERS = 10  # answers of the master
SEED = 0
NO_REQUESTS = ("shadow", "counted")  # states of what asks for no answer
ZEROS = np.zeros(RESAMPLES + 1)
# Up to this many master answers in a namespace each cost is read; above, only their sums.
MAX_EXACT_COSTS = 2_000
# `since_values` returns the parameters 1 to 3; aliases are not part of expressions, and sums have
# explicit types: the queries run in SQLite and in PostgreSQL.
NAMED = optional("namespace", 4)
SELECT_SHADOWS = f"""
SELECT with_score, without_score, was_shown, retrieve != 'none' FROM gateway_shadows
WHERE time >= ?1 AND {optional("namespace", 2)} AND sampled AND {CURRENT_RULES}
"""
# Times of the first and the last entry; each subquery uses an index.
FIRST_AND_LAST = """
SELECT (SELECT time FROM gateway_entries WHERE {where} ORDER BY time LIMIT 1),
    (SELECT time FROM gateway_entries WHERE {where} ORDER BY time DESC LIMIT 1)
"""
DAYS_OF_NAMESPACE = "SELECT min(day), max(day) FROM {sums} AS days WHERE namespace = ?4"
ROUTES = f"""
SELECT state, answered_by, shots, CAST(sum(requests) AS BIGINT),
    CAST(sum(prompt_tokens) AS BIGINT), CAST(sum(completion_tokens) AS BIGINT),
    CAST(sum(cached_tokens) AS BIGINT), coalesce(sum(cost_usd), 0.0),
    CASE WHEN state = 'replayed' THEN 0 ELSE CAST(sum(requests) - sum(priced) AS BIGINT) END,
    sum(seconds) / CAST(sum(requests) AS DOUBLE PRECISION),
    sum(similarity) / CAST(nullif(sum(compared), 0) AS DOUBLE PRECISION),
    CAST(sum(compared) AS BIGINT)
FROM (SELECT *, CASE WHEN state = 'replayed' THEN '' ELSE tier END AS answered_by
    FROM {{sums}} AS days WHERE {NAMED}) AS each
GROUP BY state, answered_by, shots
ORDER BY state = 'shadow', state = 'counted', state = 'rejected', state = 'failed',
    state = 'passed_through', state = 'answered', answered_by = ?5, answered_by, shots
"""
# Requests answered without a master call. Replays count: their answer was paid for before. Requests
# without a tier, such as embeddings, call no model, so they save nothing.
OTHER_REQUESTS = f"""
SELECT namespace, CAST(sum(requests) AS BIGINT) FROM {{sums}} AS days
WHERE state NOT IN ('failed', 'rejected', 'shadow') AND (tier != ?5 OR state = 'replayed')
    AND (tier != '' OR state = 'replayed') AND {NAMED}
GROUP BY namespace
"""
MASTER_COSTS = """
SELECT namespace, state, CAST(sum(priced) AS BIGINT), coalesce(sum(net_usd), 0.0),
    coalesce(sum(net_usd_squared), 0.0) FROM {sums} AS days
WHERE tier = ?4 AND state IN ('answered', 'passed_through', 'shadow', 'failed', 'rejected')
GROUP BY namespace, state HAVING sum(priced) > 0
"""
ANSWER_COSTS = """
SELECT namespace, cost_usd - dismissed_usd FROM gateway_entries
WHERE tier = ?2 AND namespace IN ({namespaces}) AND time >= ?3
    AND state IN ('answered', 'shadow') AND cost_usd IS NOT NULL
ORDER BY namespace, time, cost_usd - dismissed_usd
"""


@dataclass(frozen=True)
class SavingsEstimate:
    """Value with its 95 % interval, which is None if `n` is too small for one."""

    value: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class MasterOnlyCost:
    """Estimated cost if the master had answered every request. Its own answers and paid failures
    count at their actual cost. Each of the `estimated` requests that other tiers answered counts
    as the mean cost of the master's answers in the same namespace or, for the `pooled` ones, in all
    namespaces. Requests without a model, such as embeddings, do not count. Each `n` is the number
    of answers in these means. `usd` includes the servers of the master. `saved` is `usd` minus the
    amount spent and the cost of all servers."""

    usd: SavingsEstimate
    saved: SavingsEstimate
    estimated: int
    pooled: int


@dataclass(frozen=True)
class Savings:
    """Savings of one namespace, or of all. Requests that are not `answered` failed or were
    rejected. `master_only` is None without a priced answer of the master, `agreement` without
    shadow samples. `spent_usd` excludes `unpriced` requests. `servers_usd` is the cost of
    servers with a price per hour in the `hours` from the first to the last request of all
    namespaces; one namespace pays by its share of each tier's requests, or not at all if the
    savings `leaves_out_servers`. `lost_rows` count requests of all time, which are in no other
    number."""

    master: str
    namespace: str | None
    first: float | None
    last: float | None
    requests: int
    answered: int
    routes: tuple[Route, ...]
    spent_usd: float
    hours: float
    servers_usd: float
    leaves_out_servers: bool
    unpriced: int
    master_only: MasterOnlyCost | None
    agreement: ShadowQuality | None
    lost_rows: int


def savings(
    ledger: Ledger,
    *,
    namespace: str | None = None,
    since: float | None = None,
    master: str | None = None,
    pooled: bool = True,
) -> Savings:
    """Return the savings of one namespace, or of all. `since` is in unix seconds. Without `pooled`,
    the costs of other namespaces are not used. Blocks."""
    master = master or ledger.master() or MASTER
    since = since or 0.0
    reader = SavingsReader(ledger, since, namespace, master, pooled or namespace is None)
    routes = reader.routes()
    first, last = reader.period()
    spent = sum(route.cost_usd for route in routes)
    samples = reader.shadows()
    hours, servers = reader.servers()
    return Savings(
        master,
        namespace,
        first,
        last,
        sum(route.requests for route in routes if route.state not in NO_REQUESTS),
        sum(route.requests for route in routes if route.is_answer),
        routes,
        spent,
        hours,
        sum(servers.values()),
        not reader.pooled and any(ledger.hourly_prices().values()),
        sum(route.unpriced for route in routes),
        _master_only_cost(reader, spent, servers),
        shadow_quality(samples) if samples else None,
        ledger.total_lost(),
    )


def _master_only_cost(
    reader: SavingsReader, spent: float, servers: Mapping[str, float]
) -> MasterOnlyCost | None:
    answers, others = reader.master_costs(), reader.other_requests()
    if not answers:
        return None
    means, sizes = _means(answers), {name: costs.n for name, costs in answers.items()}
    # Used for namespaces in which the master has not answered.
    mean_of_all = sum((means[name] * n for name, n in sizes.items()), ZEROS) / sum(sizes.values())
    estimated = sum((count * means.get(name, mean_of_all) for name, count in others.items()), ZEROS)
    usd = estimated + reader.master_spending() + servers.get(reader.master, 0.0)
    pooled = sum(count for name, count in others.items() if name not in answers)
    interval = all(sizes.get(name, sum(sizes.values())) >= MIN_ANSWERS for name in others)
    n = sum(n for name, n in sizes.items() if pooled or not others or name in others)
    return MasterOnlyCost(
        _estimate(usd, n, interval=interval),
        _estimate(usd - spent - sum(servers.values()), n, interval=interval),
        sum(others.values()),
        pooled,
    )


def _means(answers: Mapping[str, AnswerCosts]) -> dict[str, Floats]:
    """Return an array for each namespace: the mean, then the means of bootstrap samples."""
    rng, means = np.random.default_rng(SEED), {}
    for name, costs in answers.items():
        n = costs.n
        if not costs.values:  # many answers: the bootstrap converges to the normal distribution
            error = costs.deviation / math.sqrt(n)
            resampled = costs.mean + rng.standard_normal(RESAMPLES) * error
        else:
            values, rows = np.asarray(costs.values, np.float64), max(1, BOOTSTRAP_SIZE // n)
            counts = [min(rows, RESAMPLES - done) for done in range(0, RESAMPLES, rows)]
            parts = [values[rng.integers(0, n, (count, n))].mean(axis=1) for count in counts]
            resampled = np.concatenate(parts)
        means[name] = np.concatenate([[costs.mean], resampled])
    return means


def _estimate(means: Floats, n: int, *, interval: bool) -> SavingsEstimate:
    """Return the estimate of an array from `_means`."""
    if not interval:
        return SavingsEstimate(float(means[0]), None, None, n)
    low, high = np.percentile(means[1:], [2.5, 97.5])
    return SavingsEstimate(float(means[0]), float(low), float(high), n)


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
        return self.state in ("answered", "replayed", "passed_through")


@dataclass(frozen=True)
class AnswerCosts:
    """Costs of the master's priced answers in one namespace in US dollars: number, mean and
    standard deviation, and each cost in `values` unless there are more than `MAX_EXACT_COSTS`."""

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
    pooled: bool = True

    def routes(self) -> tuple[Route, ...]:
        return tuple(Route(*row) for row in self._sums(ROUTES, self.namespace, self.master))

    def other_requests(self) -> dict[str, int]:
        """Return the number of requests of each namespace that the master did not answer."""
        return dict(self._sums(OTHER_REQUESTS, self.namespace, self.master))

    def master_spending(self) -> float:
        """Return the cost of the master's own requests, without shadow samples."""
        return sum(
            float(cost)
            for name, state, _, cost, _ in self._sums(MASTER_COSTS, self.master)
            if state != "shadow" and self.namespace in (None, name)
        )

    def master_costs(self) -> dict[str, AnswerCosts]:
        """Return the costs of the master's answers in each namespace; in the own one alone unless
        `pooled`."""
        sums = defaultdict[str, tuple[float, float, float]](lambda: (0, 0.0, 0.0))
        # Sorted: the bootstrap draws its samples in this order.
        for name, state, n, total, squares in sorted(self._sums(MASTER_COSTS, self.master)):
            if state in ("answered", "shadow") and (self.pooled or name == self.namespace):
                before = sums[name]
                sums[name] = (before[0] + n, before[1] + total, before[2] + squares)
        few = orjson.dumps(
            [name for name, (n, *_) in sums.items() if n <= MAX_EXACT_COSTS]
        ).decode()
        values = defaultdict[str, list[float]](list)
        statement = ANSWER_COSTS.format(namespaces=self.ledger.dialect.json_texts.format("?1"))
        for name, cost in self.ledger.read(statement, few, self.master, self.since):
            values[name].append(cost)
        return {name: _costs(*found, values[name]) for name, found in sums.items()}

    def period(self) -> tuple[float | None, float | None]:
        """Return the times of the first and the last entry."""
        where, values = "time >= ?1", tuple[object, ...]((self.since,))
        if self.namespace is not None:
            ((first, last),) = self._sums(DAYS_OF_NAMESPACE, self.namespace)
            if first is None:
                return None, None
            where = "time >= ?1 AND time < ?2 AND namespace = ?3"
            values = (max(first * DAY, self.since), (last + 1.0) * DAY, self.namespace)
        ((first, last),) = self.ledger.read(FIRST_AND_LAST.format(where=where), *values)
        return first, last

    def servers(self) -> tuple[float, dict[str, float]]:
        """Return the hours from the first to the last entry of all namespaces, and what the servers
        of each tier cost in them. A reader of one namespace that is not `pooled` sees no cost: its
        share would reveal the number of other requests."""
        prices = {name: usd for name, usd in self.ledger.hourly_prices().items() if usd}
        if not prices or not self.pooled:
            return 0.0, {}
        everyone = replace(self, namespace=None)
        first, last = everyone.period()
        hours = ((last or 0.0) - (first or 0.0)) / 3600
        shares = dict.fromkeys(prices, 1.0)
        if self.namespace is not None:
            own, of_all = _requests(self.routes()), _requests(everyone.routes())
            shares = {name: own[name] / max(1, of_all[name]) for name in prices}
        return hours, {name: usd * hours * shares[name] for name, usd in prices.items()}

    def shadows(self) -> list[AgreementPair]:
        """Return the comparisons of answers that clients got and that were drawn at random."""
        rows = self.ledger.read(SELECT_SHADOWS, self.since, self.namespace)
        return [
            AgreementPair(with_score, without_score, bool(was_shown), bool(found))
            for with_score, without_score, was_shown, found in rows
        ]

    def _sums(self, statement: str, *values: object) -> list[SqlRow]:
        whole = statement.format(sums=sums_since(self.ledger.dialect))
        return self.ledger.read(whole, *since_values(self.since), *values)


def _requests(routes: Sequence[Route]) -> Counter[str]:
    counts = Counter[str]()
    for route in routes:
        counts[route.tier] += route.requests
    return counts


def _costs(n: float, total: float, squares: float, values: Sequence[float]) -> AnswerCosts:
    if values:  # exact, unlike the rounded sums
        return AnswerCosts(len(values), float(np.mean(values)), float(np.std(values)), values)
    mean = total / n
    return AnswerCosts(int(n), mean, math.sqrt(max(0.0, squares / n - mean**2)))
