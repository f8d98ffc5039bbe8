"""One HTTP exchange: its size limited, aiohttp's errors translated to the error tree."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from yarl import URL

from bottega.errors import (
    EndpointError,
    EndpointTimeoutError,
    GarbledError,
    ServerFailedError,
    UnreachableError,
)

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
