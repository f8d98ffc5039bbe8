"""Connections to an endpoint."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from bottega.generation import OpenAIGenerator
from bottega.openai_api import transport
from bottega.prompting import InterleavedPrompter
from bottega.types import Query, Sampling
from tests.server import Server, ok


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
