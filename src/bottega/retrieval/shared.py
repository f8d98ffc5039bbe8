"""One search for all that want to know what is near a query."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass

from bottega.errors import SettingError
from bottega.protocols import Retriever
from bottega.types import Candidate, Query, Trace


@dataclass
class Search:
    k: int
    task: asyncio.Task[list[Candidate]]
    query: weakref.ref[Query]  # forgets the search when the query is gone
    waiting: int = 0


class Shared:
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
        self._searches: dict[int, Search] = {}

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

    def _begin(self, query: Query, k: int) -> Search:
        key, searches = id(query), self._searches
        gone = weakref.ref(query, lambda _: searches.pop(key, None))
        search = Search(k, asyncio.ensure_future(self._retrieve(query, k)), gone)
        searches[key] = search
        # An error holds its traceback, that holds the query: neither would ever go.
        search.task.add_done_callback(lambda task: self._ended(key, search))
        return search

    def _ended(self, key: int, search: Search) -> None:
        if _failed(search.task):
            self._forget(key, search)

    def _forget(self, key: int, search: Search) -> None:
        if self._searches.get(key) is search:
            del self._searches[key]

    def _abandon(self, query: Query, search: Search) -> None:
        """Forgotten before it is cancelled, for a new call must not join it."""
        self._forget(id(query), search)
        search.task.cancel()


def _failed(task: asyncio.Task[list[Candidate]]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
