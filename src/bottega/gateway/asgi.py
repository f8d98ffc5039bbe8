"""ASGI application: chat requests go straight to their endpoint, other paths to Starlette."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import replace
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
from bottega.gateway.accounting.access import check_host
from bottega.gateway.apis.embeddings import EMBEDDINGS, EmbeddingsEndpoint
from bottega.gateway.apis.messages import PING, messages_endpoint, token_count_endpoint
from bottega.gateway.apis.messages import error_body as messages_error
from bottega.gateway.apis.responses import responses_endpoint
from bottega.gateway.apis.text_completions import COMPLETIONS, completions_endpoint
from bottega.gateway.errors import CLOSING, error_response, to_api_error, unknown_model
from bottega.gateway.ports import Receive, Scope, Send
from bottega.gateway.request.chat import Gateway
from bottega.gateway.request.exchange import CLIENT_LEFT, ChatEndpoint, request_id
from bottega.gateway.request.response_store import not_stored, unknown_response
from bottega.openai_api.errors import ApiError
from bottega.openai_api.streams import to_event

FULL = ApiError(
    "the gateway has reached its limit of concurrent requests",
    status=503,
    code="overloaded",
    headers={"retry-after": "1"},
    hint="try again in a moment",
)

# Paths for monitoring, which are always answered.
PROBE_PATHS = ("/healthz", "/readyz", "/metrics")
CHAT = ("/v1/chat/completions", "/chat/completions")
RESPONSES = ("/v1/responses", "/responses")
MESSAGES = ("/v1/messages",)
TOKEN_COUNT = "/v1/messages/count_tokens"
API_PATHS = {*CHAT, *RESPONSES, *COMPLETIONS, *EMBEDDINGS}
CREATED = 1767225600  # creation time of the virtual models: clients need a number
CONSOLE = "/ui"
SERVED_HINT = (
    "use POST /v1/chat/completions, /v1/responses or /v1/messages, GET /v1/models, /healthz,"
    " /readyz or /metrics"
)
PREFLIGHT_SECONDS = 600


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
    return path.startswith("/v1/") or path in API_PATHS


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

    def allowed_origins(self) -> Collection[str]:
        """Return the origins of web pages that may call the API, which a reload may change."""
        return self._gateway.allowed_origins

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
        """Return whether the connection came to the metrics port. The socket states the port; no
        header can change it."""
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


class Admission:
    """ASGI wrapper that rejects requests above a maximum, with an error of their API. Probes are
    always admitted; `/readyz` fails while it is `closing`. Web pages of `origins` may call the API,
    and read all of its errors."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        limit: int,
        origins: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._app = app
        self.limit = limit
        self._origins = origins
        self.in_flight = 0
        self.closing = False
        self._empty = asyncio.Event()

    async def finish(self, within: float) -> None:
        """Wait until no request is in progress, at most `within` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self.in_flight:
                    self._empty.clear()
                    await self._empty.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await open_to_pages(self._admit, scope, self._origins())(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self.closing and scope["path"] == "/readyz":
            await error_response(CLOSING)(scope, receive, send)
        elif scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
        elif self.in_flight >= self.limit:
            await error_at(scope["path"], FULL)(scope, receive, send)
        else:
            # No await since the comparison: two requests cannot take the same last slot.
            self.begin()
            try:
                await self._app(scope, receive, _closing(send) if self.closing else send)
            finally:
                self.end()

    def begin(self) -> None:
        """Count a request that has begun."""
        self.in_flight += 1

    def end(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._empty.set()


def _closing(send: Send) -> Send:
    """Return a `send` that closes the connection after the reply, so the client's next request goes
    to another gateway."""

    async def send_and_close(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"connection", b"close")]
            message = {**message, "headers": headers}
        await send(message)

    return send_and_close
