"""Download of images from http(s) URLs, from public internet addresses only."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from ipaddress import IPv4Address
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from bottega._util.caching import FairSemaphore
from bottega.errors import ImageError
from bottega.image import Image
from bottega.openai_api.errors import ApiError
from bottega.openai_api.request import ImagePart
from bottega.openai_api.transport import parse_address

MAX_REDIRECTS = 3
# The registries of special addresses. `is_global` alone has been wrong in several Python versions.
NOT_PUBLIC_V4 = [
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network; Linux connects 0.0.0.0 to loopback
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT, with Alibaba's metadata service
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's host, though its address looks public
        "169.254.0.0/16",  # link-local, with most clouds' metadata services
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocol assignments, with Oracle's metadata service
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
]
# All other addresses are loopback, mapped, compatible, NAT64, local, link-local or multicast.
UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
NOT_PUBLIC_V6 = [
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: an IPv4 address inside
        "2620:4f:8000::/48",
        "3fff::/20",  # documentation
    )
]
MAX_URL = 8192
NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
# Names that inet_aton parses as addresses: 127.1, 0x7f.1, 017700000001, 2130706433.
ENDS_IN_A_NUMBER = re.compile(r"(.*\.)?(\d+|0x[0-9a-f]*)")
# URL parsers disagree on these characters, and encoded URLs do not contain them.
AMBIGUOUS = re.compile(r"[\\\s\x00-\x20\x7f]")
REDIRECTS = {301, 302, 303, 307, 308}
# No data of the client: no cookies, key or address. A compressed body could be a bomb.
HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "bottega"}
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
MakeConnector = Callable[[AbstractResolver], aiohttp.BaseConnector]
MAX_URL = 8192


def is_public(address: str) -> bool:
    """Return whether the text is a global unicast address that embeds no other address. Tunnels and
    NAT64 are therefore excluded."""
    parsed = parse_address(address)
    if parsed is None:
        return False
    if isinstance(parsed, IPv4Address):
        special = any(parsed in network for network in NOT_PUBLIC_V4)
    else:
        special = (
            parsed.scope_id is not None
            or parsed not in UNICAST_V6
            or any(parsed in network for network in NOT_PUBLIC_V6)
        )
    return parsed.is_global and not special


async def system_resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def direct_connector(resolver: AbstractResolver) -> aiohttp.BaseConnector:
    return aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True)


class ImageFetcher:
    """Image downloader that is safe against requests to internal addresses. Each URL, and each of
    at most `MAX_REDIRECTS`, is parsed and resolved once. It is rejected if any of its addresses is
    not `allowed`. The connection uses exactly these addresses, even if DNS changes in the meantime.
    TLS is verified against the name.

    `hosts` are the allowed hosts (None: all public ones); `.example.com` means all names below it.
    `seconds` and `max_bytes` limit one download including redirects, `concurrency` the downloads at
    a time.
    """

    def __init__(
        self,
        *,
        hosts: Collection[str] | None = None,
        ports: Collection[int] = (80, 443),
        max_bytes: int = 20 << 20,
        seconds: float = 10.0,
        concurrency: int = 16,
        allowed: Callable[[str], bool] = is_public,
        resolve: Resolve = system_resolve,
        connect: MakeConnector = direct_connector,
    ) -> None:
        self._hosts = None if hosts is None else {host.lower() for host in hosts}
        self._ports, self._max_bytes, self._seconds = frozenset(ports), max_bytes, seconds
        self._slots = FairSemaphore.of_slots(concurrency)
        self._allowed, self._resolve, self._connect = allowed, resolve, connect

    async def fetch(self, url: str, param: str | None = None) -> Image:
        """Fetch and decode an image. `param` names the field that contained the URL. Raises
        `ApiError` (400) for every failure; the messages do not reveal the internal network."""
        try:
            async with asyncio.timeout(self._seconds), self._slots.hold():
                data = await self._fetch(url)
            return await asyncio.to_thread(Image.from_bytes, data)
        except _FetchError as rejected:
            raise _api_error(f"The image was not fetched: {rejected}.", param) from rejected
        except ImageError as error:
            raise _api_error(f"The URL has no usable image: {error}.", param) from error
        except TimeoutError as error:
            message = f"The image was not fetched within {self._seconds:g} s."
            raise _api_error(message, param) from error
        # aiohttp raises ValueError for a malformed header or URL.
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _api_error("The image was not fetched: its server failed.", param) from error

    async def _fetch(self, url: str) -> bytes:
        target = self._check_url(url)
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._get(target, await self._addresses(target))
            if isinstance(found, bytes):
                return found
            target = self._check_url(found, target)
        raise _FetchError(f"it is redirected more than {MAX_REDIRECTS} times")

    def _check_url(self, text: str, base: URL | None = None) -> URL:
        if len(text) > MAX_URL or AMBIGUOUS.search(text):
            raise _FetchError("its URL is too long, or contains blanks or backslashes")
        try:
            url = URL(text)
            url = url if base is None else base.join(url)
            host, port = url.raw_host, url.port
        except ValueError as error:
            raise _FetchError("its URL cannot be read") from error
        if url.scheme not in ("http", "https") or not host:
            raise _FetchError("only http:// and https:// URLs are fetched")
        if url.raw_user is not None or url.raw_password is not None:
            raise _FetchError("its URL contains a user name or a password")
        if port not in self._ports:
            raise _FetchError("its port is not allowed")
        if not _is_plain(host):
            raise _FetchError("its host name is malformed")
        if self._hosts is not None and not self._is_listed(host):
            raise _FetchError("its host is not allowed")
        return url

    def _is_listed(self, host: str) -> bool:
        labels = host.split(".")
        above = {"." + ".".join(labels[start:]) for start in range(1, len(labels))}
        return not ({host} | above).isdisjoint(self._hosts or ())

    async def _addresses(self, url: URL) -> list[str]:
        host = str(url.raw_host)
        found = [host]
        if parse_address(host) is None:
            try:
                found = list(await self._resolve(host, url.port or 0))
            except (OSError, UnicodeError):
                found = []
        # The same message for an unknown name: clients must not enumerate internal host names.
        if not found or not all(map(self._allowed, found)):
            raise _FetchError("its host has no public address")
        return found

    async def _get(self, url: URL, addresses: Sequence[str]) -> bytes | str:
        """Return the body, or the location of a redirect."""
        async with (
            aiohttp.ClientSession(
                connector=self._connect(_PinnedResolver(addresses)),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
            ) as session,
            session.get(url, headers=HEADERS, allow_redirects=False) as response,
        ):
            if response.status in REDIRECTS and (location := response.headers.get("Location")):
                return location
            return await self._read(response)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        if response.status != 200:
            raise _FetchError(f"its server returned status {response.status}")
        if not response.content_type.startswith("image/"):
            raise _FetchError("its server did not send an image")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise _FetchError("its server sent a compressed body")
        data = bytearray()
        if (response.content_length or 0) <= self._max_bytes:
            async for chunk in response.content.iter_any():
                data += chunk
                if len(data) > self._max_bytes:
                    break
            else:
                return bytes(data)
        raise _FetchError(f"it is larger than {self._max_bytes:,} bytes")


class _FetchError(Exception):
    """Reason why an image was not fetched, worded for the client."""


class _PinnedResolver(AbstractResolver):
    """Resolver that returns the addresses checked before, for every name."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None: ...


def _is_plain(host: str) -> bool:
    """Return whether the host is a DNS name, or an address in its canonical form."""
    if parse_address(host) is not None:
        return "%" not in host
    return bool(NAME.fullmatch(host)) and not ENDS_IN_A_NUMBER.fullmatch(host)


def _api_error(message: str, param: str | None) -> ApiError:
    return ApiError(
        message,
        status=400,
        code="invalid_image_url",
        param=param,
        hint="check the URL, or send the image as data:image/png;base64,...",
    )


def check_passed_urls(parts: Iterable[ImagePart]) -> None:
    """Raise `ApiError` as `check_passed_url` does."""
    for part in parts:
        check_passed_url(part)


def check_passed_url(part: ImagePart) -> None:
    """Raise `ApiError` for a URL that no upstream should fetch. What it may reach is checked by the
    upstream, which resolves its name."""
    try:
        parts = urlsplit(part.url)
        is_valid = parts.scheme == "https" and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or parts.username is not None or len(part.url) > MAX_URL:
        raise ApiError(
            "the image URL cannot be passed on",
            code="invalid_image_url",
            param=part.param,
            hint=f"use https, no user or password, and at most {MAX_URL:,} characters",
        )
