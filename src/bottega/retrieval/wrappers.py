"""Wrappers of a retriever: context filter, empty cache, shared search."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass

from bottega._util.caching import SharedTask
from bottega.errors import EmptyKnowledgeBaseError, SettingError
from bottega.protocols import Retriever
from bottega.types import Candidate, Example, Query, Trace

CONTEXT_TAG = "context"
WIDER = 4


class SameContextFilter:
    """Retriever wrapper that removes examples from another context than the query's.

    The context of an example is `tags["context"]`; an example without this tag, such as an imported
    one, matches every context. If too few remain, the search is repeated with `k` times `WIDER`, up
    to `furthest` examples.
    """

    def __init__(self, retrieve: Retriever, *, furthest: int = 256) -> None:
        self._retrieve = retrieve
        self._furthest = furthest

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        depth = k
        while True:
            found = await self._retrieve(query, depth)
            matching = [one for one in found if _has_same_context(one.example, query)]
            if len(matching) >= k or len(found) < depth or depth >= self._furthest:
                return matching[:k]
            depth = min(max(self._furthest, k), depth * WIDER)


def _has_same_context(example: Example, query: Query) -> bool:
    return example.tags.get(CONTEXT_TAG, query.context) == query.context


class EmptyTolerantRetriever:
    """Retriever wrapper that returns no candidates while the knowledge base is empty."""

    def __init__(self, retrieve: Retriever) -> None:
        self._retrieve = retrieve

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        try:
            return await self._retrieve(query, k)
        except EmptyKnowledgeBaseError:
            return []


@dataclass
class SharedSearch:
    """Search of one query object."""

    k: int
    shared: SharedTask[list[Candidate]]
    query: weakref.ref[Query]  # its callback removes the search


class SharedRetriever:
    """Retriever wrapper that searches once for all calls with the same `Query` object.

    A router and the demonstrations share one search this way, while it runs and afterwards. The
    first call searches for at least `min_k` candidates, which saves a second search if a router
    needs only one. An equal query in another object is another request, because the cache may have
    grown. The result is dropped with the query object, or when `observe` receives the trace of the
    query. A failed search is repeated at the next call. A search without waiting calls is
    cancelled.
    """

    def __init__(self, retrieve: Retriever, *, min_k: int = 1) -> None:
        if min_k < 1:
            raise SettingError(f"min_k must be at least 1, got {min_k}", hint="set min_k=1 or more")
        self._retrieve = retrieve
        self._min_k = min_k
        self._searches: dict[int, SharedSearch] = {}

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        search = self._searches.get(id(query))
        if search is None or search.k < k or search.shared.has_failed:
            search = self._begin(query, max(k, self._min_k))
        return (await search.shared.wait())[:k]

    def best(self, query: Query) -> float | None:
        """Return the highest score found for this object, None without a result."""
        search = self._searches.get(id(query))
        if search is None or not search.shared.task.done() or search.shared.has_failed:
            return None
        return max((one.score for one in search.shared.task.result()), default=None)

    async def observe(self, trace: Trace, /) -> None:
        """Drop the result for the query of this trace."""
        self._searches.pop(id(trace.query), None)

    def _begin(self, query: Query, k: int) -> SharedSearch:
        key, searches = id(query), self._searches

        def forget() -> None:
            if searches.get(key) is search:
                del searches[key]

        def end(task: asyncio.Task[list[Candidate]]) -> None:
            # An error refers to its traceback and so to the query: neither would ever be freed.
            if search.shared.has_failed:
                forget()

        freed = weakref.ref(query, lambda _: searches.pop(key, None))
        search = SharedSearch(k, SharedTask(self._retrieve(query, k), forget), freed)
        search.shared.task.add_done_callback(end)
        searches[key] = search
        return search
