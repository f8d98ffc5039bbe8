"""Blocking access to tables in PostgreSQL."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from bottega._util.event_loops import BackgroundLoop
from bottega._util.postgres import PostgresKind, PostgresPool, Setup
from bottega.errors import StoreError

if TYPE_CHECKING:
    from asyncpg import Record

log = logging.getLogger(__name__)
Result = TypeVar("Result")

# A separate loop: blocking methods may be called on the loop that `answer_sync` uses.
_LOOP = BackgroundLoop()
atexit.register(_LOOP.close)
# Pools and their numbers of handles, by URL, kind and `create`.
_POOLS: dict[tuple[str, str, bool], tuple[PostgresPool, int]] = {}
_POOLS_LOCK = Lock()


class PostgresDatabase:
    """Handle for blocking callers to the tables of one kind. All handles of this process with the
    same URL share a pool. The options are those of `PostgresPool`."""

    def __init__(
        self,
        url: str,
        kind: PostgresKind,
        *,
        setup: Setup | None = None,
        answer_seconds: float | None = None,
        create: bool = True,
    ) -> None:
        self._key = (url, kind.name, create)
        self._closed = False
        with _POOLS_LOCK:
            pool, users = _POOLS.get(self._key) or (None, 0)
            pool = pool or PostgresPool(
                *(url, kind),
                setup=setup,
                answer_seconds=answer_seconds,
                resets=False,
                create=create,
            )
            _POOLS[self._key] = (pool, users + 1)
        self.pool = pool
        self.name = pool.name

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine that uses the pool, and return its result."""
        return _LOOP.run(work)

    def read(self, statement: str, *values: object) -> list[Record]:
        return self.run(self.pool.fetch(statement, *values))

    @contextmanager
    def lock(self, number: int) -> Iterator[bool]:
        """Try to take an advisory lock, which ends with its connection. Yield whether it is
        held."""
        stack = AsyncExitStack()

        async def take() -> bool:
            connection = await stack.enter_async_context(self.pool.connection(limited=False))
            free: bool = await connection.fetchval("SELECT pg_try_advisory_lock($1)", number)
            if free:
                stack.push_async_callback(
                    connection.execute, "SELECT pg_advisory_unlock($1)", number
                )
            return free

        try:
            yield self.run(take())
        finally:
            try:
                self.run(stack.aclose())
            except StoreError as error:
                log.warning("a lock of %s ended early: %s", self.name, error)

    def close(self) -> None:
        """Close the handle, and the pool with the last handle."""
        if self._closed:
            return
        self._closed = True
        with _POOLS_LOCK:
            pool, users = _POOLS.pop(self._key)
            if users > 1:
                _POOLS[self._key] = (pool, users - 1)
                return
        self.run(pool.close())
