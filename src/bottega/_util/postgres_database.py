"""Blocking access to tables in PostgreSQL."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AsyncExitStack, contextmanager
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING, Any, TypeVar

from bottega._util import postgres
from bottega._util.event_loops import DeferredInterrupt, deferred_interrupts
from bottega._util.postgres import Backoff, PostgresKind, PostgresPool, Setup
from bottega._util.postgres_errors import translated
from bottega.errors import StoreError

if TYPE_CHECKING:
    from asyncpg import Record

log = logging.getLogger(__name__)
T = TypeVar("T")
PoolWork = Callable[[PostgresPool], Coroutine[Any, Any, T]]

IDLE_SECONDS = 0.05  # after which a session looks for a lost connection

_PARENT_SESSIONS: list[_Session] = []
# By URL, kind, `create` and `answer_seconds`.
_SESSION_POOLS: dict[tuple[str, str, bool, float | None], _SessionPool] = {}
_SESSION_POOLS_LOCK = Lock()


def _helper_threads() -> ThreadPoolExecutor:
    """Return threads for callers whose own thread runs an event loop, such as a notebook's."""
    return ThreadPoolExecutor(postgres.POOL_SIZE, "bottega-postgres")


_HELPER_THREADS = _helper_threads()


class _Session:
    """Connection with an event loop that the calling thread runs, one thread at a time. A loop in
    its own thread would cost two thread switches per statement, which take as long as a short
    statement."""

    def __init__(self, pool: PostgresPool) -> None:
        self._loop = asyncio.new_event_loop()
        self._pool = pool
        self._used = time.monotonic()
        self.interrupted = False

    def run(self, work: PoolWork[T], interrupt: DeferredInterrupt) -> T:
        """Run `work`. Raises `CancelledError` after an interrupt."""
        if time.monotonic() - self._used > IDLE_SECONDS:
            self._loop.run_until_complete(_detect_lost_connections())
        task = self._loop.create_task(work(self._pool))
        interrupt.on_cancel(lambda: self._loop.call_soon_threadsafe(task.cancel))
        try:
            return self._loop.run_until_complete(task)
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException:
            # A signal handler of the program may have raised it, and callbacks may be lost.
            self.interrupted = True
            raise
        finally:
            interrupt.on_cancel(lambda: None)
            self._used = time.monotonic()

    def close(self) -> None:
        if self.interrupted:
            self._pool.terminate()
            # One iteration, which closes the socket. Tasks may wait forever for lost callbacks.
            self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()
        else:
            self._loop.run_until_complete(self._pool.close())
        self._loop.close()


async def _detect_lost_connections() -> None:
    """Let the loop process the end of a connection that the server has closed. That takes three
    iterations: start this coroutine, read the end of the stream, notify the connection."""
    for _ in range(3):
        await asyncio.sleep(0)


class _SessionPool:
    """Pool of the sessions of one database: at most `size`, both idle and in use."""

    def __init__(self, new_pool: Callable[[bool], PostgresPool], size: int) -> None:
        self.users = 0
        self._size = size
        self._new_pool, self._migrated = new_pool, False
        self._idle: list[_Session] = []
        self._free = BoundedSemaphore(self._size)
        self._closed = False

    @contextmanager
    def session(self, name: str) -> Iterator[_Session]:
        """Yield a session that no other thread uses. Raises `StoreBusyError` if none is free in
        time. `name` is the name of the database in errors."""
        if not self._free.acquire(timeout=postgres.WAIT_SECONDS):
            with translated(name):
                raise TimeoutError
        try:
            # Do not check the version again: open handles continue after a newer version of the
            # package has migrated the tables.
            session = self._pop_idle() or _Session(self._new_pool(not self._migrated))
            try:
                yield session
                self._migrated = True
            finally:
                if session.interrupted:
                    session.close()
                else:
                    self._idle.append(session)
                    if self._closed:
                        self.close()
        finally:
            self._free.release()

    def close(self) -> None:
        """Close the idle sessions now and the others after their use."""
        self._closed = True
        while (session := self._pop_idle()) is not None:
            _run_outside_loop(session.close, DeferredInterrupt())

    def forget(self) -> None:
        """Start without sessions in a forked process. Those of its parent stay open there, so they
        must neither be closed nor collected here."""
        _PARENT_SESSIONS.extend(self._idle)
        self._idle, self._free = [], BoundedSemaphore(self._size)

    def _pop_idle(self) -> _Session | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None


