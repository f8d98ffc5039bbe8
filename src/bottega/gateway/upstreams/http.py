"""Bodies forwarded to an endpoint that speaks the chat-completions protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeVar

import aiohttp
import orjson

from bottega.errors import EndpointError, RejectedError, SettingError
from bottega.gateway.ports import Body, Completed
from bottega.gateway.upstreams.breaker import Breaker
from bottega.gateway.upstreams.dialect import Dialect, mended
from bottega.gateway.upstreams.stream import (
    MisconfiguredError,
    Opened,
    Timeouts,
    error_body,
    reported_body,
    upstream_error,
)
from bottega.generation.http_client import CALL, Connections, Endpoint, Response, Retrying, exchange
from bottega.generation.openai_format import (
    JSONObject,
    parse_completions,
    parse_json,
    parse_usage,
    plain_completion,
    reported_failure,
)


@dataclass
class Queue:
    """State of one upstream call; `idle` is set while it waits for a connection or for its next
    attempt, and `started` is the `perf_counter` time at which that wait ended."""

    idle: asyncio.Event = field(default_factory=asyncio.Event)
    started: float = field(default_factory=perf_counter)

    @property
    def waiting(self) -> bool:
        return self.idle.is_set()


_queue: ContextVar[Queue | None] = ContextVar("queue", default=None)


@contextmanager
def queue_state() -> Iterator[Queue]:
    """Track the upstream call made inside the block, including calls from tasks started there."""
    queue = Queue()
    token = _queue.set(queue)
    try:
        yield queue
    finally:
        _queue.reset(token)


@asynccontextmanager
async def slot(slots: asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold one of the slots, and mark the call as waiting until it is free and after a failure."""
    queue = _queue.get() or Queue()
    queue.idle.set()
    async with slots:
        queue.idle.clear()
        queue.started = perf_counter()
        try:
            yield
        except Exception:
            # The attempt failed, and the next one starts after a pause. A cancellation is not an
            # `Exception`: it ends a running call.
            queue.idle.set()
            raise


Result = TypeVar("Result")
# A client is waiting, and another tier may answer: less patience than for a batch.
LONGEST_WAIT = 8.0
LONGEST_TOTAL = 20.0
CHECK_WITHIN = 5.0


