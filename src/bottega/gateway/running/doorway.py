"""Before everything else: how many may come in at once, and nobody any more when it closes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from bottega.gateway.door import Scope, Send
from bottega.gateway.refusals import CLOSING, Refusal, refuse
from bottega.gateway.watching import WATCHED, Receive

FULL = Refusal(
    "the gateway answers as many requests as it can",
    status=503,
    type="server_error",
    code="overloaded",
    headers={"retry-after": "1"},
    hint="try again in a moment",
)

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Doorway:
    """Counts requests and refuses those that are too many, in the OpenAI API's shape; who watches
    the gateway always comes in, and is told by `/readyz` when it is `closing`."""

    def __init__(self, app: App, most: int) -> None:
        self._app = app
        self.most = most
        self.under_way = 0
        self.closing = False
        self._empty = asyncio.Event()

    async def close(self, within: float) -> None:
        """Lets nobody in any more, and waits so many seconds for those that are in."""
        self.closing = True
        if self.under_way:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), within)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] in WATCHED:
            if self.closing and scope["path"] == "/readyz":
                await refuse(CLOSING, send)
            else:
                await self._app(scope, receive, send)
        elif self.closing:
            await refuse(CLOSING, send)
        elif self.under_way >= self.most:
            await refuse(FULL, send)
        else:
            self.under_way += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self.under_way -= 1
                if self.closing and not self.under_way:
                    self._empty.set()
