"""Report of an experiment: quality, cost and latency of its variants, with confidence sequences.

An ordinary 95 % interval is valid for one sample size that was fixed before. Repeated looks at it,
and stopping at a difference, make errors far more frequent. The intervals of a confidence sequence
contain the true mean at all times with 95 % probability: an experiment may be looked at and stopped
at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bottega._util.sql_tables import SqlRow
from bottega.errors import NotFoundError
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import CURRENT_RULES, REJECTED

Floats = NDArray[np.float64]
ALPHA = 0.05
MAX_BET = 0.5  # the paper's c
# Below this number of values the standard deviation is too uncertain for `mean_sequence`.
MIN_VALUES = 500
# Least number of values per squared skewness. If one request in a hundred costs a hundred times as
# much as the others, the squared skewness is 100: about ten such requests must have occurred.
# Chosen by simulation: without this limit, the intervals missed that mean in 8 % of the runs.
MIN_PER_SKEWNESS = 10
# Number of values at which `mean_sequence` is narrowest. Chosen by simulation: with 1,000, the
# intervals of costs with a skewed distribution missed the mean in up to 13 % of the runs.
TIGHTEST = 10_000

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


@dataclass(frozen=True)
class SequentialEstimate:
    """Mean of `n` values with its always-valid interval, which is None if `n` is too small."""

    value: float
    low: float | None
    high: float | None
    n: int


Estimator = Callable[[Floats, float], SequentialEstimate | None]


def bounded_sequence(values: Floats, alpha: float = ALPHA) -> tuple[Floats, Floats]:
    """Return the ends of the confidence sequence after each value, for values from 0 to 1 whose
    expectation, given all earlier values, is constant.

    The predictable plug-in empirical Bernstein sequence: theorem 2 of Waudby-Smith and Ramdas,
    Estimating means of bounded random variables by betting, JRSS B 86 (2024). It holds for every
    number of values, without assumptions about the distribution.
    """
    n = np.arange(1, len(values) + 1)
    means = (0.5 + np.cumsum(values)) / (n + 1)
    variances = (0.25 + np.cumsum((values - means) ** 2)) / (n + 1)
    # Bets depend on earlier values alone.
    mean_before = np.concatenate([[0.5], means[:-1]])
    variance_before = np.concatenate([[0.25], variances[:-1]])
    threshold = math.log(2 / alpha)
    bets = np.minimum(np.sqrt(2 * threshold / (variance_before * n * np.log1p(n))), MAX_BET)
    terms = (values - mean_before) ** 2 * (-np.log1p(-bets) - bets)  # 4 v times psi / 4
    total = np.cumsum(bets)
    center = np.cumsum(bets * values) / total
    reach = (threshold + np.cumsum(terms)) / total
    return np.maximum(center - reach, 0.0), np.minimum(center + reach, 1.0)


def mean_sequence(values: Floats, alpha: float = ALPHA) -> tuple[Floats, Floats]:
    """Return the ends of the asymptotic confidence sequence after each value, for values with a
    finite variance. They are infinite until the variance is known well enough: below `MIN_VALUES`
    and `MIN_PER_SKEWNESS`, and while all values are equal. It holds approximately.

    Theorem 2.2 of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, Time-uniform central limit
    theory and asymptotic confidence sequences, Annals of Statistics 52 (2024): Robbins' normal
    mixture with the estimated standard deviation.
    """
    n = np.arange(1, len(values) + 1)
    means = np.cumsum(values) / n
    # Relative to the first value: a large mean would lose the digits of a small variance.
    shifted = values - values[:1]
    first, second, third = (np.cumsum(shifted**power) / n for power in (1, 2, 3))
    variances = np.maximum(second - first**2, 0.0)
    third = third - 3 * first * second + 2 * first**3
    is_known = (n >= MIN_VALUES) & (variances > 0)
    is_known &= n * variances**3 >= MIN_PER_SKEWNESS * third**2
    rho = _rho_squared(alpha)
    factor = 2 * (n * rho + 1) / (n**2 * rho) * np.log(np.sqrt(n * rho + 1) / alpha)
    reach = np.where(is_known, np.sqrt(variances * factor), np.inf)
    return means - reach, means + reach


def bounded_estimate(values: Floats, alpha: float = ALPHA) -> SequentialEstimate | None:
    """Return the mean of values from 0 to 1 in their order, None without values."""
    if not len(values):
        return None
    low, high = bounded_sequence(values, alpha)
    return SequentialEstimate(float(values.mean()), float(low[-1]), float(high[-1]), len(values))


def mean_estimate(values: Floats, alpha: float = ALPHA) -> SequentialEstimate | None:
    """Return the mean of any values in their order, None without values."""
    if not len(values):
        return None
    mean, (low, high) = float(values.mean()), mean_sequence(values, alpha)
    if not np.isfinite(low[-1]):
        return SequentialEstimate(mean, None, None, len(values))
    return SequentialEstimate(mean, float(low[-1]), float(high[-1]), len(values))


def difference(
    one: SequentialEstimate | None, other: SequentialEstimate | None
) -> SequentialEstimate | None:
    """Return `other` minus `one`. If each interval is valid with probability 1 - alpha / 2, that of
    the difference is with 1 - alpha (union bound)."""
    if one is None or other is None:
        return None
    value, n = other.value - one.value, one.n + other.n
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return SequentialEstimate(value, None, None, n)
    return SequentialEstimate(value, other.low - one.high, other.high - one.low, n)


def _rho_squared(alpha: float) -> float:
    """Return the mixture's variance that is best for `TIGHTEST` values (the paper's appendix)."""
    log = -2 * math.log(alpha)
    return (log + math.log(log) + 1) / TIGHTEST


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
    Comparisons exclude replayed requests, but the comparison of ratings includes them. "agreement"
    covers the pairs that the rules decide, "undecided" is the share of the other pairs."""

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
