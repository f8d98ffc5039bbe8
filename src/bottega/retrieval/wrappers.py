"""Wrappers of a retriever: context filter, empty cache, shared search."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import TypeVar

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


T = TypeVar("T")


async def gather_or_cancel(work: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results in order. On a failure, cancel the others and raise that error alone:
    callers expect a `BottegaError` and no exception group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_awaited(one)) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def _awaited(work: Awaitable[T]) -> T:
    return await work


@dataclass
class SharedSearch:
    """Search of one query object and the number of calls that wait for it."""

    k: int
    task: asyncio.Task[list[Candidate]]
    query: weakref.ref[Query]  # its callback removes the search
    waiting: int = 0


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
        if search is None or search.k < k or _failed(search.task):
            search = self._begin(query, max(k, self._min_k))
        if search.task.done():  # its event loop may be gone
            return search.task.result()[:k]
        search.waiting += 1
        try:
            return (await asyncio.shield(search.task))[:k]
        finally:
            search.waiting -= 1
            if search.waiting == 0 and not search.task.done():
                self._abandon(query, search)

    def best(self, query: Query) -> float | None:
        """Return the highest score found for this object, None without a result."""
        search = self._searches.get(id(query))
        if search is None or not search.task.done() or _failed(search.task):
            return None
        return max((one.score for one in search.task.result()), default=None)

    async def observe(self, trace: Trace, /) -> None:
        """Drop the result for the query of this trace."""
        self._searches.pop(id(trace.query), None)

    def _begin(self, query: Query, k: int) -> SharedSearch:
        key, searches = id(query), self._searches
        gone = weakref.ref(query, lambda _: searches.pop(key, None))
        search = SharedSearch(k, asyncio.ensure_future(self._retrieve(query, k)), gone)
        searches[key] = search
        # An error refers to its traceback and so to the query: neither would ever be freed.
        search.task.add_done_callback(lambda task: self._ended(key, search))
        return search

    def _ended(self, key: int, search: SharedSearch) -> None:
        if _failed(search.task):
            self._forget(key, search)

    def _forget(self, key: int, search: SharedSearch) -> None:
        if self._searches.get(key) is search:
            del self._searches[key]

    def _abandon(self, query: Query, search: SharedSearch) -> None:
        """Remove the search before cancelling it, because a new call must not join it."""
        self._forget(id(query), search)
        search.task.cancel()


def _failed(task: asyncio.Task[list[Candidate]]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
