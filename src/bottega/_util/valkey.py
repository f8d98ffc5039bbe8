"""Clients for Valkey and Redis, with translated errors, and commands over one shared connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha1
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bottega.errors import (
    SettingError,
    StoreBusyError,
    StoreError,
    StoreUnavailableError,
    require_extra,
)

if TYPE_CHECKING:
    from valkey.asyncio import Connection

Argument = str | bytes | int | float

if TYPE_CHECKING:
    from valkey.asyncio import Valkey

SCHEMES = ("redis://", "rediss://", "valkey://", "valkeys://")
ANSWER_SECONDS = 2.0
MAX_CONNECTIONS = 50


def is_valkey_url(text: object) -> bool:
    return isinstance(text, str) and text.startswith(SCHEMES)


def display_valkey_url(url: str) -> str:
    """Return host, port and database of a URL, without user, password and options."""
    parts = urlsplit(url)
    try:
        port = parts.port or 6379
    except ValueError as error:
        raise SettingError(
            "the port of a Redis URL must be a number up to 65535", hint="write redis://host:6379/0"
        ) from error
    if "@" in parts.path + parts.query + parts.fragment:
        raise SettingError(
            "the user or password of a Redis URL contains a / ? or #",
            hint="write redis://user:password@host:6379/0; %2F stands for / and %40 for @",
        )
    return f"redis://{parts.hostname or 'localhost'}:{port}/{parts.path.lstrip('/') or 0}"


def valkey_client(url: str) -> Valkey:
    """Return a client for one event loop, which connects at first use. A command is retried once if
    its connection was lost, for example by a restart of the server. Raises
    `MissingDependencyError`."""
    require_extra("valkey", "shared")
    from valkey.asyncio import BlockingConnectionPool, Valkey
    from valkey.asyncio.retry import Retry
    from valkey.backoff import NoBackoff
    from valkey.exceptions import ConnectionError

    with valkey_errors(display_valkey_url(url)):
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=ANSWER_SECONDS,
            socket_timeout=ANSWER_SECONDS,
            socket_connect_timeout=ANSWER_SECONDS,
            retry=Retry(NoBackoff(), 1),
            retry_on_error=[ConnectionError],
        )
        return Valkey.from_pool(pool)


@contextmanager
def valkey_errors(name: str) -> Iterator[None]:
    """Translate errors of the client and of the network into those of Bottega."""
    from valkey.exceptions import AuthenticationError, BusyLoadingError, ResponseError, ValkeyError

    try:
        yield
    except (AuthenticationError, ValueError) as error:
        raise StoreError(
            f"{name} rejects the user, the password or the options of its URL",
            hint="correct the URL in state.redis or its environment variable",
        ) from error
    except BusyLoadingError as error:
        raise StoreBusyError(
            f"{name} is loading its data", hint="try again when it has loaded"
        ) from error
    except ResponseError as error:
        if str(error).startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
            raise StoreError(
                f"{name} rejects the user or the password",
                hint="correct the URL in state.redis or its environment variable",
            ) from error
        raise StoreBusyError(f"{name} refuses a command: {error}", hint="check its log") from error
    except (ValkeyError, OSError, TimeoutError) as error:
        raise StoreUnavailableError(
            f"{name} cannot be reached: {type(error).__name__}",
            hint="start the server, or correct host and port in state.redis",
        ) from error


class ValkeyPipe:
    """Connection for one event loop, opened by the first command. A command is retried once if its
    connection was lost, for example by a restart of the server. Raises `MissingDependencyError`.

    The client of the package `valkey` uses a connection for one command at a time and spends 90 to
    120 microseconds of CPU on each. Here concurrent commands are sent together, which costs 15 to
    30 microseconds each.
    """

    def __init__(self, url: str) -> None:
        self.name = display_valkey_url(url)
        self._client = valkey_client(url)
        self._connection: Connection | None = None
        self._replies: _Replies | None = None
        self._opening, self._is_closed = asyncio.Lock(), False

    async def run(self, *command: Argument) -> Any:
        """Return the reply to a command: None, an integer, bytes, or a list. Raises
        `StoreError`."""
        replies = self._replies
        if replies is not None and not replies.is_lost:
            reply = await replies.send(command)
            if not isinstance(reply, Exception):
                return reply
        else:
            reply = None
        return await self._retry(command, reply)

    def script(self, text: str) -> ValkeyScript:
        return ValkeyScript(self, text)

    async def aclose(self) -> None:
        async with self._opening:  # a command in progress must not connect again
            self._is_closed = True
            if self._connection is not None:
                await self._connection.disconnect(nowait=True)
        await self._client.aclose()

    async def _retry(self, command: Sequence[Argument], error: Exception | None) -> Any:
        """Connect and send a command that was not sent or whose connection was lost. Raise any
        other error."""
        from valkey.exceptions import ConnectionError

        with valkey_errors(self.name):
            if error is not None and not isinstance(error, ConnectionError):
                raise error
            reply = await (await self._opened()).send(command)
            if isinstance(reply, Exception):
                raise reply
            return reply

    async def _opened(self) -> _Replies:
        async with self._opening:
            if self._is_closed:
                raise StoreError(f"{self.name} is closed", hint="open it again")
            if self._replies is not None and not self._replies.is_lost:
                return self._replies
            if self._connection is not None:
                await self._connection.disconnect(nowait=True)
            # It encrypts, authenticates and selects the database according to the URL. Then the
            # protocol below takes over its transport.
            connection: Any = self._client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
            self._connection = connection  # first: a cancelled attempt may have opened its socket
            await connection.connect()
            transport: asyncio.Transport = connection._writer.transport
            self._replies = _Replies(transport)
            transport.set_protocol(self._replies)
            return self._replies


class ValkeyScript:
    """Lua script, sent once to each server and then called by its hash."""

    def __init__(self, pipe: ValkeyPipe, text: str) -> None:
        self._pipe, self._text = pipe, text
        self._hash = sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, keys: Sequence[Argument], values: Sequence[Argument]) -> Any:
        try:
            return await self._pipe.run("EVALSHA", self._hash, len(keys), *keys, *values)
        except StoreBusyError as error:
            if not str(error.__cause__).startswith("NOSCRIPT"):
                raise
        return await self._pipe.run("EVAL", self._text, len(keys), *keys, *values)


class _Replies(asyncio.Protocol):
    """Protocol that matches replies to commands by their order. It disconnects a server that does
    not reply within `ANSWER_SECONDS`."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.is_lost = False
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._unsent: list[tuple[bytes, asyncio.Future[Any]]] = []
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._received = b""
        self._timer: asyncio.TimerHandle | None = None

    def send(self, command: Sequence[Argument]) -> asyncio.Future[Any]:
        """Send a command at the end of this iteration of the event loop, or after the replies to
        earlier commands, which saves system calls. The reply may be an exception."""
        reply = self._loop.create_future()
        if not self._unsent and not self._waiting:
            self._loop.call_soon(self._write)
        self._unsent.append((packed(command), reply))
        if self._timer is None:
            self._timer = self._loop.call_later(ANSWER_SECONDS, self._check_timeout)
        return reply

    def data_received(self, data: bytes) -> None:
        if self._received:
            data = self._received + data
        at = 0
        try:
            while at < len(data):
                value, at = parsed(data, at)
                reply, _ = self._waiting.popleft()
                if not reply.done():  # else its caller was cancelled
                    reply.set_result(value)
        except IncompleteReplyError:
            pass
        self._received = data[at:]
        if self._unsent and not self._waiting:
            self._write()

    def connection_lost(self, error: Exception | None) -> None:
        from valkey.exceptions import ConnectionError

        self._end(ConnectionError("the connection was closed"))

    def _write(self) -> None:
        unsent, self._unsent = self._unsent, []
        if not self.is_lost:
            now = self._loop.time()
            self._waiting.extend((reply, now) for _, reply in unsent)
            self._transport.write(b"".join(command for command, _ in unsent))

    def _check_timeout(self) -> None:
        from valkey.exceptions import TimeoutError

        self._timer = None
        if not self._waiting:
            return
        left = self._waiting[0][1] + ANSWER_SECONDS - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_timeout)
        else:
            self._end(TimeoutError("no reply in time"))
            self._transport.abort()

    def _end(self, error: Exception) -> None:
        self.is_lost = True
        if self._timer is not None:
            self._timer.cancel()
        ended = [reply for reply, _ in self._waiting] + [reply for _, reply in self._unsent]
        self._waiting.clear()
        self._unsent.clear()
        for reply in ended:
            if not reply.done():
                reply.set_result(error)


