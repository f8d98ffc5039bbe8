from __future__ import annotations

from collections.abc import Sequence

import pytest

from bottega.reranking import GatedReranker, TopKReranker
from bottega.types import Candidate, Query
from tests.builders import candidates

QUERY = Query("q")


@pytest.mark.parametrize("open", [True, False])
async def test_all_of_the_rerankers_choice_or_nothing(open: bool) -> None:
    asked: list[Sequence[Candidate]] = []

    def shows(found: Sequence[Candidate]) -> bool:
        asked.append(found)
        return open

    shown = await GatedReranker(TopKReranker(), shows)(QUERY, candidates("a", "b", "c"), 2)
    assert [c.example.answer for c in shown] == (["b", "a"] if open else [])
    assert asked == [candidates("a", "b", "c")]


async def test_what_is_hidden_is_not_reranked() -> None:
    async def dear(query: Query, found: Sequence[Candidate], k: int, /) -> list[Candidate]:
        raise AssertionError("re-ranked for nothing")

    assert await GatedReranker(dear, lambda found: False)(QUERY, candidates("a"), 1) == []
