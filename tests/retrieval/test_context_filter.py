from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bottega.retrieval.retrievers import SameContextFilter
from bottega.types import Candidate, Query
from tests.builders import candidates

DEPTHS: list[int] = []


def tagged(*contexts: str | None) -> list[Candidate]:
    found = candidates(*map(str, range(len(contexts))))
    tags = [{} if context is None else {"context": context} for context in contexts]
    return [
        replace(one, example=replace(one.example, tags=tag))
        for one, tag in zip(found, tags, strict=True)
    ]


async def answers(contexts: Sequence[str | None], context: str, k: int, furthest: int = 256) -> str:
    DEPTHS.clear()

    async def retrieve(query: Query, k: int, /) -> list[Candidate]:
        DEPTHS.append(k)
        return tagged(*contexts)[:k]

    found = await SameContextFilter(retrieve, furthest=furthest)(Query("?", context=context), k)
    return "".join(one.example.answer for one in found)


async def test_only_matching_contexts_and_untagged_examples_remain() -> None:
    assert await answers(["a", "b", None, "", "a"], "a", 5) == "024"
    assert await answers(["a", "b", None, "", "a"], "", 5) == "23"


async def test_the_search_widens_until_k_match() -> None:
    assert await answers(["b"] * 6 + ["a"] * 3, "a", 2) == "67"
    assert DEPTHS == [2, 8]
    assert await answers(["b"] * 30 + ["a"] * 3, "a", 2) == "3031"
    assert DEPTHS == [2, 8, 32]


async def test_the_search_depth_is_limited() -> None:
    assert await answers(["b"] * 300 + ["a"], "a", 1, furthest=16) == ""
    assert DEPTHS == [1, 4, 16]


async def test_one_search_is_enough_if_all_match() -> None:
    assert await answers([None] * 10, "", 3) == "012"
    assert DEPTHS == [3]
