"""One exchange over HTTP: body, reply or events, keep-alives, and clients that disconnect."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from bottega._util.caching import FairSemaphore
from bottega.gateway.errors import CLOSING, note_failure
from bottega.gateway.ports import AnswerHandler, HttpReply, Receive, RequestRecord, Scope, Send
from bottega.gateway.request.reading import MB, Limits
from bottega.openai_api.errors import ApiError
from bottega.openai_api.streams import to_event

RECEIVED_BYTES = 512 * MB
# Bodies of at most this size never wait: gateway.max_concurrent bounds them well enough.
SMALL_BODY = 64 * 1024
# The rest of a refused body is awaited so long after its last byte.
LINGER_SECONDS = 1.0
# A body may take so long, and a second more for each of these bytes.
BODY_SECONDS, BODY_BYTES_PER_SECOND = 120.0, 64 * 1024
CHECKS = 20  # for late bodies, in the time after which a body has stalled

POLL_SECONDS = 0.05
JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
# Proxies must not buffer a stream.
UNBUFFERED = (b"x-accel-buffering", b"no"), (b"cache-control", b"no-store")
CLIENT_LEFT = 499
Measure = Callable[[RequestRecord, Scope, Mapping[str, str]], AbstractContextManager[None]]
CLIENT_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class WatchedRequest:
    """Request whose task is cancelled once its client disconnects, and whose stream is kept alive
    by `sender` after so many silent seconds."""

    __slots__ = ("_receive", "_seconds", "_sender", "_watcher", "_work", "has_left")

    def __init__(
        self, work: asyncio.Task[Any], receive: Receive, sender: ReplySender, seconds: float
    ) -> None:
        self._work: asyncio.Task[Any] | None = work
        self._sender: ReplySender | None = sender
        self._receive, self._seconds = receive, seconds
        self._watcher: asyncio.Task[None] | None = None
        self.has_left = False

    def listen(self) -> None:
        if self._watcher is None and self._sender is not None:
            self._sender.last = perf_counter()
            self._watcher = asyncio.create_task(self._cancel_when_gone(self._sender))

    def end(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        # The task's context and the sender's record refer to this request. Break the cycles:
        # otherwise all would stay until the next garbage collection.
        self._work = self._sender = None

    async def _cancel_when_gone(self, sender: ReplySender) -> None:
        while not await self._has_disconnected(sender.last + self._seconds):
            if sender.last + self._seconds <= perf_counter():
                await sender.keep_alive()
        self.has_left = True
        if self._work is not None:
            self._work.cancel()

    async def _has_disconnected(self, until: float) -> bool:
        """Wait for the next message, or until a keep-alive is due at this `perf_counter` time."""
        # The body is complete, so the next message is the disconnect, or an empty request.
        try:
            async with asyncio.timeout(until - perf_counter()):
                return bool((await self._receive())["type"] == "http.disconnect")
        except TimeoutError:
            return False


class DisconnectWatcher:
    """Watcher for the disconnect of clients whose requests take longer than a moment. One timer
    serves all requests: a task or timer per request would double the cost of a replay."""

    def __init__(self) -> None:
        self._new: dict[WatchedRequest, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, request: WatchedRequest) -> None:
        self._new[request] = None
        if self._timer is None:
            self._schedule_tick()

    def end(self, request: WatchedRequest) -> None:
        self._new.pop(request, None)
        request.end()

    def _schedule_tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(POLL_SECONDS, self._tick, list(self._new))

    def _tick(self, seen: list[WatchedRequest]) -> None:
        """Listen to the requests that were also in progress at the previous tick."""
        for request in seen:
            if request in self._new:
                del self._new[request]
                request.listen()
        self._timer = None
        if self._new:
            self._schedule_tick()


class BodyBudget:
    """Budget of at most `max_bytes` of bodies that are being received, by their stated length.
    Clients take turns; one that is sending leaves a quarter to each other one. Without a new byte
    for `stalled_seconds`, a body is rejected."""

    stalled_seconds = 20.0
    wait_seconds = 30.0  # stalled bodies end meanwhile

    def __init__(self, max_bytes: int = RECEIVED_BYTES) -> None:
        quarter = max_bytes // 4
        self.bytes = FairSemaphore(max_bytes, reserved=quarter, share=quarter)
        self.watched: dict[BodyReceiver, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def receiver(self, content_length: str | None, receive: Receive) -> BodyReceiver:
        """Return `receive` within the limits of the budget, until it is released. Nothing is
        reserved before its first call, which so must come after the check of the key."""
        length = content_length or ""
        return BodyReceiver(self, int(length[:20]) if length.isdecimal() else 0, receive)

    def watch(self, receiver: BodyReceiver) -> None:
        """End late waits of the receiver until it is released. One timer serves all: one for each
        message took a tenth of the time of a repeat."""
        self.watched[receiver] = None
        if self._timer is None:
            self._schedule_check()

    def _schedule_check(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.stalled_seconds / CHECKS, self._check, loop)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        for receiver in self.watched:
            receiver.end_late_wait(loop.time())
        if self.watched:
            self._schedule_check()


class BodyReceiver:
    """Receiver of the messages of one request. Raises `ApiError` (408, 503)."""

    def __init__(self, budget: BodyBudget, length: int, receive: Receive) -> None:
        self._budget, self._length, self._receive = budget, length, receive
        self._received, self._is_complete, self._is_late = 0, False, False
        self._task: asyncio.Task[Any] | None = None
        self._begun = 0.0  # with the first message
        self._waits_since: float | None = None  # for the next message
        self._refusal: ApiError | None = None
        self._held: list[tuple[int, str]] = []

    async def __call__(self) -> MutableMapping[str, Any]:
        if self._is_complete:  # what follows is the disconnect
            return await self._receive()
        if self._received or self._length > SMALL_BODY:
            message = await self._receive_in_time()
        else:  # mostly the whole body: a timer would cost more than the rest
            message = await self._receive()
        self._received += len(message.get("body", b""))
        self._is_complete = not message.get("more_body")
        return message

    async def _receive_in_time(self) -> MutableMapping[str, Any]:
        if max(self._length, self._received) > SMALL_BODY:
            await self._reserve()
        self._waits_since = asyncio.get_running_loop().time()
        if self._task is None:
            self._begun = self._waits_since
            self._budget.watch(self)
        self._task = asyncio.current_task()
        try:
            return await self._receive()
        except asyncio.CancelledError:
            if not self._is_late or self._task is None or self._task.uncancel():
                raise
            raise ApiError(
                "the body of the request did not arrive in time",
                status=408,
                code="body_timeout",
                headers={"connection": "close"},
                hint="send it without pauses, or in smaller requests",
            ) from None
        finally:
            self._waits_since = None

    def end_late_wait(self, now: float) -> None:
        """End the wait for a message that is late."""
        if self._task is None or self._waits_since is None:  # while the gateway is at work
            return
        latest = self._begun + BODY_SECONDS + self._received / BODY_BYTES_PER_SECOND
        if now >= min(self._waits_since + self._budget.stalled_seconds, latest):
            self._is_late, self._waits_since = True, None
            self._task.cancel()

    def lingering(self, send: Send) -> Send:
        """Return a `send` that reads the rest of a refused body before it ends the response. A
        connection that is closed with unread bytes is reset, and the client loses the response."""
        if 0 < self._length <= SMALL_BODY:
            return send

        async def send_lingering(message: Any) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if self._refusal is None or not is_last:
                await send(message)
                return
            await send({**message, "more_body": True})
            self._refusal.__traceback__ = None  # its frames keep what was received
            self.release()
            await self._discard()
            await send({"type": "http.response.body"})

        return send_lingering

    async def _discard(self) -> None:
        loop = asyncio.get_running_loop()
        latest = loop.time() + self._budget.stalled_seconds
        with suppress(TimeoutError):
            while not self._is_complete:
                async with asyncio.timeout_at(min(latest, loop.time() + LINGER_SECONDS)):
                    self._is_complete = not (await self._receive()).get("more_body")

    def release(self) -> None:
        self._budget.watched.pop(self, None)
        self._task = None  # the task's frames refer to this receiver
        for need, client in self._held:
            self._budget.bytes.release(need, client)
        self._held.clear()

    async def _reserve(self) -> None:
        """Reserve the length, and of a body without one a megabyte at a time. Only the first
        megabyte waits: bodies that hold some and wait for more could wait for each other."""
        if self._length and self._held:
            return
        lane, reserved = self._budget.bytes, sum(need for need, _ in self._held)
        wanted = self._length or (self._received // MB + 1) * MB
        most = lane.room - lane.reserved  # a longer body must leave room for other clients, too
        if (need := min(wanted, most) - reserved) > 0:
            seconds = 0.0 if self._held else self._budget.wait_seconds
            try:
                self._held.append((need, await lane.acquire(need, seconds)))
            except TimeoutError:
                self._refusal = ApiError(
                    "the gateway is receiving too many large bodies",
                    status=503,
                    code="receiving_busy",
                    headers={"retry-after": "2"},
                    hint="try again in a moment, or send fewer large requests at a time",
                )
                raise self._refusal from None


@dataclass(frozen=True)
class ChatEndpoint:
    """ASGI endpoint that calls `answer` with the headers and a function that reads the body. Its
    exceptions become errors that `error_body` formats, or `error_event` within a stream, by default
    those of the OpenAI API. `on_end` gets the record of each ended request; `measure` is a context
    manager around each request. A stream that is silent for `keep_alive_seconds` gets a
    `keep_alive`."""

    answer: AnswerHandler
    on_end: Callable[[RequestRecord], None]
    limits: Limits
    error_body: Callable[[ApiError], bytes] = lambda error: error.body
    error_event: Callable[[ApiError], bytes] = lambda error: to_event(error.body)
    measure: Measure = lambda record, scope, headers: nullcontext()
    watch: DisconnectWatcher = field(default_factory=DisconnectWatcher)
    keep_alive: bytes = b": keep-alive\n\n"
    keep_alive_seconds: float = 15.0
    bodies: BodyBudget = field(default_factory=BodyBudget)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        record = RequestRecord(request_id(), client_request_id(headers))
        with self.measure(record, scope, headers):
            await self._respond(record, headers, receive, send)

    async def _respond(
        self, record: RequestRecord, headers: Mapping[str, str], receive: Receive, send: Send
    ) -> None:
        work = asyncio.current_task()
        assert work is not None
        receiver = self.bodies.receiver(headers.get("content-length"), receive)
        sender = ReplySender(receiver.lingering(send), record, self.keep_alive)
        watched = WatchedRequest(work, receive, sender, self.keep_alive_seconds)
        record.has_left = lambda: watched.has_left

        async def body() -> bytes:
            try:
                raw = await _body(headers, receiver, self.limits)
            finally:
                receiver.release()
            self.watch.begin(watched)
            return raw

        try:
            reply = await self.answer(record, headers, body)
            if watched.has_left and reply.events is None:
                raise _DisconnectedError  # the upstream call was finished only to learn its cost
            await sender.send(reply)
        except _DisconnectedError:
            record.state, record.status, record.reason = "failed", CLIENT_LEFT, "client left"
        except asyncio.CancelledError:
            # The watcher cancels for a client that left, the server for its shutdown.
            record.state = "failed"
            if watched.has_left:
                record.status, record.reason = CLIENT_LEFT, record.reason or "client left"
            else:
                record.status, record.reason = CLOSING.status, "shutting down"
                if record.streamed:
                    await sender.end(self.error_event(CLOSING))
                else:
                    await sender.send(HttpReply(CLOSING.headers, self.error_body(CLOSING)))
        except Exception as error:
            api_error = note_failure(record, error)
            if sender.has_ended:
                raise  # uvicorn closes the connection
            if record.streamed:
                await sender.end(self.error_event(api_error))
            else:
                await sender.send(HttpReply(api_error.headers, self.error_body(api_error)))
        finally:
            self.watch.end(watched)
            self.on_end(record)


def request_id() -> str:
    """Return a new id. It begins with the time, by which its ledger entry is found."""
    return f"req_{int(time.time() * 1000):012x}{random.getrandbits(80):020x}"


def client_request_id(headers: Mapping[str, str]) -> str:
    """Return the client's own id of the request, "" without a valid one. It names the request for
    this client only: ledger, traces and stored examples have the gateway's unique id."""
    given = headers.get("x-client-request-id") or headers.get("x-request-id") or ""
    return given if CLIENT_REQUEST_ID.fullmatch(given) else ""


