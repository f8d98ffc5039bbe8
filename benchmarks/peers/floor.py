"""Minimal Starlette server: it parses the body and returns a fixed reply, without an upstream."""

from __future__ import annotations

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from benchmarks.peers.mock_upstream import REPLY


async def chat(request: Request) -> Response:
    orjson.loads(await request.body())
    return Response(REPLY, media_type="application/json", headers={"x-cache": "hit"})


app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
