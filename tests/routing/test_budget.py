from __future__ import annotations

import logging
import random
from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.protocols import Tier
from bottega.routing import BudgetRouter
from bottega.types import Reply
from tests.routing.builders import QUERY, TIERS, TWO, traced

SMALL, LARGE = TWO
TARGET = 0.004  # a query
Cost = Callable[[int, Tier], float]


async def spent(
    router: BudgetRouter, n: int, cost: Cost, *, seed: int, late: int = 32
) -> list[float]:
    """Return the cost of each of n queries, reported to the router up to `late` queries later."""
    draw = random.Random(seed)
    costs, waiting = list[float](), list[tuple[int, Tier, float]]()
    for i in range(n):
        tier = await router(QUERY)
        costs.append(cost(i, tier) * draw.lognormvariate(-0.32, 0.8))  # a mean of 1
        waiting.append((i + draw.randint(0, late), tier, costs[-1]))
        while waiting and waiting[0][0] <= i:
            _, tier, dollars = waiting.pop(0)
            await router.observe(traced(tier, dollars))
    return costs


def windows(costs: list[float], length: int) -> list[float]:
    """Return the cost of each window of this length; the target is 1."""
    sums = [0.0, *accumulate(costs)]
    return [(sums[i + length] - sums[i]) / length / TARGET for i in range(len(costs) - length + 1)]


def prices(small: float, large: Callable[[int], float]) -> Cost:
    return lambda i, tier: large(i) if tier == LARGE else small


STREAMS: dict[str, tuple[Cost, float, float]] = {
    "a master ten times the target": (prices(0.0002, lambda i: 0.04), 0.85, 1.15),
    "five times": (prices(0.0002, lambda i: 0.02), 0.9, 1.1),
    "an apprentice that is free": (prices(0, lambda i: 0.01), 0.9, 1.1),
    "fifty times": (prices(0.0002, lambda i: 0.2), 0.55, 1.25),
    "creeping prices": (prices(0.001, lambda i: 0.005 + i / 2e5), 0.9, 1.1),
    "jumps": (prices(0.0002, lambda i: 0.1 if i // 1500 % 2 else 0.01), 0.7, 1.3),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("seed", [0, 1])
async def test_the_cost_of_any_2000_queries_is_near_the_target(name: str, seed: int) -> None:
    cost, low, high = STREAMS[name]
    costs = await spent(BudgetRouter(TWO, 1000 * TARGET, seed=seed), 8000, cost, seed=seed)
    held = windows(costs, 2000)
    assert low < min(held) and max(held) < high
    assert max(windows(costs, 500)) < 2.2


async def test_an_affordable_master_answers_all_until_its_price_rises() -> None:
    router = BudgetRouter(TWO, 1000 * TARGET)
    cost = prices(0.0002, lambda i: 0.003 if i < 3000 else 0.06)
    costs = await spent(router, 8000, cost, seed=0)
    assert sum(costs[:3000]) / 3000 == pytest.approx(0.003, rel=0.1)
    assert max(windows(costs, 500)) < 2.2
    assert 0.9 < min(windows(costs[4500:], 2000)) <= max(windows(costs[4500:], 2000)) < 1.1


async def test_an_apprentice_over_budget_is_logged_once_and_forgiven(
    caplog: pytest.LogCaptureFixture,
) -> None:
    router = BudgetRouter(TWO, 1000 * TARGET)
    with caplog.at_level(logging.WARNING):
        await spent(router, 3000, prices(0.02, lambda i: 0.1), seed=0)
    assert router.too_small and router.rate == 0
    assert len(caplog.records) == 1 and "budget" in caplog.records[0].getMessage()
    costs = await spent(router, 3000, prices(0.0002, lambda i: 0.02), seed=1)
    assert not router.too_small
    assert max(windows(costs, 500)) < 2.2
    assert sum(costs[1500:]) / 1500 == pytest.approx(TARGET, rel=0.1)


async def test_the_master_is_called_once_to_learn_its_price() -> None:
    router = BudgetRouter(TWO, 4)
    first = [await router(QUERY) for _ in range(51)]
    assert first == [LARGE, *[SMALL] * 50]
    assert await router(QUERY) == LARGE  # the first must have failed
    assert [await router(QUERY) for _ in range(51)] == [*[SMALL] * 50, LARGE]
    await router.observe(traced(LARGE, 0.04))
    assert 0 < router.rate < 0.2


async def test_an_escalated_query_counts_as_an_apprentice_cost() -> None:
    router = BudgetRouter(TWO, 4)
    await router.observe(traced(LARGE, 0.04))
    await router.observe(traced(SMALL, 0.001))
    before = router.rate
    await router.observe(traced(LARGE, 0.041, dismissed=(Reply("small", ()),)))
    assert router.rate < before
    assert router.too_small


async def test_overspending_is_compensated_over_a_quarter_window() -> None:
    router = BudgetRouter(TWO, 4, window=100)
    await router.observe(traced(LARGE, 0.04))
    await router.observe(traced(SMALL, 0.0))
    before = router.rate
    router.charge(0.01)
    assert before - router.rate == pytest.approx(0.01 / 25 / 0.04)


async def test_other_spending_reduces_the_masters_share() -> None:
    async def rate(charged: float) -> float:
        router = BudgetRouter(TWO, 4)
        await router.observe(traced(LARGE, 0.04))
        await router.observe(traced(TIERS[1], 0.004))  # requested by name: spent, no estimate
        router.charge(charged)
        return router.rate

    assert 0 == await rate(3.0) < await rate(0.1) < await rate(0.0)


async def test_a_budget_needs_prices() -> None:
    with pytest.raises(SettingError) as caught:
        await BudgetRouter(TWO, 4).observe(traced(SMALL, None))
    assert "price" in caught.value.hint


@given(
    costs=st.lists(st.tuples(st.booleans(), st.floats(0, 10)), max_size=60),
    target=st.floats(1e-6, 100),
)
async def test_the_rate_is_a_fraction_for_any_costs(
    costs: list[tuple[bool, float]], target: float
) -> None:
    router = BudgetRouter(TWO, target)
    for to_master, cost in costs:
        await router.observe(traced(LARGE if to_master else SMALL, cost))
        assert 0 <= router.rate <= 1


@pytest.mark.parametrize(("dollars", "window"), [(0, 500), (-1, 500), (float("nan"), 500), (4, 5)])
def test_invalid_settings_are_rejected(dollars: float, window: int) -> None:
    with pytest.raises(SettingError):
        BudgetRouter(TWO, dollars, window=window)


async def test_equal_seeds_route_equal_queries() -> None:
    cost = prices(0.0002, lambda i: 0.02)
    one, same = [await spent(BudgetRouter(TWO, 4, seed=3), 300, cost, seed=0) for _ in "ab"]
    assert one == same != await spent(BudgetRouter(TWO, 4, seed=4), 300, cost, seed=0)


def test_the_shortest_window_has_20_queries() -> None:
    assert BudgetRouter(TWO, 4, window=20).rate == 0
    with pytest.raises(SettingError, match="window must be at least 20"):
        BudgetRouter(TWO, 4, window=19)
