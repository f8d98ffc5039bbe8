"""HTTP client of OpenAI-compatible endpoints: sessions, size limits, retries, errors."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import random
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import TypeVar
from urllib.parse import quote, quote_plus, unquote, unquote_plus
from urllib.request import getproxies, proxy_bypass
from weakref import WeakKeyDictionary

import aiohttp
from yarl import URL

from bottega.errors import (
    EndpointError,
    EndpointTimeoutError,
    GarbledError,
    ServerFailedError,
    SettingError,
    UnreachableError,
)
from bottega.generation.openai_format import status_error

Redact = Callable[[str], str]
# Shorter ones are no secrets, and would hide ordinary words.
SHORTEST = 4
LOOKS_SECRET = r"\b(?:sk|key|pk)-[\w*-]{6,}|\bbearer\s+\S+|(?<=://)[^/@\s]+(?=@)"


def redactor(secrets: Iterable[str]) -> Redact:
    """Hides these secrets, however they are quoted, and whatever looks like a credential."""
    ways = {way for secret in secrets for way in _ways(secret) if len(way) >= SHORTEST}
    longest_first = sorted(ways, key=len, reverse=True)
    pattern = re.compile("|".join([*map(re.escape, longest_first), LOOKS_SECRET]), re.IGNORECASE)
    return lambda text: pattern.sub("[redacted]", text)


def _ways(secret: str) -> Iterator[str]:
    for plain in (secret, unquote(secret), unquote_plus(secret)):
        yield from (plain, quote(plain), quote(plain, safe=""), quote_plus(plain))


LONGEST_MESSAGE = 300
LONGEST_READ = 64 * 1024  # of a message; searching megabytes for secrets would take seconds
NO_HEADERS: Mapping[str, str] = {}


def failed(
    endpoint: Endpoint,
    model: str,
    status: int,
    said: str,
    headers: Mapping[str, str] = NO_HEADERS,
) -> EndpointError:
    """The server's advice in the headers, when to try again and whether at all, is followed."""
    error = status_error(status, shown(endpoint, said), endpoint.shown, model)
    error.retry_after = asked_wait(headers)
    if (advice := headers.get("x-should-retry")) in ("true", "false"):
        error.retryable = advice == "true"
    return error


def shown(endpoint: Endpoint, said: str) -> str:
    """One line of what a server said, without the secrets that it may repeat."""
    redacted = endpoint.redact(said) if len(said) < LONGEST_READ else ""
    return " ".join(redacted.split())[:LONGEST_MESSAGE]


Result = TypeVar("Result")


@dataclass(frozen=True)
class Retrying:
    """Exponential back-off with full jitter; a wait that the server asks for goes first.

    Seconds. Gives up when `attempts` are spent, when the server asks for more than `longest_wait`,
    or when all waits together would exceed `longest_total`.
    """

    attempts: int = 5
    first_wait: float = 0.5
    longest_wait: float = 60.0
    longest_total: float = 300.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = field(default_factory=lambda: random.Random().random)

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise SettingError(
                f"{self.attempts} attempts are none", hint="use 1 or more (retries=0 or more)"
            )

    async def __call__(self, attempt: Callable[[], Awaitable[Result]]) -> Result:
        waited = 0.0
        for number in range(self.attempts):
            try:
                return await attempt()
            except EndpointError as error:
                wait = self.wait(number, error.retry_after)
                spent = number + 1 == self.attempts or waited + wait > self.longest_total
                if spent or not error.retryable or (error.retry_after or 0) > self.longest_wait:
                    raise
            waited += wait
            await self.sleep(wait)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def wait(self, number: int, asked: float | None) -> float:
        """After the failure of attempt `number` (from 0), of which the server said `asked`.

        What is asked for is stretched by up to a tenth: all clients were told the same time.
        """
        if asked is not None:
            return asked * (1 + self.random() / 10)
        ceiling = min(self.longest_wait, self.first_wait * 2.0**number)
        return ceiling * self.random()


