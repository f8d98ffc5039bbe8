"""Connections to a knowledge base in PostgreSQL, for blocking callers."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bottega._util.postgres import PostgresPool
from bottega._util.postgres_database import PostgresDatabase
from bottega.errors import StoreError
from bottega.knowledge.postgres.schema import KNOWLEDGE_BASE, WRITE_LOCK
from bottega.protocols import Vectors

if TYPE_CHECKING:
    from asyncpg import Connection

T = TypeVar("T")
OLDEST_PGVECTOR = (0, 8)  # the first with iterative scans, which filters need
HEADER = struct.Struct(">HH")  # dimension, unused
# Read committed: each statement in `kb_try_write` must see rows committed before that statement.
SESSION = (
    "SET default_transaction_isolation = 'read committed'; SET hnsw.iterative_scan = relaxed_order;"
    " SET hnsw.ef_search = 100"
)

ANSWER_SECONDS = 15.0
WRITE_SECONDS = 60.0  # a writer may wait for another one


class KnowledgeDatabase(PostgresDatabase):
    """Tables of a knowledge base."""

    def __init__(self, url: str, *, create: bool = True) -> None:
        super().__init__(
            url, KNOWLEDGE_BASE, setup=_set_up, answer_seconds=ANSWER_SECONDS, create=create
        )

    def write(self, work: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
        """Run work in one transaction, one writer at a time. After a lost connection it is not
        repeated, because the server may have committed it."""

        async def transaction(pool: PostgresPool) -> T:
            writing = pool.connection(seconds=WRITE_SECONDS)
            async with writing as connection, _write_transaction(connection):
                return await work(connection)

        return self.run(transaction)


async def _set_up(connection: Connection) -> None:
    found = await connection.fetchrow(
        "SELECT nspname, extversion FROM pg_extension"
        " JOIN pg_namespace ON pg_namespace.oid = extnamespace WHERE extname = 'vector'"
    )
    schema, version = found or ("", "none")
    if found is None or tuple(map(int, version.split(".")[:2])) < OLDEST_PGVECTOR:
        raise StoreError(
            f"the extension vector must have version 0.8 or newer, got {version}",
            hint="install pgvector 0.8 on the server, then run ALTER EXTENSION vector UPDATE",
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
async def _write_transaction(connection: Connection) -> AsyncIterator[None]:
    """Run a transaction that holds the writers' lock. Its start takes one round trip."""
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
            connection.terminate()  # the pool must not reuse a connection that holds the lock
        raise


async def log_changes(connection: Connection, op: str, keys: Sequence[int]) -> None:
    await connection.execute(
        "INSERT INTO kb_changes (op, key, id, namespace) SELECT $1, key, id, namespace"
        " FROM kb_examples WHERE key = ANY($2::bigint[]) ORDER BY key",
        op,
        list(keys),
    )
