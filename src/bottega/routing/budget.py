"""Router that keeps spending on a budget."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence

from bottega.errors import SettingError
from bottega.protocols import Tier
from bottega.routing.fixed import apprentice_and_master
from bottega.types import Query, Trace

log = logging.getLogger(__name__)
PATIENCE = 50  # queries until the first call to the master counts as failed
RECENT = 10


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
        if window < 20:
            raise SettingError(
                f"window must be at least 20 queries, got {window}", hint="set window=500"
            )
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
            return self._first()
        return self._master if self._is_masters_turn() else self._apprentice

    def _is_masters_turn(self) -> bool:
        """Whether this query goes to the master: one query in each unit of the summed rate, at a
        random position in the unit. Independent sampling would scatter the spending on an expensive
        master far more."""
        before, self._rate_sum = self._rate_sum, self._rate_sum + self.rate
        chosen = before < self._position <= self._rate_sum
        if self._rate_sum >= 1:
            self._rate_sum -= 1
            self._position = 1 - self._random.random()
            chosen = chosen or self._position <= self._rate_sum
        return chosen

    def _first(self) -> Tier:
        """Return the master once, to learn its price, and again only after that call must have
        failed."""
        self._since_master += 1
        if self._since_master <= PATIENCE:
            return self._apprentice
        self._since_master = 0
        return self._master

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
        self._warn()

    def charge(self, usd: float) -> None:
        """Count other spending."""
        self._account(-usd, forgiven=True)

    def _account(self, change: float, *, forgiven: bool) -> None:
        """Add a change to the savings. Unavoidable debt beyond a window's budget is forgiven."""
        floor = min(self._saved, -self._window * self._target)
        self._saved = min(self._saved + change, self._max_saved * self._target)
        if forgiven:
            self._saved = max(self._saved, floor)

    def _warn(self) -> None:
        if self.too_small and not self._warned:
            self._warned = True
            log.warning(
                "the apprentice alone costs %.6f USD per query and the budget is %.6f: "
                "no query goes to the master, and spending exceeds the budget",
                self._costs[False].value,
                self._target,
            )


class RecentMean:
    """Mean of recent costs: arithmetic at first, then exponential to follow price changes."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def add(self, cost: float) -> None:
        self._count = min(self._count + 1, RECENT)
        before = self.value or 0.0
        self.value = before + (cost - before) / self._count
