from __future__ import annotations

import pytest

from bottega.errors import EmptyKnowledgeBaseError, StoreError
from bottega.retrieval.retrievers import EmptyTolerantRetriever
from bottega.types import Candidate, Query
from tests.builders import candidates


async def test_an_empty_cache_has_no_candidates_and_other_errors_are_raised() -> None:
    results: list[Exception | list[Candidate]] = [
        EmptyKnowledgeBaseError("it holds no examples"),
        candidates("a", "b"),
        StoreError("it is damaged"),
    ]

    async def retrieve(query: Query, k: int, /) -> list[Candidate]:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result[:k]

    search = EmptyTolerantRetriever(retrieve)
    assert await search(Query("q"), 1) == []
    assert await search(Query("q"), 1) == candidates("a")
    with pytest.raises(StoreError, match="damaged"):
        await search(Query("q"), 1)
