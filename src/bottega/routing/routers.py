"""Routers by coverage, budget, chance or a fixed tier, and escalation of uncertain answers."""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from bottega.errors import SettingError, check_count, check_fraction
from bottega.protocols import Recorder, Retriever, Router, Tier
from bottega.types import Answer, Query, Trace

STEP = 0.02
log = logging.getLogger(__name__)
PATIENCE = 50  # queries until the first call to the master counts as failed
RECENT = 10


def apprentice_and_master(tiers: Sequence[Tier]) -> tuple[Tier, Tier]:
    """Return the first tier (the cheapest) and the last one (the most expensive)."""
    check_tiers(tiers)
    return tiers[0], tiers[-1]


def check_tiers(tiers: Sequence[Tier]) -> tuple[Tier, ...]:
    """Return the tiers. Raise `SettingError` for fewer than two or for duplicate names."""
    names = [tier.name for tier in tiers]
    if len(set(names)) < len(names) or len(names) < 2:
        raise SettingError(
            f"tiers must be two or more with different names, got {names}",
            hint="pass at least two tiers with different names, the cheapest first",
        )
    return tuple(tiers)


class ColdStartRouter:
    """Router that sends the first `n` queries to the master and all others through `then`.

    The cold start of Cache-of-Thought: the cache is filled before the apprentice uses it. Traces
    and costs are passed on to `then`. Where several processes fill one cache, `claim` counts the
    queries of all of them: it returns False once none is left.
    """

    def __init__(
        self,
        n: int,
        master: Tier,
        then: Router,
        claim: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self._left = n
        self._master = replace(master, reason="cold start")
        self._then = then
        self._claim = claim

    async def __call__(self, query: Query, /) -> Tier:
        if self._left > 0:
            self._left -= 1
            if self._claim is None or await self._claim():
                return self._master
            self._left = 0
        return await self._then(query)

    async def observe(self, trace: Trace, /) -> None:
        """Pass the trace on to `then` if it has a method `observe`."""
        learn: Recorder | None = getattr(self._then, "observe", None)
        if learn is not None:
            await learn(trace)

    def charge(self, usd: float) -> None:
        """Pass the cost on to `then` if it has a method `charge`."""
        spend: Callable[[float], None] | None = getattr(self._then, "charge", None)
        if spend is not None:
            spend(usd)


class RandomRouter:
    """Router that samples a tier for each query, seeded, in the order of the queries.

    `master_rate` is the last tier's probability, and the other tiers share the rest equally; or it
    is one probability for each tier, with the sum 1. Raises `SettingError`.
    """

    def __init__(
        self, tiers: Sequence[Tier], master_rate: float | Sequence[float], seed: int = 0
    ) -> None:
        if isinstance(master_rate, int | float):
            others = (1 - master_rate) / max(1, len(tiers) - 1)
            shares = [others] * (len(tiers) - 1) + [float(master_rate)]
        else:
            shares = list(master_rate)
        valid = len(shares) == len(tiers) and all(0 <= share <= 1 for share in shares)
        if not valid or not math.isclose(sum(shares), 1):
            raise SettingError(
                f"master_rate must be a probability, or one for each of {len(tiers)} tiers, got"
                f" {master_rate}",
                hint="set it between 0 and 1, or pass one probability for each tier with the sum 1",
            )
        self._tiers = [
            replace(tier, reason=f"random share {share:g}")
            for tier, share in zip(tiers, shares, strict=True)
        ]
        self._shares = shares
        self._rng = random.Random(seed)

    async def __call__(self, query: Query, /) -> Tier:
        return self._rng.choices(self._tiers, self._shares)[0]


class CoverageRouter:
    """Router that uses the apprentice if the cache has a similar example, else the master.

    With `min_similarity`, the nearest example must have that score (the scale depends on the
    retriever). With `master_rate`, about that fraction of the queries goes to the master: those
    whose nearest example is farthest, compared with the last `window` queries. The threshold is
    corrected after each query (adaptive conformal inference, Gibbs and Candès, NeurIPS 2021): over
    n queries of any stream, the fraction is within 51 / n of the rate. Queries without any example
    go to the master in addition.

    Pass the retriever of the demonstrations in a `SharedRetriever` to search only once per query.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        retrieve: Retriever,
        min_similarity: float | None = None,
        master_rate: float | None = None,
        *,
        window: int = 300,
        seed: int = 0,
    ) -> None:
        if (min_similarity is None) == (master_rate is None):
            raise SettingError(
                "coverage needs exactly one of min_similarity and master_rate, got"
                f" min_similarity={min_similarity} and master_rate={master_rate}",
                hint="pass one of the two",
            )
        self._apprentice, self._master = apprentice_and_master(tiers)
        self._retrieve = retrieve
        self._min_similarity = min_similarity
        self._rate = check_fraction("master_rate", master_rate or 0.0)
        self._threshold = self._rate
        self._last: deque[float] = deque(maxlen=window)
        self._random = random.Random(seed)

    async def __call__(self, query: Query, /) -> Tier:
        found = await self._retrieve(query, 1)
        score = found[0].score if found else None
        if self._min_similarity is None:
            covered, reason = self._coverage_by_rank(score)
        else:
            covered = score is not None and score >= self._min_similarity
            reason = f"{_relation(covered)} threshold {self._min_similarity:g}"
        reason = "no example found" if score is None else f"similarity {score:.3f} {reason}"
        return replace(self._apprentice if covered else self._master, reason=reason)

    def _coverage_by_rank(self, score: float | None) -> tuple[bool, str]:
        """Return whether the cache covers a query, and a text for the reason."""
        rank = -1.0 if score is None else self._rank(score)
        covered = score is not None and rank >= self._threshold
        reason = (
            f"higher than {100 * rank:.0f} % of recent ones, {_relation(covered)} threshold"
            f" {100 * self._threshold:.0f} %"
        )
        self._threshold += STEP * (self._rate - (not covered))
        # A long time without examples must not be followed by a long time without the master.
        self._threshold = min(max(self._threshold, -STEP), 1 + STEP)
        if score is not None:
            self._last.append(score)
        return covered, reason

    def _rank(self, score: float) -> float:
        """Return the fraction of recent scores that are lower. Ties are broken at random: in
        some caches every nearest example is a copy."""
        lower = sum(other < score for other in self._last)
        equal = sum(other == score for other in self._last)
        return (lower + self._random.random() * (equal + 1)) / (len(self._last) + 1)


def _relation(covered: bool) -> str:
    return "at or above" if covered else "below"


class ConfidenceEscalation:
    """Escalation to the next tier if the answer is invalid or its confidence is less than
    `min_confidence`.

    `tiers` are two or more, the cheapest first. The parser provides the confidence: the one that
    the model states, or the probability of the whole reply, which is small for every long text. For
    answers with reasoning, sample several and let the pipeline choose by `most_frequent`: the
    confidence is then the fraction of samples that agree (self-consistency). A valid answer without
    confidence is kept, which is logged once for each tier.

    Other tiers, such as one that a client requested by name, are never escalated.
    """

    def __init__(self, tiers: Sequence[Tier], min_confidence: float = 0.7) -> None:
        names = [tier.name for tier in check_tiers(tiers)]
        self._next = dict(zip(names, tiers[1:], strict=False))
        self._min_confidence = check_fraction("min_confidence", min_confidence)
        self._warned: set[str] = set()

    async def __call__(self, query: Query, tier: Tier, answer: Answer, /) -> Tier | None:
        better = self._next.get(tier.name)
        if better is None:
            return None
        if answer.valid and answer.confidence is None:
            if tier.name not in self._warned:
                self._warned.add(tier.name)
                log.warning(
                    "answers of %r have no confidence: valid ones are kept; request"
                    " log-probabilities, or sample several and choose by most_frequent",
                    tier.name,
                )
            return None
        if not answer.valid or answer.confidence is None:
            return replace(better, reason=f"escalated from {tier.name}: invalid answer")
        if answer.confidence >= self._min_confidence:
            return None
        found = f"confidence {answer.confidence:.2f} below {self._min_confidence:g}"
        return replace(better, reason=f"escalated from {tier.name}: {found}")


class BudgetRouter:
    """Router that adapts the master's share of the queries to a cost of `usd_per_1k` per 1,000.

    Pass each trace to `observe`, which is a recorder. The rate is chosen for the next queries to
    cost the target at recent prices, minus earlier overspending and plus earlier savings. Both are
    spread over about a quarter of `window` queries. At most half a window's budget is saved, which
    limits the spending after a quiet period.

    In simulations (20 streams each, lognormal request sizes with sigma 0.8, answers up to 32
    queries late), any 2,000 queries cost within 10 % of the target if a call to the master costs
    five times the budget of a query, within 15 % at ten times, and within 30 % if prices jump
    tenfold. At fifty times, 2,000 queries are 40 calls and cost 45 % less to 25 % more. No 500
    queries cost more than 2.2 times their target.

    The router cannot spend less than the apprentice alone costs. `too_small` is then true, one
    warning is logged, and spending beyond a window's budget is not compensated later. Only the
    settings survive a restart.
    """

    def __init__(
        self, tiers: Sequence[Tier], usd_per_1k: float, *, window: int = 500, seed: int = 0
    ) -> None:
        if not (math.isfinite(usd_per_1k) and usd_per_1k > 0):
            raise SettingError(
                f"usd_per_1k must be above 0, got {usd_per_1k}",
                hint="set usd_per_1k to the budget of 1,000 queries in US dollars",
            )
        check_count("window", window, 20)
        self._apprentice, self._master = apprentice_and_master(tiers)
        self._target = usd_per_1k / 1000
        self._window = window
        self._horizon, self._max_saved = window / 4, window / 2
        self._random = random.Random(seed)
        self._costs = {True: RecentMean(), False: RecentMean()}
        self._saved = 0.0
        self._rate_sum = 0.0
        self._position = 1 - self._random.random()
        self._since_master = PATIENCE
        self._warned = False

    @property
    def rate(self) -> float:
        """Return the fraction of the next queries that go to the master."""
        master, apprentice = self._costs[True].value, self._costs[False].value or 0.0
        if master is None:
            return 0.0
        may_spend = self._target + self._saved / self._horizon
        if master <= apprentice:
            return 1.0
        return min(max((may_spend - apprentice) / (master - apprentice), 0.0), 1.0)

    @property
    def too_small(self) -> bool:
        """Whether the cheaper tier alone costs more than the budget."""
        costs = [cost.value for cost in self._costs.values() if cost.value is not None]
        return len(costs) == 2 and min(costs) > self._target

    async def __call__(self, query: Query, /) -> Tier:
        if self._costs[True].value is None:
            # Ask the master once, to learn its price; again only after that call must have failed.
            self._since_master += 1
            if self._since_master <= PATIENCE:
                return replace(self._apprentice, reason="the master's price is not known yet")
            self._since_master = 0
            return replace(self._master, reason="first call to the master, to learn its price")
        rate = self.rate
        tier = self._master if self._is_masters_turn(rate) else self._apprentice
        within = f"within budget: {100 * rate:.1f} % of queries go to the master"
        return replace(tier, reason=within if rate else "over budget")

    def _is_masters_turn(self, rate: float) -> bool:
        """Whether this query goes to the master: one query in each unit of the summed rate, at a
        random position in the unit. Independent sampling would scatter the spending on an expensive
        master far more."""
        before, self._rate_sum = self._rate_sum, self._rate_sum + rate
        chosen = before < self._position <= self._rate_sum
        if self._rate_sum >= 1:
            self._rate_sum -= 1
            self._position = 1 - self._random.random()
            chosen = chosen or self._position <= self._rate_sum
        return chosen

    async def observe(self, trace: Trace, /) -> None:
        """Count the cost of an answered query. Raises `SettingError` if its price is unknown."""
        cost = trace.cost_usd
        if cost is None:
            raise SettingError(
                f"the price of {trace.reply.model!r} is unknown and the budget needs it",
                hint="pass price=PriceTable({model: TokenPrice(input, output)}) to the pipeline",
            )
        # The cost of an escalated query is a cost of routing it to the apprentice first.
        to_master = trace.tier == self._master.name and not trace.dismissed
        if to_master or trace.dismissed or trace.tier == self._apprentice.name:
            self._costs[to_master].add(cost)
        self._account(self._target - cost, forgiven=not to_master)
        if self.too_small and not self._warned:
            self._warned = True
            log.warning(
                "the apprentice alone costs %.6f USD per query and the budget is %.6f: "
                "no query goes to the master, and spending exceeds the budget",
                self._costs[False].value,
                self._target,
            )

    def charge(self, usd: float) -> None:
        """Count other spending."""
        self._account(-usd, forgiven=True)

    def _account(self, change: float, *, forgiven: bool) -> None:
        """Add a change to the savings. Unavoidable debt beyond a window's budget is forgiven."""
        floor = min(self._saved, -self._window * self._target)
        self._saved = min(self._saved + change, self._max_saved * self._target)
        if forgiven:
            self._saved = max(self._saved, floor)


class RecentMean:
    """Mean of recent costs: arithmetic at first, then exponential to follow price changes."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def add(self, cost: float) -> None:
        self._count = min(self._count + 1, RECENT)
        before = self.value or 0.0
        self.value = before + (cost - before) / self._count