class IncompleteReplyError(Exception):
    """The reply has not arrived completely."""


def packed(command: Sequence[Argument]) -> bytes:
    """Encode a command in the RESP protocol, as an array of strings."""
    parts = [b"*%d" % len(command)]
    for one in command:
        data = one if isinstance(one, bytes) else str(one).encode()
        parts += b"$%d" % len(data), data
    return b"\r\n".join((*parts, b""))


def parsed(data: bytes, at: int) -> tuple[Any, int]:
    """Decode the RESP 2 value that begins at a position. Return it and the position after it. Error
    replies are returned, not raised. Raises `IncompleteReplyError`."""
    end = data.find(b"\r\n", at)
    if end < 0:
        raise IncompleteReplyError
    kind, line, after = data[at], data[at + 1 : end], end + 2
    match kind:
        case 0x24:  # "$", a string
            return _string(data, int(line), after)
        case 0x2A:  # "*", an array
            return _array(data, int(line), after)
        case 0x3A:  # ":"
            return int(line), after
        case 0x2D:  # "-"
            return _error(line.decode(errors="replace")), after
        case _:
            return line, after


def _string(data: bytes, length: int, at: int) -> tuple[bytes | None, int]:
    if length < 0:
        return None, at
    end = at + length
    if len(data) < end + 2:
        raise IncompleteReplyError
    return data[at:end], end + 2


def _array(data: bytes, length: int, at: int) -> tuple[list[Any] | None, int]:
    if length < 0:
        return None, at
    values = []
    for _ in range(length):
        value, at = parsed(data, at)
        values.append(value)
    return values, at


def _error(text: str) -> Exception:
    from valkey.exceptions import BusyLoadingError, ResponseError

    return BusyLoadingError(text) if text.startswith("LOADING") else ResponseError(text)
