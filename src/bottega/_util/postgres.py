"""PostgreSQL: URLs, pools of connections, and migrations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit, urlunsplit

from bottega._util.postgres_errors import no_answer, translated, unavailable
from bottega._util.store_kind import StoreKind
from bottega.errors import SettingError, StoreError, StoreUnavailableError, require_extra

if TYPE_CHECKING:
    from asyncpg import Connection, Pool, Record

SCHEMES = ("postgresql://", "postgres://")
CONNECT_SECONDS = 10.0
URL = "write postgresql://user@host:5432/database; in user and password, %2F for / and %40 for @"
CANCEL_SECONDS = 2.0
BACKOFF_SECONDS = 5.0
WAIT_SECONDS = 10.0  # for a free connection
MIGRATE_SECONDS = 600.0  # of large tables, or for the migration of another process
POOL_SIZE = 10
SCHEMAS = "bottega_schemas"  # version and hash of each kind of tables
DEVELOPMENT_SCHEMAS = "bottega_migrations"  # of development versions, which stored no hash
MIGRATION_LOCK = 0x42747467  # "Bttg", an advisory lock of the database

Setup = Callable[["Connection"], Coroutine[Any, Any, None]]


def is_postgres_url(text: object) -> bool:
    return isinstance(text, str) and text.startswith(SCHEMES)


def postgres_url(path: object) -> str | None:
    """Return the URL of a location, None if it is not a PostgreSQL URL. Restore the second slash,
    which `Path` removes."""
    text = str(path)
    for scheme in SCHEMES:
        short = scheme[:-1]  # one slash
        if text.startswith(short) and not text.startswith(scheme):
            text = scheme + text.removeprefix(short)
    return text if is_postgres_url(text) else None


def display_url(url: str) -> str:
    """Return host, port and database of a URL, without user, password and options."""
    parts = _split(url)
    port = f":{parts.port}" if parts.port else ""
    return f"postgresql://{parts.hostname or 'localhost'}{port}/{parts.path.lstrip('/')}"


def _split(url: str) -> SplitResult:
    """Return the parts of a URL. Raises `SettingError` for an invalid host or port."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise SettingError(
            "the host or the port of a PostgreSQL URL is invalid", hint=URL
        ) from error
    if "@" in parts.path + parts.fragment or ("@" in parts.query and "@" not in parts.netloc):
        raise SettingError("the user of a PostgreSQL URL contains a / ? or #", hint=URL)
    return parts


class PostgresKind(StoreKind):
    """Kind of tables in a database. All migrations run in one transaction. Version and hash are in
    the table `bottega_schemas`."""


@dataclass
class Backoff:
    """Period in which calls fail immediately because the server did not answer an earlier one.
    Several pools of one database may share it."""

    until: float = 0.0  # time.monotonic(); 0 if the last call was answered

    def begin(self) -> None:
        self.until = time.monotonic() + BACKOFF_SECONDS


