from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from bottega.gateway.accounting.access import AccountBudgetError, LocalLimiter, Reservation
from bottega.gateway.accounting.ledger_schema import Account
from bottega.openai_api.errors import ApiError


@dataclass
class SpendingStub:
    """Ledger stub with fixed monthly costs."""

    costs: list[float] = field(default_factory=list)

    def spent_this_month(self, account: str, /) -> float:
        return sum(self.costs)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


async def test_account_without_limits_is_always_admitted() -> None:
    limiter = LocalLimiter(SpendingStub([1e9]))
    assert {await limiter.admit(Account("a", "free")) for _ in range(10_000)} == {None}


async def test_requests_per_minute_are_limited() -> None:
    clock = Clock()
    limiter = LocalLimiter(SpendingStub(), clock=clock)
    account, other = (Account(id, id, requests_per_minute=30) for id in "ab")
    assert [await limiter.admit(account) for _ in range(30)] == [None] * 30
    assert await limiter.admit(account) == pytest.approx(2.0)
    assert await limiter.admit(other) is None
    clock.now += 1.5
    assert await limiter.admit(account) == pytest.approx(0.5)
    clock.now += 0.5
    assert await limiter.admit(account) is None
    assert await limiter.admit(account) == pytest.approx(2.0)
    clock.now += 3600
    assert [await limiter.admit(account) for _ in range(30)] == [None] * 30
    assert await limiter.admit(account) is not None


async def test_waiting_the_returned_time_is_enough() -> None:
    clock, draw = Clock(), random.Random(0)
    limiter = LocalLimiter(SpendingStub(), clock=clock)
    account = Account("a", "a", requests_per_minute=7)
    for _ in range(200):
        wait = await limiter.admit(account)
        if wait is not None:
            clock.now += wait + 1e-9
            assert await limiter.admit(account) is None
        clock.now += draw.uniform(0, 10)


async def test_spent_budget_has_its_own_error() -> None:
    budget = SpendingStub([0.6])
    limiter, account = LocalLimiter(budget), Account("a", "a", usd_per_month=1.0)
    assert await limiter.admit(account) is None
    budget.costs.append(0.4)
    with pytest.raises(ApiError, match="1 USD for this month is spent") as raised:
        await limiter.admit(account)
    error = raised.value
    assert (error.status, error.code, error.type) == (429, *["insufficient_quota"] * 2)
    assert error.headers == {"x-should-retry": "false"}


async def test_a_reservation_counts_until_it_is_released() -> None:
    limiter, account = LocalLimiter(SpendingStub([0.1])), Account("a", "a", usd_per_month=0.4)
    reservations = [limiter.reservation(account) for _ in range(4)]
    for reservation in reservations[:3]:
        await reservation.reserve(0.1)  # 0.1 + 3 * 0.1: exactly the budget
    with pytest.raises(AccountBudgetError, match="other requests have reserved the rest") as raised:
        await reservations[3].reserve(0.01)
    assert raised.value.headers["retry-after"] == "1"
    reservations[0].release()  # for example an exact repeat
    await reservations[3].reserve(0.1)


async def test_reservation_is_replaced_by_the_actual_cost() -> None:
    limiter, account = LocalLimiter(SpendingStub()), Account("a", "a", usd_per_month=1.0)
    first, second = limiter.reservation(account), limiter.reservation(account)
    await first.reserve(0.9)
    first.settle(0.2)
    await second.reserve(0.8)
    with pytest.raises(AccountBudgetError):
        await first.reserve(0.1)  # fallback to another tier: 0.2 + 0.8 + 0.1
    assert first.usd == pytest.approx(0.2)
    second.settle(0.0)  # it failed
    await first.reserve(0.8)


async def test_single_request_is_always_admitted() -> None:
    limiter, account = LocalLimiter(SpendingStub([0.9])), Account("a", "a", usd_per_month=1.0)
    alone = limiter.reservation(account)
    await alone.reserve(50.0)
    with pytest.raises(AccountBudgetError):
        await limiter.reservation(account).reserve(0.01)
    await limiter.reservation(Account("b", "b", usd_per_month=1.0)).reserve(0.1)
    alone.release()
    await limiter.reservation(account).reserve(0.01)


async def test_paid_calls_count_before_the_ledger_entry() -> None:
    limiter, account = LocalLimiter(SpendingStub([0.9])), Account("a", "a", usd_per_month=1.0)
    reservation = limiter.reservation(account)
    await reservation.reserve(0.1)
    reservation.settle(0.1)
    with pytest.raises(AccountBudgetError, match="is spent"):
        await reservation.reserve(0.001)


async def test_no_budget_reserves_nothing() -> None:
    limiter, account = LocalLimiter(SpendingStub([1e9])), Account("a", "free")
    for _ in range(100):
        await limiter.reservation(account).reserve(1e9)


async def test_reservations_that_reach_the_budget_exactly_leave_no_room() -> None:
    limiter, account = LocalLimiter(SpendingStub([0.25])), Account("a", "a", usd_per_month=0.5)
    await limiter.reservation(account).reserve(0.125)
    await limiter.reservation(account).reserve(0.125)
    with pytest.raises(AccountBudgetError):
        await limiter.reservation(account).reserve(0.0001)


async def test_zero_budget_admits_no_request() -> None:
    with pytest.raises(ApiError):
        await LocalLimiter(SpendingStub()).admit(Account("a", "a", usd_per_month=0.0))


@pytest.mark.parametrize("seed", range(20))
async def test_concurrency_overshoots_by_less_than_one_request(seed: int) -> None:
    """The documented bound holds for any number of requests in any order."""
    rng = random.Random(seed)
    budget, account = SpendingStub(), Account("a", "a", usd_per_month=10.0)
    limiter = LocalLimiter(budget)
    max_cost = rng.uniform(0.1, 3.0)
    running: list[Reservation] = []
    for _ in range(5000):
        if running and rng.random() < 0.5:
            reservation = running.pop(rng.randrange(len(running)))
            cost = rng.uniform(0, reservation.reserved)
            reservation.settle(cost)
            budget.costs.append(cost)  # its ledger entry
            reservation.release()
            continue
        reservation = limiter.reservation(account)
        try:
            await reservation.reserve(rng.uniform(0, max_cost))
        except AccountBudgetError:
            continue
        running.append(reservation)
    assert 10.0 <= sum(budget.costs) < 10.0 + max_cost
