"""HTTP endpoint of one chat request: its record, its reply, and clients that disconnect."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bottega.errors import BottegaError
from bottega.gateway.accounting.accounts import Account
from bottega.gateway.accounting.entries import State
from bottega.gateway.accounting.limiter import Hold
from bottega.gateway.errors import CLOSING, to_api_error
from bottega.openai_api.errors import ApiError
from bottega.openai_api.streams import to_event
from bottega.types import Usage

Result = TypeVar("Result")


async def shield_for(
    work: Coroutine[Any, Any, Result],
    seconds: float,
    may_finish: Callable[[], bool],
    idle: asyncio.Event,
) -> Result:
    """Return the result of `work`. If the caller is cancelled and `may_finish` returns True, the
    work continues for at most `seconds`, and only until `idle` is set; if it ends in time, its
    result or error replaces the cancellation. Otherwise the work is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        # `await task` would pass a cancellation of the caller on to the task.
        await asyncio.wait([task])
    except asyncio.CancelledError:
        if may_finish() and not idle.is_set():
            await _wait_until_idle(task, seconds, idle)  # or cancelled again
        if not task.done():
            raise
        current = asyncio.current_task()
        assert current is not None
        current.uncancel()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    return task.result()


async def _wait_until_idle(task: asyncio.Task[Result], seconds: float, idle: asyncio.Event) -> None:
    """Wait until the task is done or idle, for at most `seconds`."""
    waiting = asyncio.create_task(idle.wait())
    try:
        await asyncio.wait([task, waiting], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
# Paths for monitoring, which are always answered.
PROBE_PATHS = ("/healthz", "/readyz", "/metrics")
POLL_SECONDS = 0.05


class WatchedRequest:
    """Request whose task is cancelled once its client disconnects."""

    __slots__ = ("_receive", "_watcher", "_work", "has_left")

    def __init__(self, work: asyncio.Task[Any], receive: Receive) -> None:
        self._work, self._receive = work, receive
        self._watcher: asyncio.Task[None] | None = None
        self.has_left = False

    def listen(self) -> None:
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._cancel_when_gone())

    def end(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()

    async def _cancel_when_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.has_left = True
        self._work.cancel()


class DisconnectWatcher:
    """Watcher that listens for the disconnect of clients that have waited for a moment. One timer
    serves all requests: a task or timer per request would double the cost of a replay."""

    def __init__(self) -> None:
        self._new: dict[WatchedRequest, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, one: WatchedRequest) -> None:
        self._new[one] = None
        if self._timer is None:
            self._look_again()

    def end(self, one: WatchedRequest) -> None:
        self._new.pop(one, None)
        one.end()

    def _look_again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(
            POLL_SECONDS, self._look, list(self._new)
        )

    def _look(self, seen: list[WatchedRequest]) -> None:
        """Listen to the requests that were also in progress at the previous tick."""
        for one in seen:
            if one in self._new:
                del self._new[one]
                one.listen()
        self._timer = None
        if self._new:
            self._look_again()


ANONYMOUS = Account("", "anonymous")
NO_USAGE = Usage()
Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

log = logging.getLogger(__name__)
JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
# Proxies in between must not hold a stream back.
UNBUFFERED = (b"x-accel-buffering", b"no"), (b"cache-control", b"no-store")
CLIENT_LEFT = 499


@dataclass(slots=True)
class RequestRecord:
    """Record of one request, filled in while it is processed and logged when it ends."""

    request_id: str
    begun: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)
    account: Account = ANONYMOUS
    entered: bool = False
    hold: Hold | None = None
    has_left: Callable[[], bool] = lambda: False
    namespace: str = ""
    route: str = ""
    model: str = ""
    state: State = "failed"
    fallback: str = ""  # tiers that failed before the one that answered
    reason: str = ""  # for a failure, or for passing through without routing
    shots: int = 0
    similarity: float | None = None
    usage: Usage = NO_USAGE
    cost_usd: float | None = 0.0
    dismissed_usd: float = 0.0
    stored: str | None = None
    status: int = 200
    streamed: bool = False

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.clock


