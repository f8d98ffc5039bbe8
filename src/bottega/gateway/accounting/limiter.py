"""Limits of an account: concurrency, tiers, namespaces, request rate and monthly cost."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from bottega.gateway.accounting.ledger_schema import Account
from bottega.openai_api.errors import ApiError

# Tolerates rounding of float sums: 0.1 + 0.2 must fit into a budget of 0.3.
ROUNDING = 1 + 1e-9


class Spending(Protocol):
    """Spending of each account in US dollars in this calendar month, UTC. Read at every request,
    so it must not block."""

    def spent_this_month(self, account: str, /) -> float: ...


@dataclass(slots=True)
class _TokenBucket:
    tokens: float
    at: float


class AccountBudgetError(ApiError):
    """The key's monthly budget does not allow another upstream call."""


class LimitsUnavailableError(AccountBudgetError):
    """A server that the limits of the key need does not answer."""


class Limiter(Protocol):
    """Token bucket and monthly budget of each account. A bucket holds a minute's requests: a rested
    account may send them all at once. Use it from one event loop.

    Every upstream call first reserves its expected cost. It is rejected unless the amount spent,
    the reservations of other requests and its own fit into the budget. A request is always admitted
    if no other request has a reservation and some budget is left. As long as no call costs more
    than its reservation, spending exceeds the budget by less than the cost of one request.
    """

    async def admit(self, account: Account) -> float | None:
        """Return None for an admitted request, else the seconds to wait. Raises
        `AccountBudgetError`."""
        ...

    async def reserve(self, reservation: Reservation, usd: float) -> None: ...

    def release(self, reservation: Reservation) -> None: ...

    def reservation(self, account: Account) -> Reservation:
        return Reservation(self, account)


class LocalLimiter(Limiter):
    """Limiter of one process, which keeps buckets and reservations in memory."""

    def __init__(self, spending: Spending, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._spending = spending
        self._clock = clock
        self._buckets: dict[str, _TokenBucket] = {}
        self._reservations: defaultdict[str, set[Reservation]] = defaultdict(set)

    async def admit(self, account: Account) -> float | None:
        # First: a request whose budget is spent takes no token from the bucket.
        if account.usd_per_month is not None:
            self._check_spent(account, 0.0)
        if (limit := account.requests_per_minute) is None:
            return None
        now = self._clock()
        bucket = self._buckets.setdefault(account.id, _TokenBucket(limit, now))
        bucket.tokens = min(limit, bucket.tokens + (now - bucket.at) * limit / 60)
        bucket.at = now
        if bucket.tokens < 1:
            return (1 - bucket.tokens) * 60 / limit
        bucket.tokens -= 1
        return None

    async def reserve(self, reservation: Reservation, usd: float) -> None:
        account, budget = reservation.account, reservation.account.usd_per_month
        if budget is None:
            return
        # Paid calls of requests in progress have no ledger entry yet: add those of this request
        # here, and those of others below through `usd`.
        spent = self._check_spent(account, reservation.paid)
        others = sum(one.usd for one in self._reservations[account.id] if one is not reservation)
        # Without other reservations any call is admitted: else a large one would never fit.
        if others > 0 and spent + others + usd > budget * ROUNDING:
            raise budget_reserved(account)
        reservation.reserved = usd
        self._reservations[account.id].add(reservation)

    def release(self, reservation: Reservation) -> None:
        self._reservations[reservation.account.id].discard(reservation)
        if not self._reservations[reservation.account.id]:
            del self._reservations[reservation.account.id]

    def _check_spent(self, account: Account, paid: float) -> float:
        spent = self._spending.spent_this_month(account.id) + paid
        if account.usd_per_month is not None and spent >= account.usd_per_month:
            raise budget_spent(account)
        return spent


def budget_reserved(account: Account) -> AccountBudgetError:
    return AccountBudgetError(
        "this key's other requests have reserved the rest of its budget of"
        f" {account.usd_per_month:g} USD",
        status=429,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": "1", "retry-after-ms": "1000"},
        hint="wait until they end, or send a lower max_tokens to reserve less",
    )


def budget_spent(account: Account) -> AccountBudgetError:
    return AccountBudgetError(
        f"this key's budget of {account.usd_per_month:g} USD for this month is spent",
        status=429,
        type="insufficient_quota",
        code="insufficient_quota",
        headers={"x-should-retry": "false"},
        hint="wait for the next month (UTC), or ask the operator for a higher budget",
    )


class Reservation:
    """Reservation of one request in its account's budget: `reserved` for the upstream call in
    progress and `paid` for earlier ones, in US dollars. Call `release` once the ledger entry of the
    request exists, which then counts instead."""

    def __init__(self, limiter: Limiter, account: Account) -> None:
        self.account = account
        self.reserved = 0.0
        self.paid = 0.0
        self._limiter = limiter

    @property
    def has_budget(self) -> bool:
        return self.account.usd_per_month is not None

    @property
    def usd(self) -> float:
        return self.reserved + self.paid

    async def reserve(self, usd: float) -> None:
        """Reserve the expected cost of the next upstream call. Raises `AccountBudgetError` if it
        does not fit."""
        await self._limiter.reserve(self, usd)

    def settle(self, usd: float) -> None:
        """Replace the reserved amount with the cost of the call in US dollars, 0 if it failed."""
        self.reserved, self.paid = 0.0, self.paid + usd

    def pay(self, usd: float) -> None:
        """Count the cost of one of several calls that were reserved together."""
        self.reserved, self.paid = max(0.0, self.reserved - usd), self.paid + usd

    def release(self) -> None:
        """End the reservation."""
        self._limiter.release(self)

    def sibling(self) -> Reservation:
        """Return a reservation for another request of the same account, such as a shadow sample."""
        return Reservation(self._limiter, self.account)
