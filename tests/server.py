"""Chat-completions endpoint on loopback that fails on demand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Endpoint that answers request i with `answers[i]`, and later requests with the last answer.

    It runs in its own thread, because a test may use several event loops.
    """

    def __init__(self) -> None:
        self.answers: list[Answer] = [ok("fine")]
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.most_at_once = 0
        self._active = 0
        self.url = ""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self._active += 1
        self.most_at_once = max(self.most_at_once, self._active)
        try:
            self.paths.append(request.path_qs)
            self.headers.append(dict(request.headers))
            payload = await request.read()
            self.bodies.append(orjson.loads(payload) if payload else {})
            number = min(len(self.bodies), len(self.answers)) - 1
            return await self.answers[number](request)
        finally:
            self._active -= 1

    async def _serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()
        await stop.wait()
        await runner.cleanup()


@contextmanager
def running() -> Iterator[Server]:
    server, ready, loop = Server(), threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=[server._serve(ready, stop)])
    thread.start()
    ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def ok(*texts: str | None, **more: Any) -> Answer:
    choices = [
        {"index": i, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        for i, text in enumerate(texts)
    ]
    usage = {"prompt_tokens": 10, "completion_tokens": 2 * len(texts), "total_tokens": 12}
    return reply(
        {"id": "x", "object": "chat.completion", "choices": choices, "usage": usage} | more
    )


def reply(body: object, status: int = 200, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return raw(orjson.dumps(body), status, "application/json", named)


def refuse(status: int, message: str = "no", code: str | None = None, **headers: str) -> Answer:
    return reply({"error": {"message": message, "type": "error", "code": code}}, status, **headers)


def raw(
    payload: bytes,
    status: int = 200,
    kind: str = "text/html",
    headers: dict[str, str] | None = None,
) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=payload, status=status, content_type=kind, headers=headers)

    return answer


def stall(seconds: float = 30.0) -> Answer:
    """Return an answer that stops halfway and keeps the connection open."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"choices": [')
        await asyncio.sleep(seconds)
        return response

    return answer


def cut() -> Answer:
    """Return an answer that stops halfway and closes the connection."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"choices": [')
        assert request.transport is not None
        request.transport.abort()
        return response

    return answer


def slowly(answer: Answer, seconds: float) -> Answer:
    async def later(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await answer(request)

    return later
