"""One client's connection: what uvicorn leaves open to those who send or read in bad faith."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bottega.gateway.door import Scope, Send
from bottega.gateway.limits import Limits
from bottega.gateway.refusals import Refusal, refuse
from bottega.gateway.watching import Receive

LIMITS = Limits()
# The parser joins the pieces of a header anew with each one that comes: what is endless would
# stop everybody's requests long before the memory is full.
CUT = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class Connection(HttpToolsProtocol):
    """Headers have a size and a time to come in, bodies a time; who stops reading an answer is
    taken for gone. What comes as a header behind a body counts for nothing."""

    head_seconds = 30.0
    message_seconds = 120.0
    reading_seconds = 60.0
    look_every = 5.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._unread = 0  # bytes since the last of a body, or since the message began
        self._headed = False
        self._began: float | None = self.loop.time()
        self._stuck: float | None = None
        self._looking = self.loop.call_later(self.look_every, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._looking.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if self._unread > LIMITS.header_bytes and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(CUT)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._began, self._headed = self.loop.time(), False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headed:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headed = True
        try:
            LIMITS.check_headers(self.headers)
        except Refusal as refusal:
            refusal.headers["connection"] = "close"
            self.app = cast(Any, partial(_refusing, refusal))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread, self._began = 0, None
        super().on_message_complete()

    def pause_writing(self) -> None:
        self._stuck = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stuck = None
        super().resume_writing()

    def _look(self) -> None:
        now = self.loop.time()
        patience = self.message_seconds if self._headed else self.head_seconds
        slow = self._began is not None and now - self._began > patience
        if (slow and not self.flow.read_paused) or (
            self._stuck is not None and now - self._stuck > self.reading_seconds
        ):
            self.transport.abort()
        else:
            self._looking = self.loop.call_later(self.look_every, self._look)


async def _refusing(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    await refuse(refusal, send)
