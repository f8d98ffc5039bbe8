"""Client that calls an ASGI app without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import orjson
from starlette.types import ASGIApp


@dataclass(frozen=True)
class Received:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


async def call(
    app: ASGIApp,
    method: str,
    path: str,
    *,
    token: str | None = None,
    body: bytes | Iterable[bytes] = b"",
    **params: object,
) -> Received:
    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    chunks = [body] if isinstance(body, bytes) else list(body)
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": urlencode(params).encode(),
        "headers": headers,
        "server": ("localhost", 80),
        "scheme": "http",
        "root_path": "",
    }
    sent = [
        {"type": "http.request", "body": chunk, "more_body": n < len(chunks)}
        for n, chunk in enumerate(chunks, 1)
    ]
    sent_messages: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        if not sent:  # the client waits for the answer
            await asyncio.Event().wait()
        return sent.pop(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        sent_messages.append(message)

    await app(scope, receive, send)
    names = {name.decode(): value.decode() for name, value in sent_messages[0]["headers"]}
    return Received(
        sent_messages[0]["status"],
        names,
        b"".join(part.get("body", b"") for part in sent_messages[1:]),
    )