class HttpUpstream:
    """OpenAI, vLLM, Ollama, another gateway: whatever serves `{base_url}/chat/completions`.

    A client's body goes on as it is, but for `model`, `extra_body` (the operator's fields win;
    None leaves a field out) and the token limit's name where the server refuses the client's.
    `retries` come on top of the first attempt, and only before a client was sent anything;
    `concurrency` limits requests under way, streams included. `base_url` and `api_key` default to
    OPENAI_BASE_URL and OPENAI_API_KEY. Raises `RefusedError` for what the upstream says against
    the client's request, `MisconfiguredError` for what only the operator can mend:
    `is_misconfigured` says so from then until something is answered.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float | Timeouts = 300.0,
        retries: int | Retrying = 2,
        concurrency: int = 256,
        extra_body: Mapping[str, object] | None = None,
        breaker: Breaker | None = None,
    ) -> None:
        if concurrency < 1:
            raise SettingError(f"concurrency is {concurrency}", hint="use 1 or more")
        self.model = model
        self.breaker = breaker or Breaker()
        self._timeouts = Timeouts.of(timeout)
        self._endpoint = Endpoint.locate(base_url, api_key)
        self._call = self._endpoint.url(CALL)
        self._connections = Connections(self._endpoint, self._timeouts.total, concurrency)
        self._retry = retries if isinstance(retries, Retrying) else _patience(retries)
        self._extra = dict(extra_body or {})
        absent = [name for name, value in self._extra.items() if value is None]
        self._left_out = ("stream", "stream_options", *absent)
        self._dialect = Dialect()
        self.is_misconfigured = False

    @property
    def base_url(self) -> str:
        """Without credentials."""
        return self._endpoint.shown

    def __repr__(self) -> str:
        return f"HttpUpstream({self.model!r}, base_url={self.base_url!r})"

    async def complete(self, body: Body, /) -> Completed:
        async def ask(payload: bytes) -> Completed:
            return await self._retry(lambda: self._complete(payload))

        fields = self._fields(body)
        return await self._understood(fields, ask)

    async def stream(self, body: Body, /) -> AsyncGenerator[bytes]:
        """Always asks for the usage, whatever the client's `stream_options`."""
        asked = body.get("stream_options")
        options = {**(asked if isinstance(asked, dict) else {}), "include_usage": True}
        fields = self._fields(body) | {"stream": True, "stream_options": options}
        choices = n if isinstance(n := fields.get("n"), int) else 1

        async def ask(payload: bytes) -> tuple[bytes, AsyncGenerator[bytes]]:
            return await self._retry(lambda: self._begun(payload, choices))

        first, rest = await self._understood(fields, ask)
        async with aclosing(rest):
            yield first
            async for payload in rest:
                yield payload

    async def check(self) -> None:
        """Asks for the list of models; a server without one is up all the same."""
        self.breaker.check()
        connection = await self._connections.here()
        within = aiohttp.ClientTimeout(total=min(CHECK_WITHIN, self._timeouts.total))
        url = self._endpoint.url("/models")
        response = await exchange(connection.session, "GET", url, None, self.base_url, within)
        if response.status >= 300 and response.status not in (404, 405, 501):
            raise self._failure(response.status, error_body(response.payload), response.headers)

    async def aclose(self) -> None:
        await self._connections.close()

    def _fields(self, body: Body) -> dict[str, object]:
        fields = {**body, "model": self.model, **self._extra}
        for name in self._left_out:
            fields.pop(name, None)
        return fields

    async def _understood(
        self, fields: dict[str, object], ask: Callable[[bytes], Awaitable[Result]]
    ) -> Result:
        """What the server understood once is what it is told first from then on."""
        dialect = self._dialect
        while True:
            try:
                result = await ask(orjson.dumps(dialect.spell(fields)))
            except MisconfiguredError:
                self.is_misconfigured = True
                raise
            except RejectedError as error:
                other = dialect.after(error, fields)
                if other is None:
                    raise
                dialect = other
            else:
                self._dialect, self.is_misconfigured = dialect, False
                return result

    async def _complete(self, payload: bytes) -> Completed:
        self.breaker.check()  # before the wait for a slot
        connection = await self._connections.here()
        async with slot(connection.slots):
            with self.breaker.attempt():
                response = await exchange(
                    connection.session, "POST", self._call, payload, self.base_url
                )
                return self._completed(response)

    def _completed(self, response: Response) -> Completed:
        if response.status >= 300:
            raise self._failure(response.status, error_body(response.payload), response.headers)
        found = parse_json(response.payload, self.base_url)
        model = found.get("model")
        model = model if isinstance(model, str) else self.model
        if (plain := plain_completion(found)) is not None:
            return Completed(response.payload, model, (plain,), parse_usage(found))
        if failure := reported_failure(found):
            raise self._failure(failure[0], reported_body(found, failure[1]), {})
        completions = parse_completions(found, self.base_url)
        usage = parse_usage(found) if isinstance(found.get("usage"), dict) else None
        return Completed(mended(found) or response.payload, model, completions, usage)

    async def _begun(self, payload: bytes, choices: int) -> tuple[bytes, AsyncGenerator[bytes]]:
        events = self._events(payload, choices)
        return await anext(events), events

    async def _events(self, payload: bytes, choices: int) -> AsyncGenerator[bytes]:
        self.breaker.check()  # before the wait for a slot
        connection = await self._connections.here()
        async with slot(connection.slots):
            with self.breaker.attempt() as attempt:
                opened = Opened(self._timeouts, self.base_url, self._failure)
                try:
                    await opened.request(connection.session, self._call, payload)
                    async for event in opened.events(choices):
                        attempt.answered()
                        yield event
                finally:
                    opened.close()

    def _failure(self, status: int, body: JSONObject, headers: Mapping[str, str]) -> EndpointError:
        return upstream_error(self._endpoint, self.model, status, body, headers)


def _patience(retries: int) -> Retrying:
    return Retrying(retries + 1, longest_wait=LONGEST_WAIT, longest_total=LONGEST_TOTAL)
