"""HTTP exchanges with an endpoint: sessions, size limits, time-outs, event streams."""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from time import perf_counter
from typing import TYPE_CHECKING
from urllib.request import getproxies, proxy_bypass
from weakref import WeakKeyDictionary

import orjson
from yarl import URL

from bottega._util.caching import FairSemaphore
from bottega._util.tracing import ModelCall, Tracer, forwarded_headers
from bottega.errors import (
    EndpointError,
    EndpointTimeoutError,
    GarbledError,
    GenerationError,
    UnreachableError,
)
from bottega.openai_api import lazy_aiohttp as aiohttp
from bottega.openai_api.endpoint import NO_HEADERS, Endpoint
from bottega.openai_api.errors import WRONG_PROTOCOL
from bottega.openai_api.response import (
    BOM,
    error_body,
    no_usage,
    parse_completions,
    parse_reply,
    reported_failure,
)
from bottega.openai_api.streams import StreamProgress, ToError, cut_off, from_chunks, to_chunks

if TYPE_CHECKING:
    from yarl import URL


# A few compressed kilobytes can unpack to gigabytes.
MAX_REPLY_MB = 64
MAX_WRITE = 1 << 20
MAX_HEADER = 64 << 10  # some gateways send their routing decisions
CONNECT_SECONDS = 15.0
# uvicorn, and so vLLM, closes a connection that is idle for 5 seconds. A request that it crosses
# would fail, and must not be repeated, because the server may have read it.
KEEP_ALIVE_SECONDS = 4.0
STREAM_HEADERS = {"Accept": "text/event-stream", "Accept-Encoding": "identity"}
# The end of the response comes with or right after `[DONE]`; the connection can serve again then.
DRAIN_SECONDS = 0.1
# The usage and `[DONE]` come right after the last finish reason. Some servers then never close.
END_SECONDS = 2.0
UNREACHABLE_HINT = "start the server there, or set another address: OPENAI_BASE_URL (or base_url=)"
PLAIN_HINT = "this port may speak http: write http:// in the address"
ADDRESS_HINT = "check the network and the address: OPENAI_BASE_URL (or base_url=)"
# Beginnings of bodies that are no stream of events; content types are unreliable.
WHOLE = (b"{", b"[", b"<")


@dataclass(slots=True)
class Response:
    status: int
    headers: Mapping[str, str]
    payload: bytes


@dataclass(frozen=True)
class Connection:
    """Session of one event loop. The slots limit the concurrent requests; clients take turns."""

    session: aiohttp.ClientSession
    slots: FairSemaphore
    lifetime: AsyncGenerator[None]


