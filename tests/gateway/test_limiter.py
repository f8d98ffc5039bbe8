from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from bottega.gateway.accounting.accounts import Account
from bottega.gateway.accounting.limiter import Limiter
from bottega.gateway.refusals import Refusal


@dataclass
class Purse:
    """What a ledger would say."""

    costs: list[float] = field(default_factory=list)

    def spent_this_month(self, account: str, /) -> float:
        return sum(self.costs)

    def dearest_this_month(self, account: str, /) -> float:
        return max(self.costs, default=0.0)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_limits_who_has_no_limits() -> None:
    limiter = Limiter(Purse([1e9]))
    assert {limiter.admit(Account("a", "free")) for _ in range(10_000)} == {None}


def test_requests_per_minute() -> None:
    clock = Clock()
    limiter = Limiter(Purse(), clock=clock)
    account, other = (Account(id, id, requests_per_minute=30) for id in "ab")
    assert [limiter.admit(account) for _ in range(30)] == [None] * 30
    assert limiter.admit(account) == pytest.approx(2.0)
    assert limiter.admit(other) is None
    clock.now += 1.5
    assert limiter.admit(account) == pytest.approx(0.5)
    clock.now += 0.5
    assert limiter.admit(account) is None
    assert limiter.admit(account) == pytest.approx(2.0)
    clock.now += 3600
    assert [limiter.admit(account) for _ in range(30)] == [None] * 30
    assert limiter.admit(account) is not None


def test_who_waits_as_told_is_admitted() -> None:
    clock, draw = Clock(), random.Random(0)
    limiter = Limiter(Purse(), clock=clock)
    account = Account("a", "a", requests_per_minute=7)
    for _ in range(200):
        wait = limiter.admit(account)
        if wait is not None:
            clock.now += wait + 1e-9
            assert limiter.admit(account) is None
        clock.now += draw.uniform(0, 10)


def test_a_spent_budget_is_another_refusal() -> None:
    purse = Purse([0.6])
    limiter, account = Limiter(purse), Account("a", "a", usd_per_month=1.0)
    assert limiter.admit(account) is None
    purse.costs.append(0.4)
    limiter.release(account)
    with pytest.raises(Refusal, match="1 USD for this month is spent") as raised:
        limiter.admit(account)
    refusal = raised.value
    assert (refusal.status, refusal.code, refusal.type) == (429, *["insufficient_quota"] * 2)
    assert refusal.headers == {"x-should-retry": "false"}


def test_what_is_under_way_counts_until_it_is_over() -> None:
    purse = Purse([0.1])
    limiter, account = Limiter(purse), Account("a", "a", usd_per_month=0.35)
    assert [limiter.admit(account) for _ in range(4)] == [None, None, None, 1.0]
    for _ in range(3):  # they cost nothing: exact repeats, say
        limiter.release(account)
    assert limiter.admit(account) is None


def test_reservations_that_reach_the_budget_exactly_leave_no_room() -> None:
    limiter, account = Limiter(Purse([0.25])), Account("a", "a", usd_per_month=0.5)
    assert limiter.admit(account) is None
    assert limiter.admit(account) == 1.0


def test_a_budget_of_nothing_buys_nothing() -> None:
    with pytest.raises(Refusal):
        Limiter(Purse()).admit(Account("a", "a", usd_per_month=0.0))


@pytest.mark.parametrize("seed", range(20))
def test_how_far_concurrency_can_overshoot(seed: int) -> None:
    """The bound of the docstring, with any number of requests under way in any order."""
    draw = random.Random(seed)
    purse, account = Purse(), Account("a", "a", usd_per_month=10.0)
    limiter = Limiter(purse)
    dearest, most = draw.uniform(0.1, 3.0), draw.randint(1, 40)
    begun: list[float] = []
    spent_out, beyond = False, 0.0
    while not (spent_out and not begun):
        if begun and (spent_out or len(begun) == most or draw.random() < 0.5):
            purse.costs.append(begun.pop(draw.randrange(len(begun))))
            limiter.release(account)
            continue
        try:
            wait = limiter.admit(account)
        except Refusal:
            spent_out = True
            continue
        if wait is None:
            reserved = purse.dearest_this_month("a")
            cost = draw.uniform(0, dearest)
            beyond = cost + sum(max(0.0, each - reserved) for each in begun)
            begun.append(cost)
        elif begun:
            purse.costs.append(begun.pop())
            limiter.release(account)
    assert 10.0 <= sum(purse.costs) < 10.0 + beyond + 1e-9


def test_equal_requests_overshoot_by_one_at_most() -> None:
    purse, account = Purse([0.3]), Account("a", "a", usd_per_month=10.0)
    limiter = Limiter(purse)
    admitted = 0
    while limiter.admit(account) is None:
        admitted += 1
    purse.costs += [0.3] * admitted
    assert 10.0 <= sum(purse.costs) < 10.3 + 1e-9
