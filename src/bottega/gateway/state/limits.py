"""Limits of keys across all gateways."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from secrets import token_hex
from typing import Literal, NamedTuple, Protocol

from bottega._util.batch_writer import OutageLog
from bottega.errors import StoreError
from bottega.gateway.accounting.access import (
    ROUNDING,
    AccountBudgetError,
    Limiter,
    LimitsUnavailableError,
    Reservation,
    budget_reserved,
    budget_spent,
)
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import Account

log = logging.getLogger(__name__)

# A reservation expires unless its gateway renews it, so it ends with the process.
LEASE_SECONDS = 10.0
RENEW_SECONDS = 0.4
# After a server has lost its data, gateways renew their reservations before any new one is made.
GRACE_SECONDS = 3 * RENEW_SECONDS
MAX_GRACE_WAITS = 4
SETTLE_SECONDS = 0.5

VerdictKind = Literal["ok", "wait", "grace", "spent", "reserved"]


class Verdict(NamedTuple):
    """Decision on a request: admitted, or the reason why not. `seconds` is the time to wait for
    `wait` (the rate) and `grace` (gateways are renewing their reservations)."""

    kind: VerdictKind
    seconds: float = 0.0


class LimitRequest(NamedTuple):
    """Request of an account. `paid` is the cost of its calls so far and `usd` the cost to reserve,
    None at admission."""

    account: Account
    month: str
    reservation: str = ""
    paid: float = 0.0
    usd: float | None = None


class Renewal(NamedTuple):
    """Reservation of a running request, in US dollars with the cost of its calls so far."""

    account: str
    reservation: str
    usd: float


class LimitStore(Protocol):
    """Token buckets and reservations of all gateways. All methods raise `StoreError`."""

    async def decide(self, request: LimitRequest, /) -> Verdict:
        """Check the limits in one atomic step. Take a token at admission, else store the
        reservation."""
        ...

    async def settle(self, account: str, month: str, reservation: str, spent: float, /) -> None:
        """End a reservation whose cost is committed. `spent` is the account's committed spending,
        including this cost. Spending only grows, so the store keeps the largest value, and a value
        that arrives late or twice changes nothing."""
        ...

    async def renew(self, reservations: Sequence[Renewal], /) -> None: ...


class SharedLimiter(Limiter):
    """Limiter across several gateways. Reservations are leases: the gateway renews those of its
    running requests, and they end with the request or the process."""

    def __init__(
        self, store: LimitStore, ledger: Ledger, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._store, self._ledger, self._clock = store, ledger, clock
        self._owner, self._count = token_hex(8), 0
        self._reservations: dict[str, Reservation] = {}
        self._ids: dict[Reservation, str] = {}
        self._releases: dict[Reservation, asyncio.Task[None]] = {}
        self._outage = OutageLog(log)

    async def admit(self, account: Account) -> float | None:
        if account.requests_per_minute is None and account.usd_per_month is None:
            return None
        verdict = await self._decide(LimitRequest(account, self._month()))
        return verdict.seconds if verdict.kind == "wait" else None

    async def reserve(self, reservation: Reservation, usd: float) -> None:
        if reservation.account.usd_per_month is None:
            return
        self._ledger.with_budgets.add(reservation.account.id)
        # Before the first await, so a reservation ends even if its caller is cancelled.
        id = self._id(reservation)
        reservation.reserved = usd
        try:
            await self._decide(
                LimitRequest(reservation.account, self._month(), id, reservation.paid, usd)
            )
        except BaseException:
            reservation.reserved = 0.0
            raise
        self._reservations[id] = reservation

    def release(self, reservation: Reservation) -> None:
        """End the reservation in the background, once the ledger entry is durable."""
        if reservation in self._ids and reservation not in self._releases:
            task = asyncio.get_running_loop().create_task(self._settle(reservation))
            self._releases[reservation] = task
            task.add_done_callback(lambda _: self._releases.pop(reservation, None))

    def release_task(self, reservation: Reservation | None) -> asyncio.Task[None] | None:
        """Return the task that ends the reservation, None without one."""
        return None if reservation is None else self._releases.get(reservation)

    async def renew(self) -> None:
        """Renew the reservations of this process. Raises `StoreError`."""
        held = [Renewal(one.account.id, id, one.usd) for id, one in self._reservations.items()]
        if not held:
            return
        await self._store.renew(held)
        for account, id, _ in held:
            if id not in self._reservations:  # it has ended, and the renewal may have recreated it
                await self._store.settle(account, self._month(), id, 0.0)

    async def aclose(self) -> None:
        """Wait briefly for reservations that are being released, then cancel the rest."""
        if self._releases:
            await asyncio.wait(self._releases.values(), timeout=2 * SETTLE_SECONDS)
        for task in list(self._releases.values()):
            task.cancel()

    def _id(self, reservation: Reservation) -> str:
        if reservation not in self._ids:
            self._count += 1
            self._ids[reservation] = f"{self._owner}-{self._count}"
        return self._ids[reservation]

    def _month(self) -> str:
        return self._ledger.month_at(self._clock())

    async def _decide(self, request: LimitRequest) -> Verdict:
        account = request.account
        if account.usd_per_month is not None and self._ledger.is_failing:
            # The other gateways do not know spending that is not committed.
            raise limits_unavailable(account)
        for _ in range(MAX_GRACE_WAITS):
            verdict = await self._answer(account, self._store.decide(request))
            if verdict.kind != "grace":
                break
            await asyncio.sleep(verdict.seconds)
        match verdict.kind:
            case "spent":
                raise budget_spent(account)
            case "reserved":
                raise budget_reserved(account)
            case "grace":
                raise limits_unavailable(account)
        return verdict

    async def _answer(self, account: Account, verdict: Awaitable[Verdict]) -> Verdict:
        try:
            found = await verdict
        except StoreError as error:
            self._outage.failed("the limits of keys cannot be checked: %s", error)
            raise limits_unavailable(account) from error
        self._outage.ended("the limits of keys can be checked again")
        return found

    async def _settle(self, reservation: Reservation) -> None:
        """Commit the entry, retrying until it is durable, then end the reservation. If ending it
        fails, the reservation expires."""
        while True:
            if await self._ledger.durable() is None:
                break
            await asyncio.sleep(SETTLE_SECONDS)
        id = self._ids.pop(reservation)
        self._reservations.pop(id, None)  # from here on it is not renewed
        account = reservation.account.id
        spent = self._ledger.committed_this_month(account)
        try:
            await self._store.settle(account, self._month(), id, spent)
        except StoreError as error:
            self._outage.failed("reservations cannot be ended and will expire: %s", error)


def limits_unavailable(account: Account) -> AccountBudgetError:
    return LimitsUnavailableError(
        "the limits of this key cannot be checked",
        status=503,
        type="server_error",
        code="limits_unavailable",
        headers={"retry-after": "1"},
        hint="try again in a moment; the gateway's log names the server that does not answer",
    )


def with_tolerance(budget: float) -> float:
    """Return the budget with a tolerance for rounding errors."""
    return budget * ROUNDING
