from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import GenerationError, SettingError
from bottega.retrieval import RankFusionRetriever
from bottega.types import Candidate, Example, Query
from tests.builders import example

ORDERS = st.lists(st.permutations("abcdef"), min_size=1, max_size=4)


class RankedRetriever:
    """Retriever of fixed labels that records the requested depths."""

    def __init__(self, labels: Sequence[str], error: Exception | None = None) -> None:
        self.labels = labels
        self.error = error
        self.depths: list[int] = []

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        self.depths.append(k)
        if self.error is not None:
            raise self.error
        return [Candidate(example(label, 0), 100.0 - i) for i, label in enumerate(self.labels)][:k]


async def fused(*orders: Sequence[str], k: int = 6, **settings: object) -> list[Candidate]:
    retrieve = RankFusionRetriever([RankedRetriever(order) for order in orders], **settings)  # type: ignore[arg-type]
    return await retrieve(Query("q"), k)


async def test_scores_are_the_sums_of_reciprocal_ranks() -> None:
    found = await fused("abc", "cad")
    assert [c.example.answer for c in found] == ["a", "c", "b", "d"]
    sums = [1 / 61 + 1 / 62, 1 / 63 + 1 / 61, 1 / 62, 1 / 63]
    assert [c.score for c in found] == pytest.approx(sums)


@pytest.mark.parametrize(("constant", "weight"), [(0.5, 1.0), (1.0, 1.0), (1000.0, 0.5)])
async def test_positive_constants_and_weights_are_valid(constant: float, weight: float) -> None:
    found = await fused("ab", constant=constant, weights=[weight])
    assert [c.score for c in found] == [weight / (constant + 1), weight / (constant + 2)]
    nothing = await fused("ab", weights=[0.0])
    assert [c.score for c in nothing] == [0.0, 0.0]


@given(orders=ORDERS)
async def test_the_order_of_lists_does_not_matter(
    orders: list[list[str]],
) -> None:
    alone = [c.example.answer for c in await fused(orders[0])]
    assert alone == orders[0]
    scores = {c.example.answer: pytest.approx(c.score) for c in await fused(*orders)}
    assert scores == {c.example.answer: c.score for c in await fused(*reversed(orders))}


@given(orders=ORDERS, k=st.integers(0, 8))
async def test_a_unanimous_first_rank_is_first(orders: list[list[str]], k: int) -> None:
    agreed = [["z", *order] for order in orders]
    found = [c.example.answer for c in await fused(*agreed, k=k)]
    assert len(set(found)) == len(found) == min(k, 7)
    assert not found or found[0] == "z"


async def test_weights_and_depth() -> None:
    heavy = await fused("ab", "ba", weights=[1.0, 2.0])
    assert [c.example.answer for c in heavy] == ["b", "a"]
    retriever = RankedRetriever("abc")
    fusion = RankFusionRetriever([retriever], depth=5)
    await fusion(Query("q"), 2)
    await fusion(Query("q"), 9)
    assert retriever.depths == [5, 9]


async def test_a_failed_retriever_raises_its_own_error() -> None:
    down = GenerationError("down")
    with pytest.raises(GenerationError):
        await RankFusionRetriever([RankedRetriever("ab"), RankedRetriever("", down)])(Query("q"), 2)


@pytest.mark.parametrize(
    ("retrievers", "settings"),
    [
        (0, {}),
        (1, {"constant": 0}),
        (1, {"constant": float("nan")}),
        (1, {"weights": [float("nan")]}),
        (2, {"weights": [1.0]}),
        (1, {"weights": [-1.0]}),
    ],
)
def test_an_invalid_fusion_is_rejected(retrievers: int, settings: dict[str, object]) -> None:
    with pytest.raises(SettingError):
        RankFusionRetriever([RankedRetriever("a")] * retrievers, **settings)  # type: ignore[arg-type]


async def test_retrievers_and_weights_can_be_any_iterable() -> None:
    fusion = RankFusionRetriever(
        iter([RankedRetriever("ab"), RankedRetriever("ba")]), weights=iter([1.0, 2.0])
    )
    for _ in range(2):
        assert [c.example.answer for c in await fusion(Query("q"), 2)] == ["b", "a"]
    with pytest.raises(SettingError):
        RankFusionRetriever(iter([]))


async def test_examples_without_id_are_compared_by_content() -> None:
    first, second = (Candidate(Example(Query(text), "x"), 1.0) for text in ("one", "two"))

    async def one(query: Query, k: int, /) -> list[Candidate]:
        return [first, second]

    async def other(query: Query, k: int, /) -> list[Candidate]:
        return [second]

    found = await RankFusionRetriever([one, other])(Query("q"), 5)
    assert [c.example.query.text for c in found] == ["two", "one"]


async def test_a_negative_k_is_rejected() -> None:
    with pytest.raises(SettingError):
        await fused("abc", k=-1)


class ScoredRetriever:
    """Retriever of labels with fixed scores, best first; ties keep their order."""

    def __init__(self, scores: Sequence[tuple[str, float]]) -> None:
        self.scores = sorted(scores, key=lambda pair: -pair[1])

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        return [Candidate(example(label, 0), score) for label, score in self.scores][:k]


TIED = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 2)), unique_by=lambda p: p[0])


@given(scores=TIED, order=st.permutations("abcdef"), data=st.data())
async def test_ties_share_their_best_rank(
    scores: list[tuple[str, float]], order: list[str], data: st.DataObject
) -> None:
    async def fuse(scores: Sequence[tuple[str, float]]) -> dict[str, float]:
        found = await RankFusionRetriever([RankedRetriever(order), ScoredRetriever(scores)])(
            Query("q"), 6
        )
        return {c.example.answer: c.score for c in found}

    alone = {label: 1 / (60 + rank) for rank, label in enumerate(order, 1)}
    fused = await fuse(scores)
    assert fused == await fuse(data.draw(st.permutations(scores)))
    for label, score in scores if len({score for _, score in scores}) > 1 else ():
        better = sum(other > score for _, other in scores)
        alone[label] += 1 / (61 + better)
    if len(scores) != 1:
        assert fused == pytest.approx(alone)


@given(order=st.permutations("abcdef"), tied=st.permutations("abcdef"))
async def test_an_all_tied_list_is_ignored(order: list[str], tied: list[str]) -> None:
    same = ScoredRetriever([(label, 0.0) for label in tied])
    found = await RankFusionRetriever([same, RankedRetriever(order)])(Query("q"), 6)
    assert [c.example.answer for c in found] == order
    assert len(await RankFusionRetriever([same])(Query("q"), 3)) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"constant": 0.0},
        {"constant": -1.0},
        {"constant": math.inf},
        {"weights": [1.0]},
        {"weights": [1.0, -0.1]},
        {"weights": [1.0, math.inf]},
    ],
)
def test_invalid_constants_and_weights_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        RankFusionRetriever([RankedRetriever("ab"), RankedRetriever("ba")], **settings)


async def test_a_retriever_of_weight_zero_does_not_change_the_order() -> None:
    fusion = RankFusionRetriever(
        [RankedRetriever("ab"), RankedRetriever("ba")], weights=[1.0, 0.0], constant=0.1
    )
    assert [c.example.answer for c in await fusion(Query("q"), 2)] == ["a", "b"]
    assert await fusion(Query("q"), 0) == []
