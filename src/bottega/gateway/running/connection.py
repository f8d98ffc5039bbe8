"""Connections of clients: limits of headers and times that uvicorn lacks."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bottega.gateway.errors import error_response
from bottega.gateway.request.exchange import BODY_BYTES_PER_SECOND
from bottega.gateway.request.reading import Limits
from bottega.openai_api.errors import ApiError

LIMITS = Limits()
# The parser concatenates a header again with every chunk. An endless header would block the event
# loop long before it fills the memory.
HEADERS_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class ClientConnection(HttpToolsProtocol):
    """HTTP connection with limits that uvicorn lacks: the size of headers, and the time to receive
    headers and bodies and to send a reply. Trailers after a body are ignored."""

    header_seconds = 30.0
    message_seconds = 180.0  # and more for long bodies; `BodyBudget` ends those that are read
    write_seconds = 60.0
    check_seconds = 5.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._unparsed_bytes = 0  # since the last body chunk or the start of the message
        self._headers_done, self._body_bytes = False, 0
        self._message_start: float | None = self.loop.time()
        self._write_blocked_since: float | None = None
        self._timer = self.loop.call_later(self.check_seconds, self._check_timeouts)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed_bytes += len(data)
        super().data_received(data)  # resets the count for each complete part
        if self._unparsed_bytes > LIMITS.header_bytes and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(HEADERS_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._message_start, self._headers_done = self.loop.time(), False
        self._body_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headers_done:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headers_done = True
        try:
            LIMITS.check_headers(self.headers)
        except ApiError as error:
            error.headers["connection"] = "close"
            self.app = cast(Any, error_response(error))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        self._body_bytes += len(body)
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
        patience = self.message_seconds if self._body_bytes else self.header_seconds
        patience += self._body_bytes / BODY_BYTES_PER_SECOND
        slow = self._message_start is not None and now - self._message_start > patience
        # While reading is paused the application is slow, not the client.
        if (slow and not self.flow.read_paused) or (
            self._write_blocked_since is not None
            and now - self._write_blocked_since > self.write_seconds
        ):
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(self.check_seconds, self._check_timeouts)
