"""Client of a chat-completions endpoint, for generators and for the gateway's upstreams."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TypeVar

import aiohttp
import orjson

from bottega.errors import EndpointError, RejectedError
from bottega.openai_api.breaker import Breaker
from bottega.openai_api.endpoint import CHAT_PATH, NO_HEADERS, Endpoint
from bottega.openai_api.errors import JSONObject, error_body, reported_failure
from bottega.openai_api.response import ChatCompletion, parse_completion, parse_json
from bottega.openai_api.retry import RetryPolicy
from bottega.openai_api.transport import Connections, Response, StreamedResponse, Timeouts, exchange

UNKNOWN_FIELD = re.compile(
    r"(?i)unsupported|not supported|unrecogni|unknown|unexpected|not permitted|not allowed"
    r"|forbidden|deprecated|does not support|instead"
)
LIMITS = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}


@dataclass(frozen=True)
class Dialect:
    """Fields that a server accepts, learned from its errors. `limit_field` is the only name of the
    token limit that it accepts, None for both."""

    limit_field: str | None = None
    stream_options: bool = True

    def spell(self, fields: dict[str, object]) -> dict[str, object]:
        """Return the fields as the server accepts them."""
        if self.limit_field is not None and LIMITS[self.limit_field] in fields:
            fields = dict(fields)
            limit = fields.pop(LIMITS[self.limit_field])
            fields.setdefault(self.limit_field, limit)
        if not self.stream_options and "stream_options" in fields:
            fields = {name: value for name, value in fields.items() if name != "stream_options"}
        return fields

    def after(self, error: RejectedError, fields: dict[str, object]) -> Dialect | None:
        """Return the dialect to try after this error for `fields`, None if none can help."""
        message = str(error)
        if not rejects_field(error):
            return None
        if self.limit_field is None and "max_completion_tokens" in message:
            used = next((name for name in LIMITS if name in fields), None)
            return replace(self, limit_field=LIMITS[used]) if used else None
        if self.stream_options and "stream_options" in message and "stream_options" in fields:
            return replace(self, stream_options=False)
        return None


def rejects_field(error: RejectedError) -> bool:
    """Return whether the error says that the server does not know or support a field."""
    return error.status in (400, 422) and UNKNOWN_FIELD.search(str(error)) is not None


Fields = dict[str, object]
Encode = Callable[[Fields], Awaitable[bytes]]
Result = TypeVar("Result")


@dataclass
class CallState:
    """State of one call; `idle` is set while it waits for a slot or for its next attempt, and
    `started` is the `perf_counter` time at which that wait ended."""

    idle: asyncio.Event = field(default_factory=asyncio.Event)
    started: float = field(default_factory=perf_counter)

    @property
    def is_waiting(self) -> bool:
        return self.idle.is_set()


_call: ContextVar[CallState | None] = ContextVar("call", default=None)


@contextmanager
def track_call() -> Iterator[CallState]:
    """Track the call made inside the block, also from tasks started there."""
    state = CallState()
    token = _call.set(state)
    try:
        yield state
    finally:
        _call.reset(token)


@asynccontextmanager
async def _slot(slots: asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold one of the slots, and mark the call as waiting until it is free and after a failure."""
    state = _call.get() or CallState()
    state.idle.set()
    async with slots:
        state.idle.clear()
        state.started = perf_counter()
        try:
            yield
        except Exception:
            # The attempt failed, and the next one starts after a pause. A cancellation is not an
            # `Exception`: it ends a running call.
            state.idle.set()
            raise


async def encode_json(fields: Fields) -> bytes:
    return orjson.dumps(fields)


class _Body:
    """Body of a request, encoded once, when the first attempt needs it."""

    def __init__(self, fields: Fields, encode: Encode) -> None:
        self._fields, self._encode = fields, encode
        self._payload = b""

    async def read(self) -> bytes:
        if not self._payload:
            self._payload = await self._encode(self._fields)
        return self._payload


