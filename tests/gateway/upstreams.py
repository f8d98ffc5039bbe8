"""Upstreams on loopback, called with and without streaming."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import orjson
from aiohttp import web

from bottega.gateway.request.upstreams import HttpUpstream
from bottega.generation import RetryPolicy
from tests.server import Answer, Server

BODY = {"model": "bottega", "messages": [{"role": "user", "content": "hi"}], "x": {"y": [1]}}
QUICK = RetryPolicy(3, first_wait=0.001)


def upstream(server: Server, **settings: Any) -> HttpUpstream:
    given: dict[str, Any] = {"base_url": server.url, "retries": QUICK} | settings
    return HttpUpstream("m", **given)


def chunk(text: str | None = None, finish: str | None = None, index: int = 0) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {"id": "x", "choices": [{"index": index, "delta": delta, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
CHUNKS = [chunk("a"), chunk("b"), chunk(finish="stop"), USAGE]


def lines(*chunks: object, done: bool = True) -> bytes:
    events = b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks)
    return events + (b"data: [DONE]\n\n" if done else b"")


def events(*pieces: bytes | float, kind: str = "text/event-stream", end: str = "") -> Answer:
    """Write the chunks, sleep for each number of seconds, then end or abort."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        for piece in pieces:
            if isinstance(piece, bytes):
                await response.write(piece)
            await asyncio.sleep(piece if isinstance(piece, float) else 0)
        if end == "abort":
            assert request.transport is not None
            await asyncio.sleep(0.01)
            request.transport.abort()
        return response

    return answer


async def streamed(upstream: HttpUpstream, body: dict[str, Any] = BODY) -> list[Any]:
    try:
        return [orjson.loads(payload) async for payload in upstream.stream(body)]
    finally:
        await upstream.aclose()


async def completed(upstream: HttpUpstream, body: dict[str, Any] = BODY) -> Any:
    try:
        return await upstream.complete(body)
    finally:
        await upstream.aclose()


def signal_on_disconnect(answer: Answer, gone: threading.Event) -> Answer:
    async def until_gone(request: web.Request) -> web.StreamResponse:
        try:
            return await answer(request)
        except asyncio.CancelledError:
            gone.set()
            raise

    return until_gone


async def seen(gone: threading.Event) -> bool:
    return await asyncio.to_thread(gone.wait, 2)