@dataclass(frozen=True)
class Connections:
    """Connections to an endpoint, one session for each event loop. `timeout` covers one attempt to
    its last byte, streamed or not."""

    endpoint: Endpoint
    timeout: float
    concurrency: int
    _by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Connection] = field(
        default_factory=WeakKeyDictionary
    )

    async def get(self) -> Connection:
        """Return the connection of the running loop; open it on first use."""
        loop = asyncio.get_running_loop()
        connection = self._by_loop.get(loop)
        if connection is None or connection.session.closed:
            session = aiohttp.ClientSession(
                # `slots` limit the requests: a wait in aiohttp's queue would count towards `total`.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
                timeout=aiohttp.ClientTimeout(
                    total=self.timeout,
                    sock_connect=min(self.timeout, CONNECT_SECONDS),
                    ceil_threshold=math.inf,  # do not round up to whole seconds
                ),
                headers=self.endpoint.headers,
                max_field_size=MAX_HEADER,
                max_line_size=MAX_HEADER,
                proxy=_proxy(self.endpoint.base),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
            slots = FairSemaphore.of_slots(self.concurrency)
            connection = self._by_loop[loop] = Connection(session, slots, _lifetime(session))
            await anext(connection.lifetime)
        return connection

    async def close(self) -> None:
        connection = self._by_loop.pop(asyncio.get_running_loop(), None)
        if connection is not None:
            await connection.lifetime.aclose()


def _proxy(url: URL) -> str | None:
    host = url.host or ""
    if is_loopback(host) or proxy_bypass(host):
        return None
    return getproxies().get(url.scheme)


async def _lifetime(session: aiohttp.ClientSession) -> AsyncGenerator[None]:
    """Close the session when the loop ends: a loop closes its open generators."""
    try:
        yield
    finally:
        await session.close()


async def exchange(
    session: aiohttp.ClientSession,
    method: str,
    url: URL,
    body: bytes | None,
    where: str,
    timeout: aiohttp.ClientTimeout | None = None,
) -> Response:
    """Send a request and read its whole response, whatever the status. Raises
    `UnreachableError`, `EndpointTimeoutError`, `ServerFailedError`, `GarbledError`."""
    try:
        async with session.request(
            method,
            url,
            data=_data(body),
            headers=forwarded_headers(),
            allow_redirects=False,
            timeout=timeout or session.timeout,
        ) as response:
            payload = await _read_response(response, where)
            return Response(response.status, response.headers, payload)
    except (aiohttp.ClientError, OSError) as error:
        # The cause is left out: aiohttp's errors contain the whole URL and its secrets.
        raise _translated(error, where, (timeout or session.timeout).total) from None


def _data(body: bytes | None) -> bytes | io.BytesIO | None:
    """Return bodies beyond 1 MB as a stream: one large write would block the event loop."""
    return io.BytesIO(body) if body is not None and len(body) > MAX_WRITE else body


async def _read_response(response: aiohttp.ClientResponse, where: str) -> bytes:
    chunks, size = list[bytes](), 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_REPLY_MB << 20:
            raise _too_long(where)
    return b"".join(chunks)


def _too_long(where: str) -> GarbledError:
    error = GarbledError(
        f"{where} sent a reply of more than {MAX_REPLY_MB} MB", hint=WRONG_PROTOCOL
    )
    error.retryable = False  # the next attempt would read it again
    return error


def _connection_problems() -> dict[type[Exception], str]:
    return {
        aiohttp.ClientConnectorDNSError: "has no address: the host name is unknown",
        aiohttp.ClientConnectorCertificateError: "has no valid TLS certificate",
        aiohttp.ClientSSLError: "does not speak TLS",
        aiohttp.InvalidURL: "is not a valid address",
        aiohttp.ClientHttpProxyError: "cannot be reached through the proxy",
        aiohttp.ConnectionTimeoutError: "does not accept connections",
    }


def _translated(
    error: aiohttp.ClientError | OSError, where: str, timeout: float | None
) -> EndpointError:
    for kind, problem in _connection_problems().items():
        if isinstance(error, kind):
            hint = PLAIN_HINT if problem.endswith("TLS") else ADDRESS_HINT
            return UnreachableError(f"{where} {problem}", hint=hint)
    if isinstance(error, aiohttp.ClientConnectorError):
        problem = error.os_error.strerror or "no connection"
        return UnreachableError(f"{where} cannot be reached: {problem}", hint=UNREACHABLE_HINT)
    if isinstance(error, TimeoutError):
        return EndpointTimeoutError(
            f"{where} did not finish its reply within {timeout:g} s",
            hint="raise `timeout`, or request fewer tokens or samples",
        )
    # A server that is down fails every request; this may concern one request only.
    return cut_off(where)


async def stream_chunks(
    session: aiohttp.ClientSession,
    url: URL,
    body: bytes,
    where: str,
    to_error: ToError,
    choices: int,
) -> AsyncGenerator[bytes]:
    """Send a request and yield the JSON of each chunk of the reply, the first ones with the first
    content. Close it in any case: a response that was not read to its end is aborted.

    Raises the error of a status other than 2xx, `ServerFailedError` if the stream ends before each
    of so many choices does, `GarbledError` for events that are no chunks. Once all choices have
    ended, only the usage can be missing: a failure then ends the stream.
    """
    progress = StreamProgress(where, to_error, choices)
    response: aiohttp.ClientResponse | None = None
    end_by: float | None = None
    try:
        headers = {**STREAM_HEADERS, **forwarded_headers()}
        response = await session.post(url, data=_data(body), headers=headers, allow_redirects=False)
        if response.status >= 300:
            failure = error_body(await _read_response(response, where))
            raise to_error(response.status, failure, response.headers)
        piece, received = await response.content.readany(), 0
        while piece.isspace():
            piece = await response.content.readany()
        if piece.removeprefix(BOM).lstrip().startswith(WHOLE):
            whole = piece + await _read_response(response, where)
            for chunk in _chunks_of(whole, where, to_error):
                yield chunk
            return
        while piece:
            received += len(piece)
            if received > MAX_REPLY_MB << 20:
                if progress.is_complete:
                    break
                raise _too_long(where)
            for chunk in progress.feed(piece):
                yield chunk
            if progress.is_done:
                break
            if progress.is_complete and end_by is None:
                end_by = asyncio.get_running_loop().time() + END_SECONDS
            async with asyncio.timeout_at(end_by):
                piece = await response.content.readany()
        async with asyncio.timeout(DRAIN_SECONDS):
            while not response.content.at_eof():
                await response.content.readany()
    except (aiohttp.ClientError, OSError) as error:
        if not (progress.is_done or progress.is_complete):
            raise _translated(error, where, session.timeout.total) from None
    finally:
        # Unread bytes would be taken for the reply to the next request on this connection.
        if response is not None and response.content.at_eof():
            response.release()
        elif response is not None:
            response.close()
    for chunk in progress.end():
        yield chunk


def _chunks_of(whole: bytes, where: str, to_error: ToError) -> tuple[bytes, ...]:
    """Return the chunks of a complete reply: some servers ignore `stream`."""
    reply, _ = parse_reply(whole, where)
    if failure := reported_failure(reply):
        raise to_error(*failure, NO_HEADERS)
    parse_completions(reply, where)
    return to_chunks(orjson.dumps({"usage": no_usage(), **reply}), include_usage=True)


def parse_address(host: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address, or None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether a host without port is `localhost` or a loopback address."""
    address = parse_address(host)
    return host == "localhost" if address is None else address.is_loopback


async def measured_stream(
    tracer: Tracer, call: ModelCall, chunks: AsyncGenerator[bytes]
) -> AsyncGenerator[bytes]:
    """Yield the chunks of a streamed reply, and measure the call."""
    span, started, received = tracer.begin_call(call), perf_counter(), list[bytes]()
    try:
        async with aclosing(chunks):
            # Only the first chunk sends a request. The span must not be active at a `yield`, which
            # continues in the code of the consumer.
            with span.active():
                first = await anext(chunks, None)
            if first is not None:
                call.first_seconds = perf_counter() - started
                received.append(first)
                yield first
                async for chunk in chunks:
                    received.append(chunk)
                    yield chunk
    except BaseException as error:
        span.end(error)
        raise
    try:
        completed = from_chunks(received)
    except GenerationError as error:
        span.end(error)
        return
    call.set_reply(completed)
    span.end()
