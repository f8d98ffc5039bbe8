"""How much an account may ask: requests per minute, and dollars per month."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from bottega.gateway.accounting.accounts import Account
from bottega.gateway.refusals import Refusal

SOON = 1.0


class Spending(Protocol):
    """In memory: asked with every request. US dollars of this calendar month, UTC."""

    def spent_this_month(self, account: str, /) -> float: ...

    def dearest_this_month(self, account: str, /) -> float: ...


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class Limiter:
    """A token bucket an account, which holds a minute's worth: a rested account may send a whole
    minute's requests at once. To be used from one thread; buckets are this process's own.

    A request under way reserves what the account's dearest one of the month has cost. One is
    admitted while what is spent and reserved is below the budget, so spending ends below the budget
    plus what that last one costs, plus, for each other one under way, what it costs beyond its
    reservation: one request too many, except while a dearer one than any before is under way.
    """

    def __init__(self, spending: Spending, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._spending = spending
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self._under_way: Counter[str] = Counter()

    def admit(self, account: Account) -> float | None:
        """None: go on, and call `release` when it is over. Else the seconds to wait. Raises the
        `Refusal` of a spent budget."""
        wait = self._wait_for_money(account)
        if wait is None:
            wait = self._wait_for_turn(account)
        if wait is None and account.usd_per_month is not None:
            self._under_way[account.id] += 1
        return wait

    def release(self, account: Account) -> None:
        """After what was admitted has its entry in the ledger, or else its cost counts nowhere."""
        if account.usd_per_month is not None:
            self._under_way[account.id] -= 1
            if self._under_way[account.id] <= 0:
                del self._under_way[account.id]

    def _wait_for_money(self, account: Account) -> float | None:
        budget = account.usd_per_month
        if budget is None:
            return None
        spent = self._spending.spent_this_month(account.id)
        if spent >= budget:
            raise _spent(budget)
        dearest = self._spending.dearest_this_month(account.id)
        reserved = self._under_way[account.id] * dearest
        return SOON if spent + reserved >= budget else None

    def _wait_for_turn(self, account: Account) -> float | None:
        limit = account.requests_per_minute
        if limit is None:
            return None
        now = self._clock()
        bucket = self._buckets.setdefault(account.id, _Bucket(limit, now))
        bucket.tokens = min(limit, bucket.tokens + (now - bucket.at) * limit / 60)
        bucket.at = now
        if bucket.tokens < 1:
            return (1 - bucket.tokens) * 60 / limit
        bucket.tokens -= 1
        return None


def _spent(budget: float) -> Refusal:
    return Refusal(
        f"this key's budget of {budget:g} USD for this month is spent",
        status=429,
        type="insufficient_quota",
        code="insufficient_quota",
        headers={"x-should-retry": "false"},
        hint="it begins anew with the next month (UTC); ask the operator for more",
    )
