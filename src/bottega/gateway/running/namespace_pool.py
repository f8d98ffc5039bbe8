"""Pool of open namespaces."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy

from bottega._util.caching import FairSemaphore
from bottega.errors import StoreError
from bottega.gateway.ports import Tenant
from bottega.knowledge import KnowledgeBase

log = logging.getLogger(__name__)

OpenNamespace = tuple[Tenant, KnowledgeBase]


class NamespacePool:
    """Pool of at most `limit` open namespaces. The least recently used one is evicted, and closed
    once no request holds its tenant. `open_one` blocks and runs in a thread, one call at a time:
    this loads an embedder only once. Clients take turns, so a client that opens many namespaces
    does not delay the others."""

    def __init__(self, open_one: Callable[[str], OpenNamespace], limit: int) -> None:
        self._open_one = open_one
        self._limit = limit
        self._opened: OrderedDict[str, asyncio.Future[OpenNamespace]] = OrderedDict()
        self._endings: list[weakref.finalize[..., Tenant]] = []
        self._turns = FairSemaphore(1)
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="bottega-open")
        self._closer = ThreadPoolExecutor(1, thread_name_prefix="bottega-close")
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self, namespace: str, /) -> Tenant:
        """Return the tenant of a namespace. Raises `StoreError`; the next call tries again."""
        return (await self._open(namespace))[0]

    def base(self, namespace: str) -> KnowledgeBase:
        """Return the gateway's own knowledge base, which stays open while the caller holds it. Call
        it from a thread other than the event loop's. Blocks. Raises `StoreError`."""
        if self._loop is None:
            raise StoreError("the gateway is still starting", hint="try again in a moment")
        opening = asyncio.run_coroutine_threadsafe(self._open(namespace), self._loop)
        tenant, base = opening.result()
        # The tenant holds the base: a reference back would be a cycle, which ends much later.
        held = copy(base)
        vars(held)["tenant"] = tenant
        return held

    def call_soon(self, work: Callable[[], None]) -> None:
        """Schedule work on the event loop, from any thread; do nothing once it is closed."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work)

    async def _open(self, namespace: str) -> OpenNamespace:
        self._loop = asyncio.get_running_loop()
        found = self._opened.get(namespace)
        if found is None:
            found = asyncio.ensure_future(self._open_in_turn(namespace))
            found.add_done_callback(lambda done: self._on_opened(namespace, done))
            # Before the first await: concurrent requests share this opening.
            self._opened[namespace] = found
        self._opened.move_to_end(namespace)
        return await asyncio.shield(found)  # a client that leaves must not cancel it for others

    async def _open_in_turn(self, namespace: str) -> OpenNamespace:
        async with self._turns.hold():
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._opener, self._open_one, namespace)

    def counts(self) -> dict[str, int]:
        """Return the number of examples of each open namespace. Blocks."""
        # A copy: this runs in a thread while the event loop changes the dict.
        done = {name: one.result() for name, one in list(self._opened.items()) if one.done()}
        return {name: len(base) for name, (_, base) in done.items()}

    async def aclose(self) -> None:
        """Close all namespaces, even those that a request still uses. Stored examples are
        durable."""
        # A thread that opens a namespace cannot be stopped: wait, then close what it opened.
        await asyncio.gather(*self._opened.values(), return_exceptions=True)
        self._opened.clear()
        for ending in self._endings:
            ending()
        await asyncio.sleep(0)  # until all closings are submitted
        await asyncio.to_thread(self._closer.shutdown)
        self._opener.shutdown(wait=False)

    def _on_opened(self, namespace: str, done: asyncio.Future[OpenNamespace]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._opened.pop(namespace, None)  # the next request tries again
            return
        tenant, base = done.result()
        # Requests hold the tenant, so its end is the first moment when nothing reads the base.
        ending = weakref.finalize(tenant, self._close_soon, base, namespace)
        ending.atexit = False  # the executor accepts no work at exit
        self._endings = [*(one for one in self._endings if one.alive), ending]
        while len(self._opened) > self._limit:
            self._opened.popitem(last=False)

    def _close_soon(self, base: KnowledgeBase, namespace: str) -> None:
        # Garbage collection may call this anywhere, also within the `submit` of a pool, whose lock
        # is not reentrant.
        self.call_soon(lambda: self._submit_closing(base, namespace))

    def _submit_closing(self, base: KnowledgeBase, namespace: str) -> None:
        self._closer.submit(_close, base, namespace)


def _close(base: KnowledgeBase, namespace: str) -> None:
    try:
        base.close()
    except Exception:
        log.exception("closing the cache of the namespace %r failed", namespace)
