"""Reasons that routers and escalations give for their choice."""

from __future__ import annotations

from collections.abc import Sequence

from bottega.pipeline import FixedRouter
from bottega.protocols import Router
from bottega.routing import (
    BudgetRouter,
    ColdStartRouter,
    ConfidenceEscalation,
    CoverageRouter,
    RandomRouter,
)
from bottega.types import Answer, Candidate, Query
from tests.routing.builders import QUERY, TIERS, TWO, near, traced

SMALL, LARGE = TWO


class Cache:
    """Retriever of one example with the next similarity, or of none for None."""

    def __init__(self, *scores: float | None) -> None:
        self.scores = list(scores)

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        score = self.scores.pop(0)
        return [] if score is None else near(score)[-k:]


async def choices(route: Router, n: int) -> Sequence[tuple[str, str]]:
    found = [await route(QUERY) for _ in range(n)]
    return [(tier.name, tier.reason) for tier in found]


async def test_the_cold_start_is_a_reason() -> None:
    route = ColdStartRouter(1, LARGE, then=FixedRouter(SMALL))
    assert await choices(route, 2) == [("large", "cold start"), ("small", "")]
    assert LARGE.reason == ""


async def test_a_random_tier_has_its_share() -> None:
    for name, reason in await choices(RandomRouter(TIERS, 0.5), 20):
        assert reason == f"random share {0.5 if name == 'large' else 0.25:g}"


async def test_a_similarity_is_compared_with_its_threshold() -> None:
    route = CoverageRouter(TWO, Cache(0.81, 0.74, None), min_similarity=0.75)
    assert await choices(route, 3) == [
        ("small", "similarity 0.810 at or above threshold 0.75"),
        ("large", "similarity 0.740 below threshold 0.75"),
        ("large", "no example found"),
    ]


async def test_a_rank_is_compared_with_the_threshold_before_the_query() -> None:
    route = CoverageRouter(TWO, Cache(*[0.5] * 3, 0.9, 0.1, None), master_rate=0.5)
    *_, high, low, none = await choices(route, 6)
    assert high[0] == "small"
    assert high[1].startswith("similarity 0.900 higher than ")
    assert "of recent ones, at or above threshold " in high[1]
    assert low[0] == "large"
    assert low[1].startswith("similarity 0.100 higher than ")
    assert "of recent ones, below threshold " in low[1]
    assert none == ("large", "no example found")


async def test_a_budget_explains_both_tiers() -> None:
    route = BudgetRouter(TWO, 4)
    unknown = await choices(route, 2)
    assert unknown[0] == ("large", "first call to the master, to learn its price")
    assert unknown[1] == ("small", "the master's price is not known yet")
    await route.observe(traced(LARGE, 0.04))
    assert 0 < route.rate < 1
    share = f"within budget: {100 * route.rate:.1f} % of queries go to the master"
    assert await choices(route, 1) in ([("small", share)], [("large", share)])
    route.charge(1.0)
    assert (await choices(route, 1))[0] == ("small", "over budget")


async def test_an_escalation_names_the_tier_and_the_confidence() -> None:
    escalate = ConfidenceEscalation(TIERS, 0.7)
    unsure = await escalate(QUERY, TIERS[0], Answer("a", confidence=0.42))
    invalid = await escalate(QUERY, TIERS[1], Answer("", valid=False))
    assert unsure is not None and invalid is not None
    assert unsure.reason == "escalated from small: confidence 0.42 below 0.7"
    assert invalid.reason == "escalated from middle: invalid answer"
