from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.routing import CoverageRouter
from bottega.types import Candidate, Query
from tests.routing.builders import QUERY, TWO, near

SMALL, LARGE = TWO


class Cache:
    """Retriever of one example with the next similarity, or of none for None."""

    def __init__(self, *scores: float | None) -> None:
        self.scores = list(scores)

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        score = self.scores.pop(0)
        return [] if score is None else near(score)[-k:]


async def sent(router: CoverageRouter, n: int) -> list[bool]:
    """Return whether each of n queries went to the master."""
    return [await router(QUERY) == LARGE for _ in range(n)]


async def test_dissimilar_queries_go_to_the_master() -> None:
    cache = Cache(None, 0.79, 0.8, 0.9)
    assert await sent(CoverageRouter(TWO, cache, min_similarity=0.8), 4) == [
        True,
        True,
        False,
        False,
    ]


async def test_cached_answers_cover_later_queries() -> None:
    scores: list[float] = []

    async def retrieve(query: Query, k: int, /) -> list[Candidate]:
        return near(max((-abs(one - float(query.text)) for one in scores), default=-9))[-k:]

    router = CoverageRouter(TWO, retrieve, min_similarity=-0.1)
    draw, went = random.Random(0), 0
    for _ in range(200):
        place = draw.random()
        if await router(Query(str(place))) == LARGE:
            scores.append(place)
            went += 1
    assert 5 <= went <= 10  # intervals of 0.2 that cover the unit interval


STREAMS: dict[str, Callable[[int, random.Random], float]] = {
    "steady": lambda i, draw: draw.random(),
    "a cache that learns": lambda i, draw: draw.gauss(1 - 1 / (1 + i / 200), 0.1),
    "sudden change": lambda i, draw: draw.random() + (0 if i % 1000 > 500 else 5),
    "copies only": lambda i, draw: 1.0,
    "ever farther": lambda i, draw: -float(i),
    "ever nearer": lambda i, draw: float(i),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
async def test_the_masters_share_is_near_the_rate(stream: str, rate: float) -> None:
    draw = random.Random(1)
    scores = [STREAMS[stream](i, draw) for i in range(1000)]
    went = await sent(CoverageRouter(TWO, Cache(*scores), master_rate=rate), 1000)
    usual = 0.02 if stream in ("steady", "a cache that learns", "copies only") else 0.051
    assert sum(went) / 1000 == pytest.approx(rate, abs=usual)


@given(
    scores=st.lists(st.sampled_from([0.1, 0.5, 0.5001, 0.9]), min_size=1, max_size=300),
    rate=st.floats(0, 1),
    seed=st.integers(0, 9),
)
async def test_the_masters_share_holds_for_any_stream(
    scores: list[float], rate: float, seed: int
) -> None:
    n = len(scores)
    went = await sent(CoverageRouter(TWO, Cache(*scores), master_rate=rate, seed=seed), n)
    assert abs(sum(went) - rate * n) <= 52


@pytest.mark.parametrize("rate", [0.25, 0.75])
@pytest.mark.parametrize("before", [0, 1, 3])
async def test_equal_scores_go_to_the_master_with_probability_master_rate(
    rate: float, before: int
) -> None:
    went = 0
    for seed in range(400):
        router = CoverageRouter(TWO, Cache(*[0.5] * (before + 1)), master_rate=rate, seed=seed)
        await sent(router, before)
        went += sum(await sent(router, 1))
    assert went / 400 == pytest.approx(rate, abs=0.08)


async def test_the_farthest_queries_go_to_the_master() -> None:
    draw = random.Random(2)
    scores = [draw.random() for _ in range(1000)]
    went = await sent(CoverageRouter(TWO, Cache(*scores), master_rate=0.2), 1000)
    far = [score for score, gone in zip(scores, went, strict=True) if gone]
    assert sorted(far)[len(far) * 9 // 10] < 0.3


async def test_the_share_recovers_after_a_time_without_examples() -> None:
    draw = random.Random(3)
    scores = [*[None] * 500, *(draw.random() for _ in range(600))]
    went = await sent(CoverageRouter(TWO, Cache(*scores), master_rate=0.3), 1100)
    assert all(went[:500])
    assert sum(went[600:]) / 500 == pytest.approx(0.3, abs=0.04)


@pytest.mark.parametrize(
    "given", [{}, {"min_similarity": 0.5, "master_rate": 0.5}, {"master_rate": 2.0}]
)
def test_exactly_one_rule_is_required(given: dict[str, float]) -> None:
    with pytest.raises(SettingError):
        CoverageRouter(TWO, Cache(), **given)  # type: ignore[arg-type]
