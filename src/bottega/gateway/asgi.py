"""ASGI application: chat requests go straight to their endpoint, other paths to Starlette."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from bottega.errors import StoreError
from bottega.gateway.chat import Gateway
from bottega.gateway.completions import completions_endpoint
from bottega.gateway.decode_budget import BodyBudget
from bottega.gateway.embeddings import EmbeddingsEndpoint
from bottega.gateway.errors import (
    CLOSING,
    error_response,
    note_failure,
    to_api_error,
    unknown_model,
)
from bottega.gateway.messages import PING, messages_endpoint, token_count_endpoint
from bottega.gateway.messages import error_body as messages_error
from bottega.gateway.ports import Answer, Receive, Reply, RequestRecord, Scope, Send
from bottega.gateway.requests import Limits, check_host
from bottega.gateway.response_store import not_stored, unknown_response
from bottega.gateway.responses import responses_endpoint
from bottega.gateway.telemetry.request_spans import Measure, not_measured
from bottega.openai_api.errors import ApiError
from bottega.openai_api.streams import to_event

# Paths for monitoring, which are always answered.
PROBE_PATHS = ("/healthz", "/readyz", "/metrics")
POLL_SECONDS = 0.05
JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
# Proxies must not buffer a stream.
UNBUFFERED = (b"x-accel-buffering", b"no"), (b"cache-control", b"no-store")
CLIENT_LEFT = 499
CLIENT_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
CHAT = ("/v1/chat/completions", "/chat/completions")
RESPONSES = ("/v1/responses", "/responses")
MESSAGES = ("/v1/messages",)
TOKEN_COUNT = "/v1/messages/count_tokens"
COMPLETIONS = ("/v1/completions", "/completions")
EMBEDDINGS = ("/v1/embeddings", "/embeddings")
CHAT_PATHS = {*CHAT, *RESPONSES, *COMPLETIONS, *EMBEDDINGS}
CREATED = 1767225600  # creation time of the virtual models: clients need a number
CONSOLE = "/ui"
SERVED_HINT = (
    "use POST /v1/chat/completions, /v1/responses or /v1/messages, GET /v1/models, /healthz,"
    " /readyz or /metrics"
)
PREFLIGHT_SECONDS = 600


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


@dataclass(frozen=True)
class ChatEndpoint:
    """ASGI endpoint that calls `answer` with the headers and a function that reads the body. Its
    exceptions become errors that `error_body` formats, or `error_event` within a stream, by default
    those of the OpenAI API. `on_end` gets the record of each ended request; `measure` is a context
    manager around each request. A stream that is silent for `keep_alive_seconds` gets a
    `keep_alive`."""

    answer: Answer
    on_end: Callable[[RequestRecord], None]
    limits: Limits
    error_body: Callable[[ApiError], bytes] = lambda error: error.body
    error_event: Callable[[ApiError], bytes] = lambda error: to_event(error.body)
    measure: Measure = not_measured
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
                    await sender.send(Reply(CLOSING.headers, self.error_body(CLOSING)))
        except Exception as error:
            api_error = note_failure(record, error)
            if sender.has_ended:
                raise  # uvicorn closes the connection
            if record.streamed:
                await sender.end(self.error_event(api_error))
            else:
                await sender.send(Reply(api_error.headers, self.error_body(api_error)))
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

    async def send(self, reply: Reply) -> None:
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


def endpoints_by_path(gateway: Gateway, chat_endpoint: ChatEndpoint) -> dict[str, ChatEndpoint]:
    """Return the endpoints of all APIs on top of `chat_endpoint`, that of chat completions."""
    chat = chat_endpoint.answer
    store, warn = gateway.response_store, gateway.finalizer.warn
    responses = replace(chat_endpoint, answer=responses_endpoint(chat, store, warn=warn).answer)
    embeddings = replace(chat_endpoint, answer=EmbeddingsEndpoint(gateway).answer)
    completions = replace(chat_endpoint, answer=completions_endpoint(chat).answer)
    messages = replace(
        chat_endpoint,
        answer=messages_endpoint(chat).answer,
        error_body=messages_error,
        error_event=lambda error: b"event: error\n" + to_event(messages_error(error)),
        keep_alive=PING,
    )
    token_count = replace(messages, answer=token_count_endpoint(gateway.count_tokens).answer)
    return (
        dict.fromkeys(CHAT, chat_endpoint)
        | dict.fromkeys(RESPONSES, responses)
        | dict.fromkeys(MESSAGES, messages)
        | {TOKEN_COUNT: token_count}
        | dict.fromkeys(COMPLETIONS, completions)
        | dict.fromkeys(EMBEDDINGS, embeddings)
    )


def is_console(path: str) -> bool:
    return path == CONSOLE or path.startswith(f"{CONSOLE}/")


def is_api(path: str) -> bool:
    return path.startswith("/v1/") or path in CHAT_PATHS


def unframed(send: Send) -> Send:
    """Return a `send` that forbids other pages to show the response in a frame, where a user could
    be made to click on it. Errors outside the pages have no policy of their own."""

    async def send_unframed(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            headers.append((b"x-frame-options", b"DENY"))
            if b"content-security-policy" not in dict(headers):
                headers.append((b"content-security-policy", b"frame-ancestors 'none'"))
            message = {**message, "headers": headers}
        await send(message)

    return send_unframed


def open_to_pages(app: ASGIApp, scope: Scope, origins: Collection[str]) -> ASGIApp:
    """Return the app, for a call of the API by a web page of the `origins` as one that lets the
    page read all replies (CORS). Other pages, the console and the administration API have no such
    permission. Cookies are not allowed: keys are in headers."""
    if not origins or scope["type"] != "http":
        return app
    path, origin = scope["path"], dict(scope["headers"]).get(b"origin", b"").decode("latin-1")
    if origin not in origins or not is_api(path):
        return app
    return CORSMiddleware(
        app,
        allow_origins=[origin],
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["*"],
        max_age=PREFLIGHT_SECONDS,
    )


class App:
    """ASGI application of the gateway. `more` are further routes, such as those of the
    administration API. `/readyz` includes `tier_problems`."""

    def __init__(
        self,
        gateway: Gateway,
        chat_endpoint: ChatEndpoint,
        *,
        is_ready: Callable[[], bool] = lambda: True,
        tier_problems: Callable[[], Mapping[str, Sequence[str]]] = dict,
        metrics: Callable[[], tuple[bytes, str]] | None = None,
        more: Sequence[BaseRoute] = (),
        lifespan: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self._endpoints = endpoints_by_path(gateway, chat_endpoint)
        self._gateway, self.bodies = gateway, chat_endpoint.bodies
        self._is_ready, self._tier_problems, self._metrics = is_ready, tier_problems, metrics
        # Set after its socket is bound. On this port `/metrics` needs no key.
        self.metrics_port: int | None = None
        methods = ["GET", "POST", "DELETE"]
        routes: list[BaseRoute] = [
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/responses/{name:path}", self._stored_response, methods=methods),
            *([Route("/metrics", self._exposition)] if metrics is not None else []),
            *more,
        ]
        handlers = {
            HTTPException: _send_not_found,
            ClientDisconnect: _end_disconnected,
            ApiError: _send_error,
            Exception: _send_error,
        }
        self._rest = Starlette(
            routes=routes, lifespan=lambda app: lifespan(), exception_handlers=handlers
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
            return
        of_console = is_console(scope["path"])
        if of_console:
            send = unframed(send)
        try:
            self._check(scope, of_console)
        except ApiError as error:
            await error_at(scope["path"], error)(scope, receive, send)
            return
        endpoint = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        if endpoint is not None:
            await endpoint(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"").decode("latin-1")
        receiver = self.bodies.receiver(length, receive)
        try:
            await self._rest(scope, receiver, receiver.lingering(send))
        finally:
            receiver.release()  # forms are kept in files until the reply

    def _check(self, scope: Scope, of_console: bool) -> None:
        """Check the host name, and on the metrics port the path. Raises `ApiError`."""
        # Probes and Prometheus send the address or service name of the machine.
        is_for_metrics = self._is_for_metrics(scope)
        exempt = scope["path"] == "/healthz" or is_for_metrics
        # With keys, only the console has a list of names: its cookies belong to a name.
        hosts = self._gateway.allowed_hosts if of_console else ()
        if (self._gateway.authenticate is None or hosts) and not exempt:
            host_header = dict(scope["headers"]).get(b"host")
            host = None if host_header is None else host_header.decode("latin-1")
            check_host(host, self._gateway.allowed_hosts)
        if is_for_metrics and scope["path"] not in PROBE_PATHS:
            raise ApiError(
                "this port serves only /metrics, /healthz and /readyz",
                status=404,
                code="not_found",
                hint="send the request to gateway.port",
            )

    def _is_for_metrics(self, scope: Scope) -> bool:
        """Return whether the connection came to the metrics port. The port is that of the socket,
        which no header can change."""
        port = (scope.get("server") or ("", None))[1]
        return self.metrics_port is not None and port == self.metrics_port

    async def _healthz(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def _readyz(self, request: Request) -> Response:
        ready = self._is_ready()
        status = "ready" if ready else "not ready"
        return _json({"status": status, **self._tier_problems()}, 200 if ready else 503)

    async def _models(self, request: Request) -> Response:
        names = self._gateway.models_of(self._gateway.check_key(request.headers))
        return _json({"object": "list", "data": [_model(name) for name in names]})

    async def _model(self, request: Request) -> Response:
        names = self._gateway.models_of(self._gateway.check_key(request.headers))
        if (name := request.path_params["name"]) not in names:
            raise unknown_model(name, names)
        return _json(_model(name))

    async def _stored_response(self, request: Request) -> Response:
        account, id = self._gateway.check_key(request.headers), request.path_params["name"]
        await self._gateway.check_rate(account)
        if (store := self._gateway.response_store) is None:
            raise not_stored()
        try:
            if request.method == "GET":
                payload = await store.get(account.id, id)
                return Response(payload, media_type="application/json")
            if request.method == "DELETE":
                await store.delete(account.id, id)
                return _json({"id": id, "object": "response", "deleted": True})
        except StoreError as error:
            raise to_api_error(error) from error
        raise unknown_response(id)

    async def _exposition(self, request: Request) -> Response:
        assert self._metrics is not None
        # A peer on loopback may be a proxy that serves the public, even without proxy headers, and
        # metrics name tenants and their spending.
        is_open = self._gateway.authenticate is None or self._is_for_metrics(request.scope)
        if not is_open:
            account = self._gateway.check_key(request.headers, may_view=True)
            if not (account.admin or account.viewer):
                raise ApiError(
                    "this key may not read the metrics",
                    status=403,
                    code="not_an_admin",
                    hint="send a viewer's key (bottega keys add NAME --viewer), or set"
                    " gateway.metrics_port",
                )
        payload, kind = self._metrics()
        return Response(payload, media_type=kind)


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": CREATED, "owned_by": "bottega"}


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def error_at(path: str, error: ApiError, **headers: str) -> Response:
    """Return the error as a response in the format of the API at this path."""
    body = messages_error(error) if path.startswith(MESSAGES) else None
    return error_response(error, body, **headers)


async def _send_error(request: Request, error: Exception) -> Response:
    return error_at(request.url.path, to_api_error(error), **{"x-request-id": request_id()})


async def _end_disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)  # no client receives it


async def _send_not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, hint = request.url.path, SERVED_HINT
    if path.startswith("/v1/v1/"):
        hint = "leave /v1 out of the base URL, which this client adds itself"
    elif is_api(path) and "access-control-request-method" in request.headers:
        hint = "add the page's origin to gateway.allowed_origins"
    not_found = ApiError(
        f"{request.method} {path[:200]} is not served",
        status=error.status_code,
        code="not_found",
        hint=hint,
    )
    return await _send_error(request, not_found)