def asked_wait(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Seconds from `retry-after-ms` or `retry-after` (seconds or an HTTP date)."""
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    text = headers.get("retry-after")
    seconds = _number(text)
    if seconds is not None or text is None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now())
    except (ValueError, OverflowError):  # years and offsets beyond what a date may have
        return None


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


# A few compressed kilobytes can unpack to gigabytes.
LONGEST_MB = 64
LONGEST_AT_ONCE = 1 << 20
HINT = "is the server running there? OPENAI_BASE_URL (or base_url=) sets another address"
NO_CONNECTION = {
    aiohttp.ClientConnectorDNSError: "has no address: the host name is unknown",
    aiohttp.ClientConnectorCertificateError: "has no valid TLS certificate",
    aiohttp.ClientSSLError: "has no valid TLS certificate",
    aiohttp.InvalidURL: "is not an address that can be called",
    aiohttp.ClientHttpProxyError: "cannot be reached through the proxy",
    aiohttp.ConnectionTimeoutError: "does not accept connections",
}


@dataclass(slots=True)
class Response:
    status: int
    headers: Mapping[str, str]
    payload: bytes


async def exchange(
    session: aiohttp.ClientSession,
    method: str,
    url: URL,
    body: bytes | None,
    where: str,
    timeout: aiohttp.ClientTimeout | None = None,
) -> Response:
    """Raises `UnreachableError`, `EndpointTimeoutError`, `ServerFailedError`, `GarbledError`."""
    try:
        async with session.request(
            method,
            url,
            data=sendable(body),
            allow_redirects=False,
            timeout=timeout or session.timeout,
        ) as response:
            payload = await read_whole(response, where)
            return Response(response.status, response.headers, payload)
    except (aiohttp.ClientError, OSError) as error:
        # The cause is left out: aiohttp's errors hold the whole URL and its secrets.
        raise translated(error, where, (timeout or session.timeout).total) from None


def sendable(body: bytes | None) -> bytes | io.BytesIO | None:
    """Bytes beyond 1 MB as a stream: written at once they would hold up the event loop."""
    return io.BytesIO(body) if body is not None and len(body) > LONGEST_AT_ONCE else body


async def read_whole(response: aiohttp.ClientResponse, where: str) -> bytes:
    chunks, size = list[bytes](), 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > LONGEST_MB << 20:
            raise too_long(where)
    return b"".join(chunks)


def too_long(where: str) -> GarbledError:
    error = GarbledError(
        f"{where} sent a reply of more than {LONGEST_MB} MB",
        hint="does this server speak the OpenAI chat-completions protocol?",
    )
    error.retryable = False  # it would only be read again
    return error


def translated(
    error: aiohttp.ClientError | OSError, where: str, timeout: float | None
) -> EndpointError:
    for kind, trouble in NO_CONNECTION.items():
        if isinstance(error, kind):
            return UnreachableError(f"{where} {trouble}", hint=HINT)
    if isinstance(error, aiohttp.ClientConnectorError):
        trouble = error.os_error.strerror or "no connection"
        return UnreachableError(f"{where} cannot be reached: {trouble}", hint=HINT)
    if isinstance(error, TimeoutError):
        return EndpointTimeoutError(
            f"{where} did not finish its reply within {timeout:g} s",
            hint="raise `timeout`, or ask for fewer tokens or samples",
        )
    # Unlike a server that is gone, this may concern one request alone.
    return ServerFailedError(
        f"{where} cut the connection in mid-answer", hint="try again; look at the server's log"
    )


DEFAULT_BASE = "https://api.openai.com/v1"
CALL = "/chat/completions"
CONNECT_WITHIN = 15.0


@dataclass(frozen=True)
class Endpoint:
    """`shown` is the base URL without credentials or query: fit for errors and logs."""

    base: URL = field(repr=False)
    shown: str
    headers: dict[str, str] = field(repr=False)
    redact: Redact = field(repr=False)

    @classmethod
    def locate(cls, base_url: str | None, api_key: str | None) -> Endpoint:
        text = (base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_BASE).strip()
        base = _parse(text)
        bare = base.with_user(None).with_query(None)
        key = (os.environ.get("OPENAI_API_KEY", "") if api_key is None else api_key).strip()
        if not (key.isascii() and key.isprintable()):
            raise SettingError("the API key holds characters that no header can carry", hint=KEY)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if authorization := _authorization(base, key):
            headers["Authorization"] = authorization
        redact = redactor([authorization.partition(" ")[2], *_credentials(base)])
        return cls(base.with_user(None), str(bare), headers, redact)

    def url(self, path: str) -> URL:
        return self.base.joinpath(path.lstrip("/")).with_query(self.base.query)

    @property
    def proxy(self) -> str | None:
        host = self.base.host or ""
        return None if _loopback(host) or proxy_bypass(host) else getproxies().get(self.base.scheme)


KEY = "copy the key again, without quotes or line breaks"
BASE = "set OPENAI_BASE_URL (or base_url=) to something like http://localhost:8000/v1"


def _parse(text: str) -> URL:
    try:
        url = URL(text)
        host = url.host or ""
        host.encode("idna")  # what the resolver will do: it refuses `a..b` and overlong labels
    except ValueError:  # it quotes the URL, which may hold a password
        raise SettingError("the base URL is not a URL", hint=BASE) from None
    if url.scheme not in ("http", "https") or not host:
        raise SettingError("the base URL is not an http(s) URL", hint=BASE)
    return url.with_path(url.path.rstrip("/").removesuffix(CALL), keep_query=True)


def _authorization(base: URL, key: str) -> str:
    if key:
        return f"Bearer {key}"
    if base.user is None:
        return ""
    pair = f"{base.user}:{base.password or ''}"
    return "Basic " + base64.b64encode(pair.encode()).decode("ascii")


def _credentials(base: URL) -> Iterator[str]:
    """As the URL spells them and as they are meant."""
    yield from (base.password or base.user or "", base.raw_password or base.raw_user or "")
    yield from base.query.values()
    yield from (pair.partition("=")[2] for pair in base.raw_query_string.split("&"))


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Connection:
    """What belongs to one event loop. The slots limit the requests under way at once."""

    session: aiohttp.ClientSession
    slots: asyncio.Semaphore
    lifetime: AsyncGenerator[None]


@dataclass(frozen=True)
class Connections:
    endpoint: Endpoint
    timeout: float
    concurrency: int
    _by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Connection] = field(
        default_factory=WeakKeyDictionary
    )

    async def here(self) -> Connection:
        loop = asyncio.get_running_loop()
        connection = self._by_loop.get(loop)
        if connection is None or connection.session.closed:
            connection = self._by_loop[loop] = self._open()
            await anext(connection.lifetime)
        return connection

    def _open(self) -> Connection:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(
                total=self.timeout, sock_connect=min(self.timeout, CONNECT_WITHIN)
            ),
            headers=self.endpoint.headers,
            proxy=self.endpoint.proxy,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return Connection(session, asyncio.Semaphore(self.concurrency), _lifetime(session))

    async def close(self) -> None:
        connection = self._by_loop.pop(asyncio.get_running_loop(), None)
        if connection is not None:
            await connection.lifetime.aclose()


async def _lifetime(session: aiohttp.ClientSession) -> AsyncGenerator[None]:
    """A loop closes its open generators when it ends: no session outlives its `asyncio.run`."""
    try:
        yield
    finally:
        await session.close()
