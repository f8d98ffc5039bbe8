"""Examples that were answered under the same instructions."""

from __future__ import annotations

from bottega.protocols import Retriever
from bottega.types import Candidate, Example, Query

TAG = "context"
WIDER = 4


class Alike:
    """Leaves out what was answered in another context than the query's (`tags["context"]`); what
    has no such tag, such as imported examples, suits every context. Looks `WIDER` times further
    each time it finds too few, up to `furthest` examples."""

    def __init__(self, retrieve: Retriever, *, furthest: int = 256) -> None:
        self._retrieve = retrieve
        self._furthest = furthest

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        reach = k
        while True:
            found = await self._retrieve(query, reach)
            alike = [one for one in found if _is_alike(one.example, query)]
            if len(alike) >= k or len(found) < reach or reach >= self._furthest:
                return alike[:k]
            reach = min(max(self._furthest, k), reach * WIDER)


def _is_alike(example: Example, query: Query) -> bool:
    return example.tags.get(TAG, query.context) == query.context
