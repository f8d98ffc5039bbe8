from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import NotFoundError, SettingError
from bottega.protocols import Vectors
from bottega.reranking import MMRReranker
from bottega.types import Candidate, Example, Query
from tests.builders import candidates, example

QUERY = Query("q")


def at(angles: dict[str, float]):  # type: ignore[no-untyped-def]
    """Vectors of two numbers, by the degrees of each id."""

    def vectors(ids: Sequence[str]) -> Vectors:
        turns = np.radians([angles[id.partition("-")[0]] for id in ids])
        return np.stack([np.cos(turns), np.sin(turns)], axis=1).astype(np.float32)

    return vectors


def mmr(angles: dict[str, float], trade_off: float) -> MMRReranker:
    return MMRReranker(at(angles), trade_off=trade_off, order="nearest-first")


async def shown(angles: dict[str, float], trade_off: float, k: int) -> str:
    chosen = await mmr(angles, trade_off)(QUERY, candidates(*angles), k)
    return "".join(c.example.answer for c in chosen)


async def test_near_duplicate_is_replaced() -> None:
    angles = {"a": 0.0, "b": 1.0, "c": 90.0}
    assert await shown(angles, 0.5, 2) == "ac"
    assert await shown(angles, 1.0, 2) == "ab"


async def test_similarity_does_not_depend_on_the_norms_of_vectors() -> None:
    lengths = {"a": 1.0, "b": 0.1, "c": 10.0}
    of_length_one = at({"a": 0.0, "b": 1.0, "c": 60.0})

    def vectors(ids: Sequence[str]) -> Vectors:
        scales = [[lengths[id.partition("-")[0]]] for id in ids]
        scaled: Vectors = of_length_one(ids) * np.array(scales, np.float32)
        return scaled

    rerank = MMRReranker(vectors, trade_off=0.0, order="nearest-first")
    chosen = await rerank(QUERY, candidates("a", "b", "c"), 2)
    assert [c.example.answer for c in chosen] == ["a", "c"]


@given(k=st.integers(0, 8), turns=st.lists(st.floats(0, 360), min_size=6, max_size=6))
async def test_trade_off_1_is_the_first_k(k: int, turns: list[float]) -> None:
    angles = dict(zip("abcdef", turns, strict=True))
    assert await shown(angles, 1.0, k) == "abcdef"[:k]


@given(turns=st.lists(st.integers(0, 71), min_size=6, max_size=6, unique=True))
async def test_trade_off_0_selects_the_least_similar(turns: list[int]) -> None:
    angles = {label: 5.0 * turn for label, turn in zip("abcdef", turns, strict=True)}
    chosen = await shown(angles, 0.0, 6)
    assert chosen[0] == "a"
    rows = dict(zip("abcdef", at(angles)(list("abcdef")), strict=True))
    for place in range(1, 6):
        closest = {
            label: max(float(rows[label] @ rows[before]) for before in chosen[:place])
            for label in set("abcdef") - set(chosen[:place])
        }
        assert closest[chosen[place]] == pytest.approx(min(closest.values()), abs=1e-5)


@pytest.mark.parametrize("scores", [(0.0, 0.0, 0.0), (900.0, 899.9, -5.0)])
async def test_scores_of_any_scale_are_ranked(scores: tuple[float, ...]) -> None:
    found = [Candidate(example(x, 0), s) for x, s in zip("abc", scores, strict=True)]
    chosen = await mmr({"a": 0, "b": 0, "c": 90}, 0.5)(QUERY, found, 3)
    assert {c.example.answer for c in chosen} == set("abc")
    assert chosen[0].example.answer == "a"


async def test_best_is_nearest_to_the_query_by_default() -> None:
    rerank = MMRReranker(at({"a": 0, "b": 40, "c": 80}), trade_off=1.0)
    chosen = await rerank(QUERY, candidates("a", "b", "c"), 2)
    assert "".join(c.example.answer for c in chosen) == "ba"
    assert await rerank(QUERY, [], 2) == []


def test_trade_off_above_1_is_an_error() -> None:
    with pytest.raises(SettingError):
        MMRReranker(at({}), trade_off=1.1)


@pytest.mark.parametrize(("gone", "shown"), [("b", "acd"), ("ad", "bc"), ("abcd", "")])
async def test_deleted_candidates_are_left_out(gone: str, shown: str) -> None:
    vectors = at({"a": 0, "b": 30, "c": 60, "d": 90})

    def present(ids: Sequence[str]) -> Vectors:
        if any(id[0] in gone for id in ids):
            raise NotFoundError("gone")
        found: Vectors = vectors(ids)
        return found

    rerank = MMRReranker(present, trade_off=1.0, order="nearest-first")
    chosen = await rerank(QUERY, candidates(*"abcd"), 4)
    assert "".join(c.example.answer for c in chosen) == shown


async def test_a_candidate_without_an_id_is_a_setting_error() -> None:
    nameless = Candidate(Example(Query("q"), "a"), 1.0)
    with pytest.raises(SettingError, match="got one without"):
        await mmr({"a": 0}, 0.5)(QUERY, [nameless], 1)


@pytest.mark.parametrize("trade_off", [0.0, 1.0])
async def test_trade_offs_from_pure_diversity_to_pure_relevance(trade_off: float) -> None:
    rerank = MMRReranker(at({"a": 0, "b": 1, "c": 90}), trade_off=trade_off)
    chosen = await rerank(QUERY, candidates("a", "b", "c"), 2)
    assert {c.example.answer for c in chosen} == ({"a", "b"} if trade_off else {"a", "c"})
    with pytest.raises(SettingError):
        MMRReranker(at({}), trade_off=-0.1)
