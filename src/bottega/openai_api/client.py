"""Client of a chat-completions endpoint, with retries and a circuit breaker."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Literal, TypeVar

import orjson

from bottega._util.tracing import current_tracer, model_call
from bottega.errors import EndpointError, GenerationError, RejectedError, SettingError
from bottega.openai_api import lazy_aiohttp as aiohttp
from bottega.openai_api.endpoint import CHAT_PATH, NO_HEADERS, Endpoint, describe_call
from bottega.openai_api.errors import JSONObject
from bottega.openai_api.response import (
    ChatCompletion,
    are_events,
    error_body,
    parse_completion,
    parse_reply,
    reported_failure,
)
from bottega.openai_api.streams import from_events
from bottega.openai_api.transport import (
    Connections,
    Response,
    exchange,
    measured_stream,
    stream_chunks,
)
from bottega.types import Prompt

UNKNOWN_FIELD = re.compile(
    r"(?i)unsupported|not supported|unrecogni|unknown|unexpected|not permitted|not allowed"
    r"|forbidden|deprecated|does not support|instead"
)
LIMITS = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
LIMIT_NAME = re.compile(r"\bmax_(completion_)?tokens\b")

log = logging.getLogger(__name__)

Fields = dict[str, object]
Encode = Callable[[Fields], Awaitable[bytes]]
Convert = Callable[[JSONObject], JSONObject]
T = TypeVar("T")
_call: ContextVar[CallState | None] = ContextVar("call", default=None)
CircuitState = Literal["closed", "open", "half-open"]
MAX_RECORDED = 1000


@dataclass
class CallState:
    """State of one call; `idle` is set while it waits for a slot or for its next attempt, and
    `started` is the `perf_counter` time at which that wait ended."""

    idle: asyncio.Event = field(default_factory=asyncio.Event)
    started: float = field(default_factory=perf_counter)

    @property
    def is_waiting(self) -> bool:
        return self.idle.is_set()


@contextmanager
def track_call() -> Iterator[CallState]:
    """Track the call made inside the block, also from tasks started there."""
    state = CallState()
    token = _call.set(state)
    try:
        yield state
    finally:
        _call.reset(token)


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

    @property
    def choices(self) -> int:
        return n if isinstance(n := self._fields.get("n"), int) else 1


class ChatClient:
    """Client of one model at an endpoint that serves `{base_url}/chat/completions`.

    `timeout` covers one attempt to its last byte, in seconds. `concurrency` limits concurrent
    requests, streams included. Waiting clients take turns; a request that waits for a retry holds
    no slot. Streams are retried only before their first content, and yield nothing earlier. Works
    in any number of event loops. `path` selects another protocol, whose replies `convert` turns
    into chat completions. Raises `bottega.errors.EndpointError`; a rejected request raises
    `RequestRejectedError`, and an open `breaker` raises `PausedError`.
    """

    def __init__(
        self,
        model: str,
        endpoint: Endpoint,
        timeout: float,
        retry: RetryPolicy,
        concurrency: int,
        breaker: Breaker | None = None,
        path: str = CHAT_PATH,
        convert: Convert | None = None,
    ) -> None:
        if not timeout > 0 or concurrency < 1:
            raise SettingError(
                "timeout and concurrency must be positive,"
                f" got timeout={timeout} and concurrency={concurrency}",
                hint="leave them out for the defaults",
            )
        self.model, self.endpoint = model, endpoint
        self._url, self._convert = endpoint.url(path), convert
        self._retry, self._breaker = retry, breaker
        self._connections = Connections(endpoint, timeout, concurrency)
        self._dialect, self._describe = Dialect(), partial(describe_call, model, endpoint, path)

    @property
    def base_url(self) -> str:
        """Base URL without credentials."""
        return self.endpoint.shown

    async def complete(
        self, fields: Fields, encode: Encode = encode_json, prompt: Prompt | None = None
    ) -> ChatCompletion:
        """Return the reply to a body of these fields. `encode` adds the `prompt`, if any, and turns
        them into bytes once a slot is free, so waiting requests hold no encoded bodies."""
        tracer = current_tracer()
        if tracer is None:
            return await self._negotiate(fields, encode, self._complete)
        with model_call(tracer, self._describe(fields, prompt=prompt)) as call:
            completed = await self._negotiate(fields, encode, self._complete)
            call.set_reply(completed)
        return completed

    def stream(self, fields: Fields, encode: Encode = encode_json) -> AsyncGenerator[bytes]:
        """Return the JSON of each chunk of a streamed reply."""
        tracer, chunks = current_tracer(), self._stream(fields, encode)
        if tracer is None:
            return chunks
        return measured_stream(tracer, self._describe(fields, stream=True), chunks)

    async def _stream(self, fields: Fields, encode: Encode) -> AsyncGenerator[bytes]:
        # Retries and dialects apply up to the first content: nothing has reached the client yet.
        first, rest = await self._negotiate(fields, encode, self._begin)
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
        self, fields: Fields, encode: Encode, attempt: Callable[[_Body], Awaitable[T]]
    ) -> T:
        """Send the fields, in another dialect if the server rejects one; keep what it accepts."""
        # A local copy: concurrent requests may try other dialects meanwhile.
        dialect, tried = self._dialect, list[Fields]()
        while True:
            tried.append(dialect.spell(fields))
            body = _Body(tried[-1], encode)
            try:
                result = await self._retry(partial(attempt, body))
            except RejectedError as error:
                other = dialect.after(error, fields)
                # A server may reject both names of a field.
                if other is None or other.spell(fields) in tried:
                    if not rejects_field(error):  # the server accepts the names, nothing else
                        self._dialect = dialect
                    raise
                dialect = other
            else:
                self._dialect = dialect
                return result

    async def _complete(self, body: _Body) -> ChatCompletion:
        async with self._attempt() as (session, _):
            payload = await body.read()
            response = await exchange(session, "POST", self._url, payload, self.base_url)
            reply = self._parsed(response, body.choices)
            if self._convert is not None:
                reply = self._convert(reply)
            return parse_completion(response.payload, reply, self.base_url, self.model)

    async def _begin(self, body: _Body) -> tuple[bytes, AsyncGenerator[bytes]]:
        events = self._events(body)
        return await anext(events), events

    async def _events(self, body: _Body) -> AsyncGenerator[bytes]:
        async with self._attempt() as (session, attempt):
            payload, where = await body.read(), self.base_url
            chunks = stream_chunks(session, self._url, payload, where, self.error, body.choices)
            async with aclosing(chunks):
                async for chunk in chunks:
                    if attempt is not None:
                        attempt.answered()
                    yield chunk

    @asynccontextmanager
    async def _attempt(self) -> AsyncGenerator[tuple[aiohttp.ClientSession, Attempt | None]]:
        """Wait for a slot, and count the block as an attempt at the breaker. Raises `PausedError`.
        Until the block and after its failure, the call counts as waiting."""
        if self._breaker is not None:
            self._breaker.check()
        connection = await self._connections.get()
        state = _call.get() or CallState()
        state.idle.set()
        client = await connection.slots.acquire(1)
        try:
            state.idle.clear()
            state.started = perf_counter()
            with self._breaker.attempt() if self._breaker else nullcontext() as attempt:
                yield connection.session, attempt
        except Exception:
            # The next attempt starts after a pause. A cancellation is not an `Exception`: it ends
            # a running call.
            state.idle.set()
            raise
        finally:
            connection.slots.release(1, client)

    def _parsed(self, response: Response, choices: int = 1) -> JSONObject:
        if response.status >= 300:
            raise self.error(response.status, error_body(response.payload), response.headers)
        if are_events(response.payload):  # some servers ignore `stream`
            events = from_events(response.payload, self.base_url, self.error, choices)
            response.payload = events.payload
        body, response.payload = parse_reply(response.payload, self.base_url)
        if failure := reported_failure(body):
            raise self.error(*failure)
        return body


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential back-off with full jitter; a wait that the server requests takes precedence.
    Times are in seconds. Gives up after `attempts`, if the server requests a wait above
    `longest_wait`, or if all waits together would exceed `longest_total`."""

    attempts: int = 5
    first_wait: float = 0.5
    longest_wait: float = 60.0
    longest_total: float = 300.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = field(default_factory=lambda: random.Random().random)

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise SettingError(
                f"attempts must be at least 1, got {self.attempts}", hint="set retries=0 or more"
            )

    async def __call__(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the first attempt that succeeds. Raises the last failure, also if
        the breaker has opened since; `retry_after` is then at least the rest of its pause."""
        waited = 0.0
        last: EndpointError | None = None
        for number in range(self.attempts):
            try:
                return await attempt()
            except PausedError as paused:
                if last is None:
                    raise
                last.retry_after = max(last.retry_after or 0.0, paused.retry_after)
                raise copy(last) from None
            except EndpointError as error:
                wait = self.wait(number, error.retry_after)
                spent = number + 1 == self.attempts or waited + wait > self.longest_total
                if spent or not error.retryable or (error.retry_after or 0) > self.longest_wait:
                    raise
                last = copy(error)  # without its traceback, which refers to this frame
                log.info("attempt %d failed, next in %.1f s: %s", number + 1, wait, error)
            waited += wait
            await self.sleep(wait)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def wait(self, number: int, requested: float | None) -> float:
        """Return the wait after the failure of attempt `number` (from 0). A wait that the server
        requested is extended by up to a tenth, since it requests the same of all clients."""
        if requested is not None:
            return requested * (1 + self.random() / 10)
        ceiling = min(self.longest_wait, self.first_wait * 2.0**number)
        return ceiling * self.random()


class PausedError(GenerationError):
    """Error of a call that was not sent because the breaker is open after the failure `last`.
    `retry_after` is in seconds. Not an `EndpointError`, so retries do not wait for it: another tier
    can answer now."""

    retryable = True

    def __init__(self, retry_after: float, last: EndpointError | None = None) -> None:
        detail = f"; its last failure: {last}" if last else ""
        super().__init__(
            f"the upstream keeps failing and is paused for {retry_after:.1f} s{detail}",
            hint="look at the upstream's log; meanwhile another tier answers, if there is one",
        )
        self.retry_after, self.last = retry_after, last


@dataclass(frozen=True)
class Tolerance:
    """Limits of a breaker. It opens after `failures` in a row, or when the share `rate` of at least
    `at_least` calls within `window` seconds failed. The first pause lasts `pause` seconds, each
    further one twice as long, at most `longest_pause`."""

    failures: int = 5
    rate: float = 0.5
    at_least: int = 20
    window: float = 30.0
    pause: float = 1.0
    longest_pause: float = 60.0

    def __post_init__(self) -> None:
        counts = min(self.failures, self.at_least) >= 1 and self.at_least <= MAX_RECORDED
        times = self.window > 0 and 0 < self.pause <= self.longest_pause
        if not (counts and times and 0 < self.rate <= 1):
            raise SettingError(
                f"breaker limits are invalid, got {self}",
                hint="set failures and at_least to 1 or more, rate within (0, 1], window and pauses"
                " above 0, and longest_pause to pause or more",
            )


class Breaker:
    """Circuit breaker for one event loop. Closed: calls pass and are counted. Open: calls raise
    `PausedError` at once. Half-open, after the pause: one call passes, and its outcome closes or
    opens the breaker.

    Only the upstream's failures count: no connection, time-outs, 5xx, invalid replies. A 4xx counts
    as success, a cancelled call as neither. The log names the endpoint by `name`.
    """

    def __init__(
        self,
        tolerance: Tolerance | None = None,
        *,
        name: str = "an endpoint",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._tolerance, self._clock = tolerance or Tolerance(), clock
        self._recent: deque[tuple[float, bool]] = deque(maxlen=MAX_RECORDED)
        self._in_a_row = 0
        self._pauses = 0
        self._until: float | None = None
        self._probe: Attempt | None = None
        # Calls that began before the last change of state must not count in the new one.
        self._epoch = 0
        self._last: EndpointError | None = None

    @property
    def state(self) -> CircuitState:
        if self._until is None:
            return "closed"
        return "half-open" if self._probe or self._clock() >= self._until else "open"

    def attempt(self) -> Attempt:
        """Return a context manager that records the outcome of its block. Raises `PausedError`."""
        self.check()
        attempt = Attempt(self, self._epoch)
        if self._until is not None:
            # If this probe does not end within that time, another call may probe.
            self._until = self._clock() + self._tolerance.longest_pause
            self._probe = attempt
        return attempt

    def check(self) -> None:
        """Raise what `attempt` would raise."""
        if self._until is None or (left := self._until - self._clock()) <= 0:
            return
        raise PausedError(min(left, self._tolerance.pause) if self._probe else left, self._last)

    def record(self, attempt: Attempt, error: BaseException | None) -> None:
        """Count the outcome of an attempt. A client error shows that the upstream is alive."""
        is_reply = error is None or isinstance(error, RejectedError) or _is_client_error(error)
        failed = isinstance(error, EndpointError) and not is_reply
        if isinstance(error, EndpointError) and failed:
            self._last = copy(error)  # without its traceback, which would keep the request's body
        # Only the probe decides while the breaker is open: a call that began before may end late.
        if attempt is self._probe:
            if failed:
                self._open()
            elif is_reply:
                self._close()
            else:  # cancelled: the next call may probe at once
                self._until, self._probe = self._clock(), None
        elif (failed or is_reply) and attempt.epoch == self._epoch and self._until is None:
            self._in_a_row = self._in_a_row + 1 if failed else 0
            self._recent.append((self._clock(), failed))
            if failed and (self._in_a_row >= self._tolerance.failures or self._too_many()):
                self._open()

    def _too_many(self) -> bool:
        since = self._clock() - self._tolerance.window
        while self._recent and self._recent[0][0] <= since:
            self._recent.popleft()
        failures = sum(failed for _, failed in self._recent)
        enough = len(self._recent) >= self._tolerance.at_least
        return enough and failures >= self._tolerance.rate * len(self._recent)

    def _open(self) -> None:
        pause = min(self._tolerance.longest_pause, self._tolerance.pause * 2.0**self._pauses)
        # From 2 ** 60 on every pause is the longest; the cap keeps the power from overflowing.
        self._pauses = min(self._pauses + 1, 60)
        self._until, self._probe = self._clock() + pause, None
        self._epoch += 1
        log.warning("%s is paused for %g s: %s", self.name, pause, self._last)

    def _close(self) -> None:
        self._until, self._probe, self._pauses, self._in_a_row = None, None, 0, 0
        self._recent.clear()
        self._epoch += 1


class Attempt:
    """Context manager of one call to the upstream."""

    def __init__(self, breaker: Breaker, epoch: int) -> None:
        self._breaker = breaker
        self.epoch = epoch

    def answered(self) -> None:
        """Close a half-open breaker at the first event of a stream, before its end."""
        if self is self._breaker._probe:
            self._breaker._close()
            # The rest of this stream counts in the closed state that it caused.
            self.epoch = self._breaker._epoch

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._breaker.record(self, error)


def _is_client_error(error: BaseException) -> bool:
    status = error.status if isinstance(error, EndpointError) else None
    return status is not None and 400 <= status < 500


@dataclass(frozen=True)
class Dialect:
    """Fields that a server accepts, learned from its errors. `limit_field` is the only name of the
    token limit that it accepts, None for both; another model behind the same name may change it."""

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
        message = f"{error} {getattr(error, 'param', '')}"
        if not rejects_field(error):
            return None
        given = next((name for name in LIMITS if name in fields), None)
        if given is not None and LIMIT_NAME.search(message):
            return replace(self, limit_field=LIMITS[self.limit_field or given])
        if self.stream_options and "stream_options" in message and "stream_options" in fields:
            return replace(self, stream_options=False)
        return None


def rejects_field(error: RejectedError) -> bool:
    """Return whether the error says that the server does not know or support a field."""
    return error.status in (400, 422) and UNKNOWN_FIELD.search(str(error)) is not None
