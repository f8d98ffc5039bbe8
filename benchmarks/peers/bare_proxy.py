"""Minimal gateway in Starlette and aiohttp: it parses the body, replaces the model and parses the
reply. The environment variable UPSTREAM holds the upstream's URL."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

import aiohttp
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

HEADERS = {"content-type": "application/json", "authorization": "Bearer none"}


@contextlib.asynccontextmanager
async def living(app: Starlette) -> AsyncIterator[None]:
    app.state.url = os.environ["UPSTREAM"] + "/chat/completions"
    connector = aiohttp.TCPConnector(limit=500)
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(60), connector=connector
    ) as app.state.session:
        yield


async def chat(request: Request) -> Response:
    body = orjson.loads(await request.body())
    body["model"] = "mock"
    state = request.app.state
    async with state.session.post(state.url, data=orjson.dumps(body), headers=HEADERS) as reply:
        document, status = orjson.loads(await reply.read()), reply.status
    headers = {"x-cache": "miss", "x-model": document["model"]}
    return Response(
        orjson.dumps(document), status_code=status, media_type="application/json", headers=headers
    )


app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])], lifespan=living)