class PostgresPool:
    """Pool of connections for one event loop.

    The first use connects and, with `migrates`, migrates the tables of `kind`; without `create`,
    the tables must exist. `setup` runs on each new connection, after the migration. A connection
    that is used for longer than `answer_seconds` is closed, because the server may hang. With
    `resets=False`, which saves a round trip per use, callers must leave no session state. All
    methods raise `StoreError`, and `MissingDependencyError` without asyncpg.
    """

    def __init__(
        self,
        url: str,
        kind: PostgresKind,
        *,
        size: int = POOL_SIZE,
        setup: Setup | None = None,
        answer_seconds: float | None = None,
        resets: bool = True,
        create: bool = True,
        migrates: bool = True,
        backoff: Backoff | None = None,
    ) -> None:
        self.name = display_url(url)
        self._answer_seconds, self._resets, self._create = answer_seconds, resets, create
        self._url, self._kind, self._size, self._setup = url, kind, size, setup
        self._pool: Pool | None = None
        # One idle connection stays acquired, because acquiring and releasing it takes half as long
        # as a short statement.
        self._idle: Connection | None = None
        self._waiting = 0
        self._migrates, self._backoff = migrates, backoff or Backoff()
        self._opening = asyncio.Lock()

    @classmethod
    async def open(
        cls, url: str, kind: PostgresKind, *, size: int = POOL_SIZE, setup: Setup | None = None
    ) -> PostgresPool:
        """Return a connected pool."""
        pool = cls(url, kind, size=size, setup=setup)
        await pool._opened()
        return pool

    @asynccontextmanager
    async def connection(
        self, *, seconds: float | None = None, limited: bool = True
    ) -> AsyncIterator[Connection]:
        """Yield a connection of the pool. Raises `StoreBusyError` if none is free in time or, with
        `limited`, if it is used for longer than `seconds` (default: `answer_seconds`).

        After a call without an answer, calls raise immediately for `BACKOFF_SECONDS`. Then one call
        tries again."""
        self._check_backoff()
        seconds = (seconds or self._answer_seconds) if limited else None
        pool = self._pool or await self._opened()
        with translated(self.name):
            connection, is_kept = await self._acquired(pool), False
            try:
                async with asyncio.timeout(seconds):
                    yield connection
                self._backoff.until = 0.0
                is_kept = self._keeps(connection)
            except asyncio.CancelledError:
                # The server may not answer: do not wait longer for the end of the statement.
                with suppress(TimeoutError):
                    await pool.release(connection, timeout=CANCEL_SECONDS)
                raise
            except TimeoutError as error:
                self._backoff.begin()
                # Otherwise its release waits until the server has cancelled the statement.
                connection.terminate()
                raise no_answer(self.name, seconds) from error
            finally:
                if not is_kept:
                    await pool.release(connection)

    def _check_backoff(self) -> None:
        if time.monotonic() < self._backoff.until:
            raise unavailable(self.name, "it did not answer an earlier call")
        if self._backoff.until:  # this call tries again, others raise
            self._backoff.begin()

    async def _acquired(self, pool: Pool) -> Connection:
        idle, self._idle = self._idle, None
        if idle is not None and _is_open(idle):
            return idle
        seconds = min(self._answer_seconds or WAIT_SECONDS, WAIT_SECONDS)
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds):
                return await pool.acquire()  # its own timeout would create a task
        except TimeoutError as error:
            if pool.get_size() == self._size:
                raise  # all connections are in use
            self._backoff.begin()
            raise unavailable(self.name, f"no answer in {seconds:g} s") from error
        finally:
            self._waiting -= 1

    def _keeps(self, connection: Connection) -> bool:
        """Keep the connection for the next use if possible. Return False if the caller must release
        it."""
        if self._resets or self._idle or self._waiting or not _is_open(connection):
            return False
        self._idle = connection
        return True

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        async with self.connection() as connection, connection.transaction():
            yield connection

    async def fetch(self, statement: str, *values: object) -> list[Record]:
        """Return the rows of a statement that may run twice: it is retried once if the connection
        was lost, for example by a restart of the server."""
        try:
            return await self._fetch(statement, *values)
        except StoreUnavailableError:
            if self._backoff.until:
                raise
            return await self._fetch(statement, *values)

    async def execute(self, statement: str, *values: object) -> str:
        """Run one statement in its own transaction. Return its status, for example "DELETE 2"."""
        async with self.connection() as connection:
            status: str = await connection.execute(statement, *values)
            return status

    async def close(self) -> None:
        """Close all connections. Those in use have `WAIT_SECONDS` to finish, or no time if the
        server did not answer an earlier call."""
        if self._pool is None or self._backoff.until:
            self.terminate()
            return
        with translated(self.name):
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    if self._idle is not None:
                        await self._pool.release(self._idle)
                    await self._pool.close()
            except TimeoutError:
                self._backoff.begin()
                self.terminate()

    def terminate(self) -> None:
        """Close all connections without waiting."""
        if self._pool is not None:
            self._pool.terminate()

    async def _opened(self) -> Pool:
        require_extra("asyncpg", "shared")
        import asyncpg

        async with self._opening:
            if self._pool is None:
                with translated(self.name):
                    if self._migrates:
                        await self._migrate()
                    self._pool = await asyncpg.create_pool(
                        self._url,
                        min_size=0,
                        max_size=self._size,
                        init=self._setup,
                        reset=None if self._resets else _keep_session,
                        timeout=CONNECT_SECONDS,
                    )
            return self._pool

    async def _migrate(self) -> None:
        """Check the version of the tables, and migrate them if it is not the current one. Both have
        a time limit, because a server may hang after it has accepted the connection."""
        connection = await self._connected()
        seconds = self._answer_seconds or WAIT_SECONDS
        try:
            async with asyncio.timeout(seconds):
                found = await _checked_version(connection, self._kind, self.name)
            if found != self._kind.version:
                seconds = MIGRATE_SECONDS
                async with asyncio.timeout(seconds):
                    await _migrate(connection, self._kind, self.name, self._create)
            with suppress(TimeoutError):
                await connection.close(timeout=CANCEL_SECONDS)
        except TimeoutError as error:
            self._backoff.begin()
            raise no_answer(self.name, seconds) from error
        finally:
            connection.terminate()  # changes nothing if it is closed

    async def _connected(self) -> Connection:
        import asyncpg

        try:
            return await asyncpg.connect(self._url, timeout=CONNECT_SECONDS)
        except TimeoutError as error:
            self._backoff.begin()
            raise unavailable(self.name, f"no answer in {CONNECT_SECONDS:g} s") from error

    async def _fetch(self, statement: str, *values: object) -> list[Record]:
        async with self.connection() as connection:
            rows: list[Record] = await connection.fetch(statement, *values)
            return rows


