"""A workshop for each namespace, opened when it is first asked for."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bottega.errors import StoreError
from bottega.gateway.fairness import FairSemaphore
from bottega.gateway.workshop import Workshop
from bottega.knowledge import KnowledgeBase

log = logging.getLogger(__name__)

Opened = tuple[Workshop, KnowledgeBase]


class Namespaces:
    """At most `most` stay open, the least recently used goes first: it is closed once no request
    holds its workshop any more. `open_one` blocks and is called in a thread, one call at a time, so
    that an embedder is loaded once. Clients take turns: one that opens many namespaces does not
    delay the others."""

    def __init__(self, open_one: Callable[[str], Opened], most: int) -> None:
        self._open_one = open_one
        self._most = most
        self._opened: OrderedDict[str, asyncio.Future[Opened]] = OrderedDict()
        self._endings: list[weakref.finalize[..., Workshop]] = []
        self._turns = FairSemaphore(1, 1)
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="bottega-open")
        self._closer = ThreadPoolExecutor(1, thread_name_prefix="bottega-close")
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self, namespace: str, /) -> Workshop:
        """Raises `StoreError`; the next call tries again."""
        return (await self._both(namespace))[0]

    def base(self, namespace: str) -> KnowledgeBase:
        """The handle that the gateway itself uses, for another thread than the event loop's."""
        if self._loop is None:
            raise StoreError("the gateway is not running yet", hint="try again in a moment")
        return asyncio.run_coroutine_threadsafe(self._both(namespace), self._loop).result()[1]

    def soon(self, work: Callable[[], None]) -> None:
        """On the event loop, from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(work)

    async def _both(self, namespace: str) -> Opened:
        self._loop = asyncio.get_running_loop()
        found = self._opened.get(namespace)
        if found is None:
            found = asyncio.ensure_future(self._open_in_turn(namespace))
            found.add_done_callback(lambda done: self._came(namespace, done))
            self._opened[namespace] = found
        self._opened.move_to_end(namespace)
        return await asyncio.shield(found)

    async def _open_in_turn(self, namespace: str) -> Opened:
        await self._turns.acquire(1)
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._opener, self._open_one, namespace)
        finally:
            self._turns.release(1)

    def counts(self) -> dict[str, int]:
        """Examples of each open namespace. Blocks."""
        done = {name: one.result() for name, one in list(self._opened.items()) if one.done()}
        return {name: len(base) for name, (_, base) in done.items()}

    async def aclose(self) -> None:
        """Closes all, also those that a request still holds. What was kept is durable anyway."""
        await asyncio.gather(*self._opened.values(), return_exceptions=True)
        self._opened.clear()
        for ending in self._endings:
            ending()
        await asyncio.to_thread(self._closer.shutdown)
        self._opener.shutdown(wait=False)

    def _came(self, namespace: str, done: asyncio.Future[Opened]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._opened.pop(namespace, None)
            return
        workshop, base = done.result()
        ending = weakref.finalize(workshop, self._closer.submit, _close, base, namespace)
        ending.atexit = False
        self._endings = [*(one for one in self._endings if one.alive), ending]
        while len(self._opened) > self._most:
            self._opened.popitem(last=False)


def _close(base: KnowledgeBase, namespace: str) -> None:
    try:
        base.close()
    except Exception:
        log.exception("the cache of the namespace %r was not closed as it should", namespace)
