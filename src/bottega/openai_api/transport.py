"""HTTP exchanges with an endpoint: sessions, size limits, time-outs, event streams."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import orjson

from bottega._util.caching import FairSemaphore
from bottega._util.tracing import forwarded_headers
from bottega.errors import (
    EndpointError,
    EndpointTimeoutError,
    GarbledError,
    ServerFailedError,
    SettingError,
    UnreachableError,
)
from bottega.openai_api import lazy_aiohttp as aiohttp
from bottega.openai_api.endpoint import NO_HEADERS, Endpoint
from bottega.openai_api.errors import WRONG_PROTOCOL, JSONObject
from bottega.openai_api.response import (
    are_events,
    error_body,
    no_usage,
    parse_completions,
    parse_reply,
    reported_failure,
)
from bottega.openai_api.streams import DONE, HIGH_HALF, LOW_HALF, EventReader, to_chunks

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
UNREACHABLE_HINT = "start the server there, or set another address: OPENAI_BASE_URL (or base_url=)"
ADDRESS_HINT = "check the network and the address: OPENAI_BASE_URL (or base_url=)"
# Returns the error for an HTTP status, the JSON of the error and the headers.
ToError = Callable[[int, JSONObject, Mapping[str, str]], EndpointError]


@dataclass(frozen=True)
class Timeouts:
    """Time-outs in seconds: `total` to the last byte of one attempt; for streams, `first` to the
    first event (comments do not count) and `between` from one piece to the next."""

    total: float = 300.0
    first: float = 120.0
    between: float = 60.0

    def __post_init__(self) -> None:
        if not min(self.total, self.first, self.between) > 0:
            raise SettingError(f"time-outs must be above 0, got {self}", hint="set seconds above 0")

    @classmethod
    def of(cls, given: float | Timeouts) -> Timeouts:
        if isinstance(given, Timeouts):
            return given
        return cls(given, min(given, cls.first), min(given, cls.between))


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
    """Connections to an endpoint, one session for each event loop."""

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
                    total=self.timeout, sock_connect=min(self.timeout, CONNECT_SECONDS)
                ),
                headers=self.endpoint.headers,
                max_field_size=MAX_HEADER,
                max_line_size=MAX_HEADER,
                proxy=self.endpoint.proxy,
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
        aiohttp.ClientSSLError: "has no valid TLS certificate",
        aiohttp.InvalidURL: "is not a valid address",
        aiohttp.ClientHttpProxyError: "cannot be reached through the proxy",
        aiohttp.ConnectionTimeoutError: "does not accept connections",
    }


def _translated(
    error: aiohttp.ClientError | OSError, where: str, timeout: float | None
) -> EndpointError:
    for kind, problem in _connection_problems().items():
        if isinstance(error, kind):
            return UnreachableError(f"{where} {problem}", hint=ADDRESS_HINT)
    if isinstance(error, aiohttp.ClientConnectorError):
        problem = error.os_error.strerror or "no connection"
        return UnreachableError(f"{where} cannot be reached: {problem}", hint=UNREACHABLE_HINT)
    if isinstance(error, TimeoutError):
        return EndpointTimeoutError(
            f"{where} did not finish its reply within {timeout:g} s",
            hint="raise `timeout`, or request fewer tokens or samples",
        )
    # A server that is down fails every request; this may concern one request only.
    return _cut(where)


def _cut(where: str) -> ServerFailedError:
    return ServerFailedError(
        f"{where} cut the connection before the end of its reply",
        hint="try again; look at the server's log",
    )


class StreamedResponse:
    """Response as a stream of events: `request`, then `events`, and `close` in any case. A response
    that was not read to its end is aborted."""

    def __init__(self, timeouts: Timeouts, where: str, to_error: ToError) -> None:
        self._timeouts, self._where, self._to_error = timeouts, where, to_error
        self._response: aiohttp.ClientResponse | None = None
        self._deadline = asyncio.get_running_loop().time() + timeouts.first

    async def request(self, session: aiohttp.ClientSession, url: URL, body: bytes) -> None:
        """Send the request. Raises the error of a status other than 2xx."""
        limit = asyncio.timeout_at(self._deadline)
        try:
            async with limit:
                self._response = await session.post(
                    url,
                    data=_data(body),
                    headers={**STREAM_HEADERS, **forwarded_headers()},
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(
                        total=self._timeouts.total,
                        sock_connect=session.timeout.sock_connect,
                    ),
                )
        except (aiohttp.ClientError, OSError) as error:
            raise self._timed_out(error, limit, self._timeouts.first) from None
        if self._response.status >= 300:
            body_json = error_body(await self._read())
            raise self._to_error(self._response.status, body_json, self._response.headers)

    async def events(self, choices: int) -> AsyncGenerator[bytes]:
        """Yield the JSON of each event. Raises `ServerFailedError` if the stream ends before each
        of so many choices does, `GarbledError` for events that are no chunks."""
        assert self._response is not None
        whole = b""
        if "json" in (kind := self._response.content_type) or "html" in kind:
            whole = await self._read()
        if whole and not are_events(whole):
            # Some servers ignore `stream`: return the chunks of their complete reply.
            reply, _ = parse_reply(whole, self._where)
            if failure := reported_failure(reply):
                raise self._to_error(*failure, NO_HEADERS)
            parse_completions(reply, self._where)
            complete = orjson.dumps({"usage": no_usage(), **reply})
            for payload in to_chunks(complete, include_usage=True):
                yield payload
            return
        reader = EventReader(self._where)
        progress = StreamProgress(self._where, self._to_error, choices)
        received = 0
        while piece := whole or await self._piece(progress):
            received, whole = received + len(piece), b""
            if received > MAX_REPLY_MB << 20:
                raise _too_long(self._where)
            for payload in reader.feed(piece):
                if payload == DONE:
                    for last in progress.end(announced=True):
                        yield last
                    await self._drain()
                    return
                for chunk in progress.take(payload):
                    yield chunk
        for payload in reader.end():
            if payload != DONE:
                try:  # no empty line ended the last event, so it may be incomplete
                    orjson.loads(payload)
                except orjson.JSONDecodeError:
                    break
                for chunk in progress.take(payload):
                    yield chunk
        progress.end()

    def close(self) -> None:
        if self._response is None:
            return
        # Unread bytes would be taken for the reply to the next request on this connection.
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()

    async def _piece(self, progress: StreamProgress) -> bytes:
        """Return some bytes, none at the end. Once all choices have ended only the usage can be
        missing: a failure then ends the stream."""
        assert self._response is not None
        within = self._timeouts.between
        now = asyncio.get_running_loop().time()
        limit = asyncio.timeout_at(now + within if progress.has_begun else self._deadline)
        try:
            async with limit:
                return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            if progress.is_complete:
                return b""
            waited = within if progress.has_begun else self._timeouts.first
            raise self._timed_out(error, limit, waited) from None

    async def _drain(self) -> None:
        assert self._response is not None
        content = self._response.content
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while not content.at_eof():
                    await content.readany()
        except (aiohttp.ClientError, OSError):
            return  # the answer is complete; `close` drops the connection

    async def _read(self) -> bytes:
        assert self._response is not None
        limit = asyncio.timeout_at(self._deadline)
        try:
            async with limit:
                return await _read_response(self._response, self._where)
        except (aiohttp.ClientError, OSError) as error:
            raise self._timed_out(error, limit, self._timeouts.first) from None

    def _timed_out(
        self, error: aiohttp.ClientError | OSError, limit: asyncio.Timeout, waited: float
    ) -> EndpointError:
        if not limit.expired():
            return _translated(error, self._where, self._timeouts.total)
        return EndpointTimeoutError(
            f"{self._where} sent nothing for {waited:g} s",
            hint="raise `timeout`, or look at the server's load",
        )


class StreamProgress:
    """Progress of a streamed answer: whether it has begun, and which choices have ended."""

    def __init__(self, where: str, to_error: ToError, choices: int) -> None:
        self._where, self._to_error, self._choices = where, to_error, choices
        self._ended: set[str] = set()
        self._half = b""  # of a surrogate pair
        self.has_begun = False

    @property
    def is_complete(self) -> bool:
        return len(self._ended) >= self._choices

    def take(self, payload: bytes) -> list[bytes]:
        """Note an event, and return its chunk as valid JSON; none for other events, such as pings.
        Raises the error that it reports, `GarbledError` if it is no chunk. Errors after the end of
        the answer are ignored."""
        try:
            return self._chunks(self._joined(payload))
        except EndpointError:
            if self.is_complete:
                return []
            raise

    def _joined(self, payload: bytes) -> bytes:
        """Move the first half of a surrogate pair to the chunk with the second."""
        if b"\\u" not in payload:
            return payload
        if self._half and (low := LOW_HALF.search(payload)):
            at, half, self._half = low.start(), self._half, b""
            payload = payload[:at] + half + payload[at:]
        if high := HIGH_HALF.search(payload):
            self._half = high[0]
            payload = payload[: high.start()] + payload[high.end() :]
        return payload

    def _chunks(self, payload: bytes) -> list[bytes]:
        chunk, payload = parse_reply(payload, self._where)
        choices = chunk.get("choices")
        if choices is None and not chunk.get("error"):
            # A ping, or the usage alone, which clients expect beside an empty list.
            return [orjson.dumps({**chunk, "choices": []})] if chunk.get("usage") else []
        if chunk.get("error") or not isinstance(choices, list):
            raise self._problem(chunk)
        self.has_begun = True
        for choice in choices:
            if not isinstance(choice, dict) or choice.get("error"):
                raise self._problem(chunk)
            if finish := choice.get("finish_reason"):
                if finish == "error":
                    raise self._problem(chunk)
                self._ended.add(str(choice.get("index")))
        return [payload]

    def end(self, *, announced: bool = False) -> list[bytes]:
        """Raise `ServerFailedError` if the answer is incomplete. A server that sends `[DONE]` may
        have sent fewer choices than requested, or no finish reason: return one that says that the
        answer may be cut off, so that it is neither stored nor repeated."""
        if self.is_complete or (announced and self._ended):
            return []
        if not (announced and self.has_begun):
            raise _cut(self._where)
        choice = {"index": 0, "delta": {}, "finish_reason": "length"}
        return [orjson.dumps({"object": "chat.completion.chunk", "choices": [choice]})]

    def _problem(self, chunk: JSONObject) -> EndpointError:
        if failure := reported_failure(chunk):
            return self._to_error(*failure, NO_HEADERS)
        return GarbledError(f"{self._where} sent an event without choices", hint=WRONG_PROTOCOL)