def _is_open(connection: Connection) -> bool:
    """Return whether the connection was open when the event loop last ran."""
    import asyncpg

    try:
        return not connection.is_closed()
    except asyncpg.InterfaceError:  # the connection was lost and the pool has released it
        return False


async def _keep_session(connection: Connection) -> None:
    pass


async def _migrate(connection: Connection, kind: PostgresKind, name: str, create: bool) -> None:
    """Migrate the tables to the current version. Several processes may do so at once."""
    if not (create or await _checked_version(connection, kind, name)):
        raise StoreError(f"{name} contains no {kind.name}", hint="correct the database in the URL")
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", MIGRATION_LOCK)
        await connection.execute(
            f"CREATE TABLE IF NOT EXISTS {SCHEMAS}"
            " (kind text PRIMARY KEY, version integer NOT NULL, digest text NOT NULL)"
        )
        # Check again under the lock: another process may have migrated.
        found = await _checked_version(connection, kind, name)
        for migration in kind.migrations[found:]:
            await connection.execute(migration)
        await connection.execute(
            f"INSERT INTO {SCHEMAS} VALUES ($1, $2, $3) ON CONFLICT (kind)"
            " DO UPDATE SET version = excluded.version, digest = excluded.digest",
            kind.name,
            kind.version,
            kind.digest(kind.version),
        )


async def _checked_version(connection: Connection, kind: PostgresKind, name: str) -> int:
    """Return the version of the tables, 0 without any. Raises `StoreError` as `kind.check`."""
    found = await _schema(connection, kind, SCHEMAS, "digest")
    found = found or await _schema(connection, kind, DEVELOPMENT_SCHEMAS, "NULL")
    if found is None:
        return 0
    kind.check(name, *found)
    return int(found[0])


async def _schema(
    connection: Connection, kind: PostgresKind, table: str, digest: str
) -> Record | None:
    """Return the version and the hash that a table contains for a kind."""
    if not await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", table):
        return None
    statement = f"SELECT version, {digest} FROM {table} WHERE kind = $1"
    return await connection.fetchrow(statement, kind.name)


def url_without_password(url: str) -> str:
    """Return the URL without passwords."""
    parts = _split(url)
    credentials, at, host = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    options = [one for one in parts.query.split("&") if not _is_password(one.partition("=")[0])]
    netloc = f"{user}{at}{host}" if user else host
    return urlunsplit((parts.scheme, netloc, parts.path, "&".join(options), ""))


def has_password(url: str) -> bool:
    parts = _split(url)
    return bool(parts.password) or any(map(_is_password, parse_qs(parts.query)))


def _is_password(option: str) -> bool:
    return unquote(option).lower().endswith("password")  # also sslpassword