@dataclass(slots=True)
class Reply:
    """Reply with either a `payload` or `events`, the encoded chunks of a stream."""

    headers: Mapping[str, str]
    payload: bytes = b""
    events: AsyncGenerator[bytes] | None = None


Answer = Callable[
    [RequestRecord, Mapping[str, str], Callable[[], Awaitable[bytes]]], Awaitable[Reply]
]


@dataclass(frozen=True)
class ChatEndpoint:
    """ASGI endpoint that calls `answer` with the headers and a function that reads the body. Its
    exceptions become errors of the OpenAI API. `over` gets the record of each ended request."""

    answer: Answer
    over: Callable[[RequestRecord], None]
    max_bytes: int
    watch: DisconnectWatcher = field(default_factory=DisconnectWatcher)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = RequestRecord(request_id())
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        started = False
        work = asyncio.current_task()
        assert work is not None
        watched = WatchedRequest(work, receive)
        record.has_left = lambda: watched.has_left

        async def body() -> bytes:
            raw = await _body(headers, receive, self.max_bytes)
            self.watch.begin(watched)
            return raw

        try:
            reply = await self.answer(record, headers, body)
            if watched.has_left and reply.events is None:
                raise _LeftError  # the upstream call was finished only to learn its cost
            started = True
            await _send(send, record, reply)
        except _LeftError:
            record.state, record.status = "failed", CLIENT_LEFT
            record.reason = "client left"
        except asyncio.CancelledError:
            record.state = "failed"
            if watched.has_left:
                record.status, record.reason = CLIENT_LEFT, record.reason or "client left"
            else:
                record.status, record.reason = CLOSING.status, "shutting down"
                await _cut(send, record)
        except Exception as error:
            self._failed(error, record)
            if started:
                raise
            api_error = to_api_error(error)
            record.status = api_error.status
            await _send(send, record, Reply(api_error.headers, api_error.body))
        finally:
            self.watch.end(watched)
            self.over(record)

    def _failed(self, error: Exception, record: RequestRecord) -> None:
        record.state = "failed"
        record.reason = getattr(error, "code", None) or type(error).__name__
        if not isinstance(error, BottegaError):
            log.error("request %s failed", record.request_id, exc_info=error)
        elif not isinstance(error, ApiError):
            log.warning("request %s failed: %s", record.request_id, error)


def request_id() -> str:
    return f"req_{random.getrandbits(128):032x}"


class _LeftError(Exception):
    """The client disconnected before its body or the reply was complete."""


async def _body(headers: Mapping[str, str], receive: Receive, most: int) -> bytes:
    stated = headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > most:
        raise _too_large(most)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _LeftError
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > most:
            raise _too_large(most)
        chunks.append(chunk)
        if not message.get("more_body"):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(most: int) -> ApiError:
    return ApiError(
        f"the body is larger than {most >> 20} MB",
        status=413,
        code="body_too_large",
        headers={"connection": "close"},
        hint="send fewer or smaller images",
    )


async def _send(send: Send, record: RequestRecord, reply: Reply) -> None:
    headers = [(b"x-request-id", record.request_id.encode())]
    for name, value in reply.headers.items():
        headers.append((name.encode(), value.encode("latin-1", "replace")))
    if reply.events is None:
        length = (b"content-length", str(len(reply.payload)).encode())
        headers += (JSON, length)
        await _start(send, record.status, headers)
        await send({"type": "http.response.body", "body": reply.payload})
        return
    status = record.status
    try:
        # Start the generator first: `aclose` skips the `finally` of one that has not started.
        first = await anext(reply.events, b"")
        await _start(send, status, [EVENTS, *UNBUFFERED, *headers])
        record.streamed = True
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async for one in reply.events:
            await send({"type": "http.response.body", "body": one, "more_body": True})
    finally:
        await reply.events.aclose()
    await send({"type": "http.response.body", "body": b""})


async def _cut(send: Send, record: RequestRecord) -> None:
    """End a reply that the server's shutdown has interrupted with an error."""
    if not record.streamed:
        await _send(send, record, Reply(CLOSING.headers, CLOSING.body))
        return
    await send({"type": "http.response.body", "body": to_event(CLOSING.body), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _start(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
