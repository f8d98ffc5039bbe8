"""Blocking access to tables in PostgreSQL."""

from __future__ import annotations

import asyncio
import atexit
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING, Any, TypeVar

from bottega._util import postgres
from bottega._util.postgres import PostgresKind, PostgresPool, Setup, Silence
from bottega._util.postgres_errors import translated
from bottega.errors import StoreError

if TYPE_CHECKING:
    from asyncpg import Record

log = logging.getLogger(__name__)
Result = TypeVar("Result")
PoolWork = Callable[[PostgresPool], Coroutine[Any, Any, Result]]

IDLE_SECONDS = 1.0
# Threads for callers whose own thread runs an event loop, such as a notebook's.
_HELPERS = ThreadPoolExecutor(postgres.POOL_SIZE, "bottega-postgres")


class _Session:
    """Connection with an event loop that its user runs, one thread at a time. A loop in a thread of
    its own would cost two changes of threads per statement, as long as a short statement takes."""

    def __init__(self, pool: PostgresPool) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._pool = pool
        self._used = time.monotonic()
        self.interrupted = False

    def run(self, work: PoolWork[Result]) -> Result:
        if time.monotonic() - self._used > IDLE_SECONDS:
            self._loop.run_until_complete(_notice_lost_connections())
        task = self._loop.create_task(work(self._pool))
        try:
            return self._loop.run_until_complete(task)
        finally:
            # An exception that is not the task's, such as KeyboardInterrupt, may have lost
            # callbacks of the loop.
            self.interrupted |= not task.done()
            self._used = time.monotonic()

    def close(self) -> None:
        if self.interrupted:
            self._pool.terminate()
        else:
            self._loop.run_until_complete(self._pool.close())
        self._runner.close()


async def _notice_lost_connections() -> None:
    """Let the loop process a connection that the server has closed. That takes three iterations:
    start this coroutine, read the end of the stream, notify the connection."""
    for _ in range(3):
        await asyncio.sleep(0)


class _Sessions:
    """Idle sessions of one database, at most `POOL_SIZE` with those in use."""

    def __init__(self, new_pool: Callable[[bool], PostgresPool]) -> None:
        self.users = 0
        self._new_pool, self._migrated = new_pool, False
        self._idle: list[_Session] = []
        self._free = BoundedSemaphore(postgres.POOL_SIZE)
        self._closed = False

    @contextmanager
    def one(self, name: str) -> Iterator[_Session]:
        """Yield a session that no other thread uses."""
        if not self._free.acquire(timeout=postgres.WAIT_SECONDS):
            with translated(name):
                raise TimeoutError
        try:
            # An open handle goes on if a newer version has migrated the tables.
            session = self._taken() or _Session(self._new_pool(not self._migrated))
            try:
                yield session
                self._migrated = True
            finally:
                if session.interrupted:
                    _outside_loops(session.close)
                else:
                    self._idle.append(session)
                    if self._closed:
                        self.close()
        finally:
            self._free.release()

    def close(self) -> None:
        """Close the idle sessions, and the others after their use."""
        self._closed = True
        while (session := self._taken()) is not None:
            _outside_loops(session.close)

    def _taken(self) -> _Session | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None


_SESSIONS: dict[tuple[str, str, bool], _Sessions] = {}  # by URL, kind and `create`
_SESSIONS_LOCK = Lock()


@atexit.register
def _close_all() -> None:
    for sessions in _SESSIONS.values():
        sessions.close()


class PostgresDatabase:
    """Handle for blocking callers to the tables of one kind. All handles of this process with the
    same URL share their connections. The options are those of `PostgresPool`."""

    def __init__(
        self,
        url: str,
        kind: PostgresKind,
        *,
        setup: Setup | None = None,
        answer_seconds: float | None = None,
        create: bool = True,
    ) -> None:
        self.name = postgres.display_url(url)
        self._key = (url, kind.name, create)
        self._closed = False
        silence = Silence()

        def new_pool(migrates: bool) -> PostgresPool:
            return PostgresPool(
                *(url, kind),
                size=1,
                setup=setup,
                answer_seconds=answer_seconds,
                resets=False,
                create=create,
                migrates=migrates,
                silence=silence,
            )

        with _SESSIONS_LOCK:
            self._sessions = _SESSIONS.setdefault(self._key, _Sessions(new_pool))
            self._sessions.users += 1

    def run(self, work: PoolWork[Result]) -> Result:
        """Run a coroutine with a pool of one connection, and return its result."""
        with self._sessions.one(self.name) as session:
            return _outside_loops(lambda: session.run(work))

    def read(self, statement: str, *values: object) -> list[Record]:
        return self.run(lambda pool: pool.fetch(statement, *values))

    @contextmanager
    def lock(self, *numbers: int) -> Iterator[bool]:
        """Try to take the advisory lock of one or two numbers, which ends with its connection.
        Yield whether it is held."""
        stack = AsyncExitStack()
        values = ", ".join(map(str, numbers))

        async def take(pool: PostgresPool) -> bool:
            connection = await stack.enter_async_context(pool.connection(limited=False))
            free: bool = await connection.fetchval(f"SELECT pg_try_advisory_lock({values})")
            if free:
                stack.push_async_callback(
                    connection.execute, f"SELECT pg_advisory_unlock({values})"
                )
            return free

        with self._sessions.one(self.name) as session:
            try:
                yield _outside_loops(lambda: session.run(take))
            finally:
                try:
                    if not session.interrupted:  # else its connection is closed, with the lock
                        _outside_loops(lambda: session.run(lambda _: stack.aclose()))
                except StoreError as error:
                    log.warning("a lock of %s ended early: %s", self.name, error)

    def close(self) -> None:
        """Close the handle, and the connections with the last handle."""
        if self._closed:
            return
        self._closed = True
        with _SESSIONS_LOCK:
            self._sessions.users -= 1
            if self._sessions.users:
                return
            del _SESSIONS[self._key]
        self._sessions.close()


def _outside_loops(work: Callable[[], Result]) -> Result:
    """Call in this thread or, if an event loop runs in it, in another one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    return _HELPERS.submit(work).result()
