"""Connections to an endpoint."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from bottega.generation import OpenAIGenerator
from bottega.openai_api import transport
from bottega.prompting import InterleavedPrompter
from bottega.types import Query, Sampling
from tests.server import Server, ok, refuse


async def test_idle_connections_are_not_used_again(
    endpoint: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may close them at the moment of the next request."""
    peers = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        peers.append(request.transport.get_extra_info("peername"))
        return await ok("fine")(request)

    endpoint.answers = [answer]
    prompt = InterleavedPrompter()(Query("Which colour?"), [])
    for seconds, connections in ((60.0, 1), (0.05, 2)):
        monkeypatch.setattr(transport, "KEEP_ALIVE_SECONDS", seconds)
        peers.clear()
        model = OpenAIGenerator("model", base_url=endpoint.url)
        for _ in range(2):
            await model.generate(prompt, Sampling())
            await asyncio.sleep(0.1)
        assert len(set(peers)) == connections


async def test_large_bodies_arrive_whole_and_again(endpoint: Server) -> None:
    endpoint.answers = [refuse(503, retry_after="0"), ok("fine")]
    text = "".join(f"{number}, " for number in range(300_000))
    prompt = InterleavedPrompter()(Query(text), [])
    reply = await OpenAIGenerator("model", base_url=endpoint.url).generate(prompt, Sampling())
    first, second = endpoint.bodies
    assert reply.completions[0].text == "fine" and first == second
    assert text in str(first["messages"])
    for headers in endpoint.headers:
        assert int(headers["Content-Length"]) > len(text) > transport.MAX_WRITE
