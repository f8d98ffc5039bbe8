"""Image servers, and one server at a forbidden address."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from PIL import Image as Pillow

from bottega.gateway.request.image_fetcher import ImageFetcher
from bottega.image import Image
from bottega.openai_api.errors import ApiError

PIXEL = Image.from_pillow(Pillow.new("RGB", (8, 6), "red"))
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
OUTSIDE, INSIDE = "127.0.0.1", "127.0.0.2"  # both loopback; an injected policy separates them


@dataclass
class World:
    """Server that stands in for the public internet, and a forbidden server on the same port
    of every other loopback address."""

    port: int
    answer: Answer
    names: dict[str, list[list[str]]]
    requests: list[web.Request] = field(default_factory=list)
    intrusions: int = 0
    resolved: list[str] = field(default_factory=list)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return the next answer of the table; numbers resolve as in the C library."""
        self.resolved.append(host)
        if answers := self.names.get(host):
            return answers.pop(0) if len(answers) > 1 else answers[0]
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
        return [str(address[0]) for *_, address in found]

    def fetcher(self, **settings: Any) -> ImageFetcher:
        defaults: dict[str, Any] = {
            "ports": [self.port],
            "allowed": lambda address: address == OUTSIDE,
            "resolve": self.resolve,
        }
        return ImageFetcher(**defaults | settings)

    def url(self, host: str = "images.example", path: str = "/cat.png") -> str:
        return f"http://{host}:{self.port}{path}"

    async def rejected(self, url: str, **settings: Any) -> ApiError:
        with pytest.raises(ApiError) as caught:
            await self.fetcher(**settings).fetch(url, "messages[0].content[1].image_url.url")
        error = caught.value
        assert (error.status, error.code) == (400, "invalid_image_url")
        assert error.param == "messages[0].content[1].image_url.url" and error.hint
        assert self.intrusions == 0
        return error


def image_answer(body: bytes = PIXEL.data, kind: str = "image/png", **headers: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(body=body, headers={"Content-Type": kind} | named)

    return answer


def redirects(*locations: str, status: int = 302) -> Answer:
    left = list(locations)

    async def answer(request: web.Request) -> web.StreamResponse:
        if not left:
            return await image_answer()(request)
        return web.Response(status=status, headers={"Location": left.pop(0)})

    return answer


@asynccontextmanager
async def running_world() -> AsyncGenerator[World]:
    async def handle(request: web.Request) -> web.StreamResponse:
        here.requests.append(request)
        return await here.answer(request)

    async def record_intrusion(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        here.intrusions += 1
        writer.close()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, OUTSIDE, 0).start()
    port = runner.addresses[0][1]
    inside = [INSIDE, "::1"] if socket.has_ipv6 and _has_loopback_v6() else [INSIDE]
    servers = [await asyncio.start_server(record_intrusion, host, port) for host in inside]
    names = {"images.example": [[OUTSIDE]], "inner.example": [[INSIDE]]}
    here = World(port, image_answer(), names)
    yield here
    for server in servers:
        server.close()
    await runner.cleanup()


def _has_loopback_v6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
