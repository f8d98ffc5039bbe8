"""Where an endpoint is, and one aiohttp session for each event loop that talks to it."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.request import getproxies, proxy_bypass
from weakref import WeakKeyDictionary

import aiohttp
from yarl import URL

from bottega.errors import SettingError
from bottega.generation.redacting import Redact, redactor

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
