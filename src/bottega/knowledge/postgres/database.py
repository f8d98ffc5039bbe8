"""Connections to a knowledge base in PostgreSQL, for blocking callers."""

from __future__ import annotations

import atexit
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bottega._util.event_loops import BackgroundLoop
from bottega._util.postgres import PostgresPool
from bottega.errors import StoreError
from bottega.knowledge.postgres.schema import FILL_LOCK, KNOWLEDGE_BASE, WRITE_LOCK
from bottega.protocols import Vectors

if TYPE_CHECKING:
    from asyncpg import Connection, Record

Result = TypeVar("Result")
OLDEST_PGVECTOR = (0, 8)  # the first with iterative scans, which filters need
HEADER = struct.Struct(">HH")  # dimension, unused
SESSION = "SET hnsw.iterative_scan = relaxed_order; SET hnsw.ef_search = 100"

ANSWER_SECONDS = 60.0  # a statement of a large base may wait for another writer

# A loop of its own: blocking methods may be called on the loop that `answer_sync` uses.
_LOOP = BackgroundLoop()
atexit.register(_LOOP.close)
# With the number of handles, by URL and `create`.
_POOLS: dict[tuple[str, bool], tuple[PostgresPool, int]] = {}
_POOLS_LOCK = Lock()


class PostgresDatabase:
    """Pool of connections that all handles of a URL in this process share."""

    def __init__(self, url: str, *, create: bool = True) -> None:
        self._key = (url, create)
        self._closed = False
        with _POOLS_LOCK:
            pool, users = _POOLS.get(self._key) or (_new_pool(url, create), 0)
            _POOLS[self._key] = (pool, users + 1)
        self.pool = pool
        self.name = pool.name

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine that uses the pool, and return its result."""
        return _LOOP.run(work)

    def read(self, statement: str, *values: object) -> list[Record]:
        return self.run(self.pool.fetch(statement, *values))

    def write(self, work: Callable[[Connection], Coroutine[Any, Any, Result]]) -> Result:
        """Run work in one transaction of the only writer. It is not repeated after a lost
        connection, because its commit may have arrived."""

        async def transaction() -> Result:
            async with self.pool.connection() as connection, _only_writer(connection):
                return await work(connection)

        return self.run(transaction())

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold a lock of the database, which ends with its connection; yield whether it was
        free."""
        stack = AsyncExitStack()

        async def take() -> bool:
            connection = await stack.enter_async_context(self.pool.connection(limited=False))
            free: bool = await connection.fetchval("SELECT pg_try_advisory_lock($1)", FILL_LOCK)
            if free:
                stack.push_async_callback(
                    connection.execute, "SELECT pg_advisory_unlock($1)", FILL_LOCK
                )
            return free

        try:
            yield self.run(take())
        finally:
            self.run(stack.aclose())

    def close(self) -> None:
        """Close the pool with its last handle."""
        if self._closed:
            return
        self._closed = True
        with _POOLS_LOCK:
            pool, users = _POOLS.pop(self._key)
            if users > 1:
                _POOLS[self._key] = (pool, users - 1)
                return
        self.run(pool.close())


def _new_pool(url: str, create: bool) -> PostgresPool:
    return PostgresPool(
        url,
        KNOWLEDGE_BASE,
        setup=_set_up,
        answer_seconds=ANSWER_SECONDS,
        resets=False,
        create=create,
    )


async def _set_up(connection: Connection) -> None:
    found = await connection.fetchrow(
        "SELECT nspname, extversion FROM pg_extension"
        " JOIN pg_namespace ON pg_namespace.oid = extnamespace WHERE extname = 'vector'"
    )
    schema, version = found or ("", "none")
    if found is None or tuple(map(int, version.split(".")[:2])) < OLDEST_PGVECTOR:
        raise StoreError(
            f"the extension vector must have version 0.8 or newer, got {version}",
            hint="install pgvector 0.8 on the server, then ALTER EXTENSION vector UPDATE",
        )
    await connection.set_type_codec(
        "vector", schema=schema, encoder=_encoded, decoder=_decoded, format="binary"
    )
    await connection.execute(SESSION)


def _encoded(vector: Vectors) -> bytes:
    return HEADER.pack(len(vector), 0) + np.asarray(vector, ">f4").tobytes()


def _decoded(data: bytes) -> Vectors:
    return np.frombuffer(data, ">f4", offset=HEADER.size).astype(np.float32)


@asynccontextmanager
async def _only_writer(connection: Connection) -> AsyncIterator[None]:
    """Run a transaction with the lock of writers; its start takes one round trip."""
    await connection.execute(
        f"BEGIN ISOLATION LEVEL READ COMMITTED; SELECT pg_advisory_xact_lock({WRITE_LOCK})"
    )
    try:
        yield
        await connection.execute("COMMIT")
    except BaseException:
        try:
            await connection.execute("ROLLBACK")
        except BaseException:
            connection.terminate()  # the pool must not lend a connection that holds the lock
        raise


async def log_changes(connection: Connection, op: str, keys: Sequence[int]) -> None:
    await connection.execute(
        "INSERT INTO kb_changes (op, key, id, namespace) SELECT $1, key, id, namespace"
        " FROM kb_examples WHERE key = ANY($2::bigint[]) ORDER BY key",
        op,
        list(keys),
    )