@atexit.register
def _close_all() -> None:
    for pool in _SESSION_POOLS.values():
        pool.close()


def _start_again() -> None:
    """Replace what a forked process must not share with its parent."""
    global _HELPER_THREADS, _SESSION_POOLS_LOCK
    _HELPER_THREADS, _SESSION_POOLS_LOCK = _helper_threads(), Lock()
    for pool in _SESSION_POOLS.values():
        pool.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_again)


class PostgresDatabase:
    """Handle for blocking callers to the tables of one kind. Handles of this process with the same
    URL, kind, `create` and `answer_seconds` share up to `size` connections. It has the options
    of `PostgresPool`."""

    def __init__(
        self,
        url: str,
        kind: PostgresKind,
        *,
        setup: Setup | None = None,
        answer_seconds: float | None = None,
        create: bool = True,
        migrates: bool = True,
        size: int | None = None,
    ) -> None:
        self.name = postgres.display_url(url)
        self._key = (url, kind.name, create, answer_seconds)
        self._closed = False
        backoff = Backoff()

        def new_pool(is_first: bool) -> PostgresPool:
            return PostgresPool(
                *(url, kind),
                size=1,
                setup=setup,
                answer_seconds=answer_seconds,
                resets=False,
                create=create,
                migrates=is_first and migrates,
                backoff=backoff,
            )

        with _SESSION_POOLS_LOCK:
            sessions = _SessionPool(new_pool, size or postgres.POOL_SIZE)
            self._sessions = _SESSION_POOLS.setdefault(self._key, sessions)
            self._sessions.users += 1

    def run(self, work: PoolWork[T]) -> T:
        """Run `work` with a pool of one connection, and return its result."""
        with deferred_interrupts() as interrupt, self._sessions.session(self.name) as session:
            return _run_outside_loop(lambda: session.run(work, interrupt), interrupt)

    def read(self, statement: str, *values: object) -> list[Record]:
        return self.run(lambda pool: pool.fetch(statement, *values))

    @contextmanager
    def lock(self, *numbers: int) -> Iterator[bool]:
        """Try to take the advisory lock with this key (one or two integers). Yield whether it was
        taken. The server releases it if the connection is lost."""
        stack = AsyncExitStack()
        values = ", ".join(map(str, numbers))

        async def take(pool: PostgresPool) -> bool:
            connection = await stack.enter_async_context(pool.connection(limited=False))
            is_held: bool = await connection.fetchval(f"SELECT pg_try_advisory_lock({values})")
            if is_held:
                stack.push_async_callback(
                    connection.execute, f"SELECT pg_advisory_unlock({values})"
                )
            return is_held

        with self._sessions.session(self.name) as session:
            try:
                yield _run(session, take)
            finally:
                try:
                    if not session.interrupted:  # else closing its connection releases it
                        _run(session, lambda _: stack.aclose())
                except StoreError as error:
                    log.warning("a lock of %s ended early: %s", self.name, error)

    def close(self) -> None:
        """Close the handle, and the connections with the last handle."""
        if self._closed:
            return
        self._closed = True
        with _SESSION_POOLS_LOCK:
            self._sessions.users -= 1
            if self._sessions.users:
                return
            del _SESSION_POOLS[self._key]
        self._sessions.close()


def _run(session: _Session, work: PoolWork[T]) -> T:
    with deferred_interrupts() as interrupt:
        return _run_outside_loop(lambda: session.run(work, interrupt), interrupt)


def _run_outside_loop(work: Callable[[], T], interrupt: DeferredInterrupt) -> T:
    """Call `work` in this thread or, if an event loop is running in it, in a helper thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    called = _HELPER_THREADS.submit(work)
    try:
        return called.result()
    except BaseException:
        # A signal handler of the program may have raised it, while the session is still in use.
        interrupt.cancel()
        wait([called])
        raise
