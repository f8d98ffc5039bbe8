"""Connection time-outs, header limits and the limit of concurrent requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bottega.gateway.asgi import PROBE_PATHS
from bottega.gateway.errors import CLOSING, send_error
from bottega.gateway.ports import Receive, Scope, Send
from bottega.gateway.requests import Limits
from bottega.openai_api.errors import ApiError

LIMITS = Limits()
# The parser concatenates a header again with every chunk. An endless header would block the event
# loop long before it fills the memory.
HEADERS_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class Connection(HttpToolsProtocol):
    """HTTP connection with limits that uvicorn lacks: the size of headers, and the time to receive
    headers and bodies and to send a reply. Trailers after a body are ignored."""

    header_seconds = 30.0
    message_seconds = 120.0
    write_seconds = 60.0
    check_seconds = 5.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._unparsed_bytes = 0  # since the last body chunk or the start of the message
        self._headers_done = False
        self._message_start: float | None = self.loop.time()
        self._write_blocked_since: float | None = None
        self._timer = self.loop.call_later(self.check_seconds, self._check_timeouts)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > LIMITS.header_bytes and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(HEADERS_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._message_start, self._headers_done = self.loop.time(), False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headers_done:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headers_done = True
        try:
            LIMITS.check_headers(self.headers)
        except ApiError as error:
            error.headers["connection"] = "close"
            self.app = cast(Any, partial(_error_app, error))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes, self._message_start = 0, None
        super().on_message_complete()

    def pause_writing(self) -> None:
        self._write_blocked_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_blocked_since = None
        super().resume_writing()

    def _check_timeouts(self) -> None:
        now = self.loop.time()
        patience = self.message_seconds if self._headers_done else self.header_seconds
        slow = self._message_start is not None and now - self._message_start > patience
        if (slow and not self.flow.read_paused) or (
            self._write_blocked_since is not None
            and now - self._write_blocked_since > self.write_seconds
        ):
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(self.check_seconds, self._check_timeouts)


async def _error_app(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    await send_error(error, send)


FULL = ApiError(
    "the gateway has reached its limit of concurrent requests",
    status=503,
    type="server_error",
    code="overloaded",
    headers={"retry-after": "1"},
    hint="try again in a moment",
)

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Admission:
    """ASGI wrapper that rejects requests above a maximum, with an error of the OpenAI API. Probes
    are always admitted; `/readyz` fails while it is `closing`."""

    def __init__(self, app: App, most: int) -> None:
        self._app = app
        self.most = most
        self.under_way = 0
        self.closing = False
        self._empty = asyncio.Event()

    async def close(self, within: float) -> None:
        """Reject further requests and wait for those in progress, at most `within` seconds."""
        self.closing = True
        if self.under_way:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), within)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] in PROBE_PATHS:
            if self.closing and scope["path"] == "/readyz":
                await send_error(CLOSING, send)
            else:
                await self._app(scope, receive, send)
        elif self.closing:
            await send_error(CLOSING, send)
        elif self.under_way >= self.most:
            await send_error(FULL, send)
        else:
            self.under_way += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self.under_way -= 1
                if self.closing and not self.under_way:
                    self._empty.set()
