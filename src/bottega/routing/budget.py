"""As much of the master as the budget allows."""

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
PATIENCE = 50  # queries until a first call to the master counts as failed
RECENT = 10


class BudgetRouter:
    """A share of the queries to the master, adapted so that 1,000 queries cost `usd_per_1k` in all.

    `observe(trace)` must be told what each query cost: a recorder. The rate is the one at which the
    next queries would cost the target at recent prices, less what was spent too much before, plus
    what was saved. Both are evened out over about a quarter of `window` queries, and half a
    window's budget at most is saved up, so that a quiet night does not pay for a wild day.

    Simulated (20 streams each, request sizes lognormal with sigma 0.8, answers up to 32 queries
    late), any 2,000 queries cost within 10 % of their target where a call of the master costs five
    times a query's, within 15 % at ten times and 30 % where prices jump tenfold. At fifty times
    they are 40 calls, and cost from 45 % less to 25 % more. No 500 queries cost more than 2.2 times
    their target.

    It cannot spend less than the apprentice alone costs: then `too_small` is true, the log says so
    once, and what this costs beyond a window's budget is not paid back later. Nothing is kept over
    a restart but the settings.
    """

    def __init__(
        self, tiers: Sequence[Tier], usd_per_1k: float, *, window: int = 500, seed: int = 0
    ) -> None:
        if not (math.isfinite(usd_per_1k) and usd_per_1k > 0):
            raise SettingError(
                f"usd_per_1k is {usd_per_1k}",
                hint="set it to the US dollars that 1,000 queries may cost",
            )
        if window < 20:
            raise SettingError(f"window is {window}", hint="set it to 20 queries or more")
        self._apprentice, self._master = apprentice_and_master(tiers)
        self._target = usd_per_1k / 1000
        self._window = window
        self._even, self._most = window / 4, window / 2
        self._random = random.Random(seed)
        self._costs = {True: RecentMean(), False: RecentMean()}
        self._saved = 0.0
        self._summed = 0.0
        self._place = 1 - self._random.random()
        self._since_asked = PATIENCE
        self._told = False

    @property
    def rate(self) -> float:
        """The share of the next queries that go to the master."""
        master, apprentice = self._costs[True].value, self._costs[False].value or 0.0
        if master is None:
            return 0.0
        may_spend = self._target + self._saved / self._even
        if master <= apprentice:
            return 1.0
        return min(max((may_spend - apprentice) / (master - apprentice), 0.0), 1.0)

    @property
    def too_small(self) -> bool:
        """Whether even the cheaper of the two costs more than the budget."""
        known = [cost.value for cost in self._costs.values() if cost.value is not None]
        return len(known) == 2 and min(known) > self._target

    async def __call__(self, query: Query, /) -> Tier:
        if self._costs[True].value is None:
            return self._first()
        return self._master if self._drawn() else self._apprentice

    def _drawn(self) -> bool:
        """One master query in each unit of the summed rate, at a random place in it: the draws of a
        coin would scatter the spend of a dear master far more."""
        before, self._summed = self._summed, self._summed + self.rate
        drawn = before < self._place <= self._summed
        if self._summed >= 1:
            self._summed -= 1
            self._place = 1 - self._random.random()
            drawn = drawn or self._place <= self._summed
        return drawn

    def _first(self) -> Tier:
        """One query to the master to learn its price, and not another until that one must have
        failed."""
        self._since_asked += 1
        if self._since_asked <= PATIENCE:
            return self._apprentice
        self._since_asked = 0
        return self._master

    async def observe(self, trace: Trace, /) -> None:
        cost = trace.cost_usd
        if cost is None:
            raise SettingError(
                f"the price of {trace.reply.model!r} is not known, so no budget can be held",
                hint="pass price=PriceTable({model: TokenPrice(input, output)}) to the pipeline",
            )
        # A query that was escalated costs what sending it to the apprentice first has cost.
        to_master = trace.tier == self._master.name and not trace.dismissed
        if to_master or trace.dismissed or trace.tier == self._apprentice.name:
            self._costs[to_master].add(cost)
        self._account(self._target - cost, forgiven=not to_master)
        self._tell()

    def charge(self, usd: float) -> None:
        """Counts what was spent besides."""
        self._account(-usd, forgiven=True)

    def _account(self, change: float, *, forgiven: bool) -> None:
        """What could not be avoided is forgiven where the debt passes a window's budget."""
        floor = min(self._saved, -self._window * self._target)
        self._saved = min(self._saved + change, self._most * self._target)
        if forgiven:
            self._saved = max(self._saved, floor)

    def _tell(self) -> None:
        if self.too_small and not self._told:
            self._told = True
            log.warning(
                "the apprentice alone costs %.6f USD a query and the budget is %.6f: "
                "nothing goes to the master, and more than the budget is spent",
                self._costs[False].value,
                self._target,
            )


class RecentMean:
    """Of the last calls: plain at first, then exponential, so that it follows prices."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def add(self, cost: float) -> None:
        self._count = min(self._count + 1, RECENT)
        before = self.value or 0.0
        self.value = before + (cost - before) / self._count