class _DisconnectedError(Exception):
    """The client disconnected before its body or the reply was complete."""


async def _body(headers: Mapping[str, str], receive: Receive, limits: Limits) -> bytes:
    content_length = headers.get("content-length", "")
    if content_length.isdecimal():
        limits.check_size(int(content_length))
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _DisconnectedError
        chunk = message.get("body", b"")
        size += len(chunk)
        limits.check_size(size)
        chunks.append(chunk)
        if not message.get("more_body"):
            return b"".join(chunks)


class ReplySender:
    """Sender of the reply to one request, and of keep-alives while its stream is silent. `last` is
    the moment of the last event, on the clock of `perf_counter`."""

    __slots__ = ("_keep_alive", "_record", "_send", "_starting", "has_ended", "last")

    def __init__(self, send: Send, record: RequestRecord, keep_alive: bytes) -> None:
        self._send, self._record, self._keep_alive = send, record, keep_alive
        self._starting = asyncio.Lock()  # a keep-alive may come when the reply begins or ends
        self.has_ended = False
        self.last = 0.0

    async def send(self, reply: HttpReply) -> None:
        """Send a whole reply. Headers that come after a keep-alive are sent as a comment."""
        if reply.events is None:
            self.has_ended = True
            length = b"content-length", str(len(reply.payload)).encode()
            await self._start(reply.headers, JSON, length)
            await self._send({"type": "http.response.body", "body": reply.payload})
            return
        try:
            # Start the generator first: `aclose` skips the `finally` of one that has not started.
            first = await anext(reply.events, b"")
            await self._begin_events(reply.headers)
            await self._send_event(first)
            async for event in reply.events:
                self.last = perf_counter()
                await self._send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            await reply.events.aclose()
        await self.end()

    async def keep_alive(self) -> None:
        """Send a keep-alive to a client that requested a stream. The first one before the reply
        sends the status 200 and the tier that is tried."""
        self.last = perf_counter()
        if not self._record.wants_stream:
            return
        async with self._starting:
            if self.has_ended:
                return
            if not self._record.streamed:
                route = self._record.route
                await self._start_events({"x-bottega-route": route} if route else {})
            await self._send_event(self._keep_alive)

    async def _begin_events(self, headers: Mapping[str, str]) -> None:
        async with self._starting:
            if not self._record.streamed:
                await self._start_events(headers)
            elif headers:
                comment = "".join(f": {name}: {value}\n" for name, value in headers.items())
                await self._send_event(f"{comment}\n".encode())

    async def _start_events(self, headers: Mapping[str, str]) -> None:
        self._record.streamed = True
        await self._start(headers, EVENTS, *UNBUFFERED)

    async def _start(self, given: Mapping[str, str], *more: tuple[bytes, bytes]) -> None:
        record = self._record
        headers = [*more, (b"x-request-id", record.request_id.encode())]
        if record.client_request_id:
            headers.append((b"x-client-request-id", record.client_request_id.encode()))
        for name, value in given.items():
            headers.append((name.encode(), value.encode("latin-1", "replace")))
        await self._send(
            {"type": "http.response.start", "status": record.status, "headers": headers}
        )

    async def _send_event(self, event: bytes) -> None:
        self.last = perf_counter()
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def end(self, event: bytes = b"") -> None:
        """End a stream, after a last event if given."""
        async with self._starting:
            if self.has_ended:
                return
            self.has_ended = True
            await self._send({"type": "http.response.body", "body": event})
