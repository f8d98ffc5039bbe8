"""Retrievers around another one."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from bottega.errors import EmptyKnowledgeBaseError, SettingError
from bottega.protocols import Retriever
from bottega.types import Candidate, Example, Query, Trace

TAG = "context"
WIDER = 4


class SameContextFilter:
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


class EmptyTolerantRetriever:
    """Finds nothing where the retriever behind it says that there is nothing."""

    def __init__(self, retrieve: Retriever) -> None:
        self._retrieve = retrieve

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        try:
            return await self._retrieve(query, k)
        except EmptyKnowledgeBaseError:
            return []


T = TypeVar("T")


async def gather_or_cancel(work: Iterable[Awaitable[T]]) -> list[T]:
    """All results in order. If one fails the others are cancelled, and its error is raised alone:
    callers expect a `BottegaError`, not a group of them."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_awaited(one)) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def _awaited(work: Awaitable[T]) -> T:
    return await work


@dataclass
class SearchFunction:
    k: int
    task: asyncio.Task[list[Candidate]]
    query: weakref.ref[Query]  # forgets the search when the query is gone
    waiting: int = 0


class SharedRetriever:
    """Calls with one `Query` object share the first one's search, while it runs and afterwards, for
    as many as it found: a router and the demonstrations look for the same.

    The first call searches for `least` at least, so that a router that wants one candidate does not
    force a second search. Another object is another request, even if it asks the same: the cache
    may have grown since. What was found is forgotten with the query, or when `observe` is told that
    it was answered, which matters where the same object is asked again. A search that failed is
    tried again by the next call, and one that nobody waits for any more is cancelled.
    """

    def __init__(self, retrieve: Retriever, *, least: int = 1) -> None:
        if least < 1:
            raise SettingError(f"least is {least}", hint="search for 1 candidate or more")
        self._retrieve = retrieve
        self._least = least
        self._searches: dict[int, SearchFunction] = {}

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        search = self._searches.get(id(query))
        if search is None or search.k < k or _failed(search.task):
            search = self._begin(query, max(k, self._least))
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
        """The highest score of what was found for this object, None if nothing was."""
        search = self._searches.get(id(query))
        if search is None or not search.task.done() or _failed(search.task):
            return None
        return max((one.score for one in search.task.result()), default=None)

    async def observe(self, trace: Trace, /) -> None:
        """Forgets what was found for the query of this trace: it was answered."""
        self._searches.pop(id(trace.query), None)

    def _begin(self, query: Query, k: int) -> SearchFunction:
        key, searches = id(query), self._searches
        gone = weakref.ref(query, lambda _: searches.pop(key, None))
        search = SearchFunction(k, asyncio.ensure_future(self._retrieve(query, k)), gone)
        searches[key] = search
        # An error holds its traceback, that holds the query: neither would ever go.
        search.task.add_done_callback(lambda task: self._ended(key, search))
        return search

    def _ended(self, key: int, search: SearchFunction) -> None:
        if _failed(search.task):
            self._forget(key, search)

    def _forget(self, key: int, search: SearchFunction) -> None:
        if self._searches.get(key) is search:
            del self._searches[key]

    def _abandon(self, query: Query, search: SearchFunction) -> None:
        """Forgotten before it is cancelled, for a new call must not join it."""
        self._forget(id(query), search)
        search.task.cancel()


def _failed(task: asyncio.Task[list[Candidate]]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
