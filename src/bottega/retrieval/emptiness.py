"""A cache that is still empty is no failure."""

from __future__ import annotations

from bottega.errors import EmptyKnowledgeBaseError
from bottega.protocols import Retriever
from bottega.types import Candidate, Query


class UnlessEmpty:
    """Finds nothing where the retriever behind it says that there is nothing."""

    def __init__(self, retrieve: Retriever) -> None:
        self._retrieve = retrieve

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        try:
            return await self._retrieve(query, k)
        except EmptyKnowledgeBaseError:
            return []
