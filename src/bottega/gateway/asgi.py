"""ASGI application: chat requests go straight to their endpoint, other paths to Starlette."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from bottega.gateway.chat import Gateway
from bottega.gateway.endpoint import PROBE_PATHS, ChatEndpoint, Receive, Scope, Send, request_id
from bottega.gateway.errors import send_error, to_api_error
from bottega.gateway.origins import check_host
from bottega.gateway.responses.endpoint import ResponsesEndpoint
from bottega.openai_api.errors import ApiError

CHAT = ("/v1/chat/completions", "/chat/completions")
RESPONSES = ("/v1/responses", "/responses")
CREATED = 1767225600  # creation time of the virtual models: clients need a number


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
        lifespan: Callable[[], AbstractAsyncContextManager[None]] | None = None,
    ) -> None:
        responses = replace(chat_endpoint, answer=ResponsesEndpoint(chat_endpoint.answer).answer)
        self._endpoints = dict.fromkeys(CHAT, chat_endpoint) | dict.fromkeys(RESPONSES, responses)
        self._is_ready = is_ready
        self._gateway = gateway
        # Set after its socket is bound. On this port `/metrics` needs no key.
        self.metrics_port: int | None = None
        self._rest = _rest(gateway, self, tier_problems, metrics, more, lifespan)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as refusal:
                await send_error(refusal, send)
                return
        chat_endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            chat_endpoint = self._endpoints.get(scope["path"])
        await (chat_endpoint or self._rest)(scope, receive, send)

    def is_ready(self) -> bool:
        return self._is_ready()

    def is_for_metrics(self, scope: Scope) -> bool:
        """Return whether the connection came to the metrics port. The port is that of the socket,
        which no header can change."""
        port = (scope.get("server") or ("", None))[1]
        return self.metrics_port is not None and port == self.metrics_port

    def _check(self, scope: Scope) -> None:
        # Probes and Prometheus send the address or service name of the machine.
        exempt = scope["path"] == "/healthz" or self.is_for_metrics(scope)
        if self._gateway.authenticate is None and not exempt:
            named = dict(scope["headers"]).get(b"host")
            host = None if named is None else named.decode("latin-1")
            check_host(host, self._gateway.allowed_hosts)
        if self.is_for_metrics(scope) and scope["path"] not in PROBE_PATHS:
            raise ApiError(
                "this port serves only /metrics, /healthz and /readyz",
                status=404,
                code="not_found",
                hint="send the request to gateway.port",
            )


def _rest(
    gateway: Gateway,
    app: App,
    tier_problems: Callable[[], Mapping[str, Sequence[str]]],
    metrics: Callable[[], tuple[bytes, str]] | None,
    more: Sequence[BaseRoute],
    lifespan: Callable[[], AbstractAsyncContextManager[None]] | None,
) -> ASGIApp:
    async def healthz(request: Request) -> Response:
        return _json({"status": "ok"})

    async def readyz(request: Request) -> Response:
        ready = app.is_ready()
        status = "ready" if ready else "not ready"
        return _json({"status": status, **tier_problems()}, 200 if ready else 503)

    async def models(request: Request) -> Response:
        account = gateway.check_key(request.headers)
        rows = [_model(name) for name in gateway.models_of(account)]
        return _json({"object": "list", "data": rows})

    async def model(request: Request) -> Response:
        names = gateway.models_of(gateway.check_key(request.headers))
        name = request.path_params["name"]
        if name not in names:
            raise ApiError(
                f"the model {name[:200]!r} does not exist",
                status=404,
                code="model_not_found",
                param="model",
                hint=f"use one of {', '.join(names)}",
            )
        return _json(_model(name))

    async def stored_response(request: Request) -> Response:
        gateway.check_key(request.headers)
        raise ApiError(
            "responses are not stored",
            status=404,
            code="not_found",
            hint="POST /v1/responses with the whole conversation as input",
        )

    async def exposition(request: Request) -> Response:
        assert metrics is not None
        if not app.is_for_metrics(request.scope):
            _check_metrics_access(gateway, request)
        payload, kind = metrics()
        return Response(payload, media_type=kind)

    @asynccontextmanager
    async def run_lifespan(app: Starlette) -> AsyncGenerator[None]:
        if lifespan is None:
            yield
            return
        async with lifespan():
            yield

    routes: list[BaseRoute] = [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/responses/{name:path}", stored_response, methods=["GET", "POST", "DELETE"]),
        *([Route("/metrics", exposition)] if metrics is not None else []),
        *more,
    ]
    handlers = {HTTPException: _send_not_found, ApiError: _send_error, Exception: _send_error}
    return Starlette(routes=routes, lifespan=run_lifespan, exception_handlers=handlers)


def _check_metrics_access(gateway: Gateway, request: Request) -> None:
    """Raise `ApiError` unless the key is an admin's. Metrics name tenants and their spending, and
    a peer on loopback may be a proxy that serves the public, even without proxy headers."""
    if gateway.authenticate is None:
        return
    if not gateway.check_key(request.headers).admin:
        raise ApiError(
            "this key may not read the metrics",
            status=403,
            type="permission_error",
            code="not_an_admin",
            hint="send an admin's key (bottega keys add NAME --admin), or set gateway.metrics_port",
        )


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": CREATED, "owned_by": "bottega"}


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def _send_error(request: Request, error: Exception) -> Response:
    api_error = to_api_error(error)
    headers = {"x-request-id": request_id(), **api_error.headers}
    return Response(
        api_error.body, api_error.status, headers=headers, media_type="application/json"
    )


async def _send_not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    not_found = ApiError(
        f"{request.method} {request.url.path[:200]} is not served",
        status=error.status_code,
        code="not_found",
        hint="use POST /v1/chat/completions or /v1/responses, GET /v1/models, /healthz, /readyz or"
        " /metrics",
    )
    return await _send_error(request, not_found)