class ChatClient:
    """Client of one model at an endpoint that serves `{base_url}/chat/completions`.

    `concurrency` limits concurrent requests, streams included; a request that waits for a retry
    holds no slot. Streams are retried only before their first event. Works in any number of event
    loops. Errors are those of `bottega.errors.EndpointError`; a rejected request raises
    `RequestRejectedError`, and an open `breaker` raises `PausedError`.
    """

    def __init__(
        self,
        model: str,
        endpoint: Endpoint,
        timeouts: Timeouts,
        retry: RetryPolicy,
        concurrency: int,
        breaker: Breaker | None = None,
    ) -> None:
        self.model, self.endpoint = model, endpoint
        self._url = endpoint.url(CHAT_PATH)
        self._timeouts, self._retry, self._breaker = timeouts, retry, breaker
        self._connections = Connections(endpoint, timeouts.total, concurrency)
        self._dialect = Dialect()

    @property
    def base_url(self) -> str:
        """Base URL without credentials."""
        return self.endpoint.shown

    async def complete(self, fields: Fields, encode: Encode = encode_json) -> ChatCompletion:
        """Return the reply to a body of these fields. `encode` turns them into bytes once a slot is
        free, so waiting requests hold no encoded bodies."""
        return await self._negotiate(fields, encode, self._complete)

    async def stream(self, fields: Fields, encode: Encode = encode_json) -> AsyncGenerator[bytes]:
        """Yield the JSON of each chunk of a streamed reply."""
        choices = n if isinstance(n := fields.get("n"), int) else 1
        first, rest = await self._negotiate(fields, encode, partial(self._begin, choices))
        async with aclosing(rest):
            yield first
            async for payload in rest:
                yield payload

    async def get(self, path: str, seconds: float | None = None) -> Response:
        """Return the response to one GET request, within `seconds` if given."""
        connection = await self._connections.get()
        limit = None if seconds is None else aiohttp.ClientTimeout(total=seconds)
        url = self.endpoint.url(path)
        return await exchange(connection.session, "GET", url, None, self.base_url, limit)

    async def get_json(self, path: str) -> JSONObject:
        """Return the JSON of a GET request, with retries."""

        async def attempt() -> JSONObject:
            return self._parsed(await self.get(path))

        return await self._retry(attempt)

    async def aclose(self) -> None:
        await self._connections.close()

    def error(
        self, status: int, body: JSONObject, headers: Mapping[str, str] = NO_HEADERS
    ) -> EndpointError:
        """Return the error for an HTTP status and the JSON of its response."""
        return self.endpoint.error(self.model, status, body, headers)

    async def _negotiate(
        self, fields: Fields, encode: Encode, attempt: Callable[[_Body], Awaitable[Result]]
    ) -> Result:
        """Send the fields, in another dialect if the server rejects one; keep what it accepts."""
        dialect = self._dialect
        while True:
            body = _Body(dialect.spell(fields), encode)
            try:
                result = await self._retry(partial(attempt, body))
            except RejectedError as error:
                other = dialect.after(error, fields)
                if other is None:
                    if not rejects_field(error):  # the server accepts the names, nothing else
                        self._dialect = dialect
                    raise
                dialect = other
            else:
                self._dialect = dialect
                return result

    async def _complete(self, body: _Body) -> ChatCompletion:
        if self._breaker is not None:
            self._breaker.check()  # before the wait for a slot
        connection = await self._connections.get()
        async with _slot(connection.slots):
            payload = await body.read()
            with self._breaker.attempt() if self._breaker is not None else nullcontext():
                response = await exchange(
                    connection.session, "POST", self._url, payload, self.base_url
                )
                reply = self._parsed(response)
                return parse_completion(response.payload, reply, self.base_url, self.model)

    async def _begin(self, choices: int, body: _Body) -> tuple[bytes, AsyncGenerator[bytes]]:
        events = self._events(body, choices)
        return await anext(events), events

    async def _events(self, body: _Body, choices: int) -> AsyncGenerator[bytes]:
        if self._breaker is not None:
            self._breaker.check()  # before the wait for a slot
        connection = await self._connections.get()
        async with _slot(connection.slots):
            payload = await body.read()
            with self._breaker.attempt() if self._breaker is not None else nullcontext() as attempt:
                response = StreamedResponse(self._timeouts, self.base_url, self.error)
                try:
                    await response.request(connection.session, self._url, payload)
                    async for event in response.events(choices):
                        if attempt is not None:
                            attempt.answered()
                        yield event
                finally:
                    response.close()

    def _parsed(self, response: Response) -> JSONObject:
        if response.status >= 300:
            raise self.error(response.status, error_body(response.payload), response.headers)
        body = parse_json(response.payload, self.base_url)
        if failure := reported_failure(body):
            raise self.error(*failure)
        return body
