"""Upstream that counts its own tokens, and clients that spend a budget or leave early."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger_schema import FILE
from bottega.gateway.config.config_file import parse_config
from bottega.gateway.running.build import build
from bottega.gateway.running.server import GatewayServer
from tests.gateway.gateways import ENVIRONMENT, run_gateway
from tests.server import Server

PRICE = 10e-6  # US dollars per token, in and out
CONFIG = """
[gateway]
data = "{data}"
finish_seconds = {finish}
[tiers.large]
model = "openai:huge"
base_url = "{url}"
api_key_env = "LARGE_KEY"
price = [10.0, 10.0]
concurrency = {concurrency}
[cache]
embed = "words"
[replay]
seconds = 0
"""
WORDS = ("light", "stone", "river", "north", "amber", "quiet", "table", "seven")


@dataclass
class Meter:
    """Tokens as the upstream counts them: `hidden_tokens` of a template, one for every four
    ASCII characters of the prompt and one for each other character, and `reply_tokens` sampled for
    each reply, `token_seconds` apart. A client that disconnects ends the generation and pays for
    the prompt and the tokens generated so far."""

    token_seconds: float = 0.002
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    reply_tokens: tuple[int, int] = (30, 170)
    hidden_tokens: int = 25
    calls: int = 0
    running: int = 0
    tokens: int = 0
    max_tokens: int = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":  # the readiness check asks for the models
            return web.json_response({"data": []})
        body = orjson.loads(await request.read())
        text = "".join(turn["content"] for turn in body["messages"])
        ascii_characters = sum(map(str.isascii, text))
        prompt = self.hidden_tokens + ascii_characters // 4 + len(text) - ascii_characters
        wanted = min(self.rng.randint(*self.reply_tokens), body.get("max_tokens") or 10_000)
        pieces: list[str] = []
        self.calls += 1
        self.running += 1
        try:
            if body.get("stream"):
                return await self._stream(request, prompt, wanted, pieces)
            for number in range(wanted):
                pieces.append(f" {WORDS[number % len(WORDS)]}")
                await asyncio.sleep(self.token_seconds)
            return web.json_response(_completion("".join(pieces), _usage(prompt, wanted)))
        finally:
            self.running -= 1
            self.tokens += prompt + len(pieces)
            self.max_tokens = max(self.max_tokens, prompt + len(pieces))

    async def _stream(
        self, request: web.Request, prompt: int, wanted: int, pieces: list[str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(wanted):
            await asyncio.sleep(self.token_seconds)
            pieces.append(f" {WORDS[number % len(WORDS)]}")
            await response.write(_event({"content": pieces[-1]}))
        await response.write(_event({}, "stop"))
        last = {"id": "x", "choices": [], "usage": _usage(prompt, wanted)}
        await response.write(b"data: " + orjson.dumps(last) + b"\n\ndata: [DONE]\n\n")
        return response


def _usage(prompt: int, completion: int) -> dict[str, int]:
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


def _completion(text: str, usage: dict[str, int]) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage}


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + orjson.dumps({"id": "x", "choices": [choice]}) + b"\n\n"


@dataclass
class MeteredGateway:
    """Gateway with a key of this monthly budget in front of a metered upstream."""

    gateway_server: GatewayServer
    url: str
    key: str
    meter: Meter

    @property
    def spent(self) -> float:
        (account,) = self.gateway_server.accounts.list()
        return self.gateway_server.ledger.spent_this_month(account.id)

    def entries(self) -> list[tuple[Any, ...]]:
        """Status, tokens and cost of every request."""
        self.gateway_server.ledger.flush()
        return self.gateway_server.ledger.read(
            "SELECT status, prompt_tokens, completion_tokens, cost_usd FROM gateway_entries"
        )

    def post(self, session: aiohttp.ClientSession, number: int, **more: Any) -> Any:
        text = f"{number}: " + "What does the sign in the photograph say? " * (10 + number % 20)
        body = {"model": "bottega", "messages": [{"role": "user", "content": text}], **more}
        headers = {"Authorization": f"Bearer {self.key}"}
        return session.post(f"{self.url}/chat/completions", json=body, headers=headers)

    async def ask(self, requests: int, **more: Any) -> None:
        """Send this many requests one after the other."""
        async with aiohttp.ClientSession() as session:
            for number in range(requests):
                await self.read(session, 5 * number, **more)

    async def spend(self, at_once: int, **more: Any) -> None:
        """Let this many concurrent clients send requests until the budget is spent."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(
                *(self._spend(session, n, at_once, **more) for n in range(at_once))
            )

    async def _spend(
        self, session: aiohttp.ClientSession, number: int, step: int, **more: Any
    ) -> None:
        while True:
            async with self.post(session, number, **more) as response:
                pieces = await response.json()
            if response.status == 429 and pieces["error"]["code"] == "insufficient_quota":
                return
            assert response.status in (200, 429), pieces
            number += step
            if response.status == 429:
                await asyncio.sleep(0.02)

    async def leave(self, clients: int, seconds: float, **more: Any) -> None:
        """Let this many concurrent clients leave after the upstream has worked for `seconds`."""
        before = self.meter.calls
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            tasks = [asyncio.create_task(self.read(session, n, **more)) for n in range(clients)]
            async with asyncio.timeout(30):
                while self.meter.calls < before + clients:  # noqa: ASYNC110 - another thread
                    await asyncio.sleep(0.005)
            await asyncio.sleep(seconds)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def read(self, session: aiohttp.ClientSession, number: int, **more: Any) -> None:
        async with self.post(session, number, **more) as response:
            await response.read()

    async def settled(self, requests: int) -> None:
        """Wait until this many requests are in the ledger and the upstream is idle."""
        async with asyncio.timeout(60):
            while len(self.entries()) < requests or self.meter.running:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@contextmanager
def metered(
    folder: Path,
    endpoint: Server,
    budget: float,
    *,
    meter: Meter,
    finish: float = 60.0,
    concurrency: int = 256,
) -> Iterator[MeteredGateway]:
    accounts = Accounts(folder / FILE)
    _, key = accounts.add("team", usd_per_month=budget)
    accounts.close()
    endpoint.answers = [meter]
    text = CONFIG.format(data=folder, url=endpoint.url, finish=finish, concurrency=concurrency)
    gateway_server = build(parse_config(text), ENVIRONMENT)
    with run_gateway(gateway_server) as url:
        yield MeteredGateway(gateway_server, url, key, meter)


__all__ = ["PRICE", "Meter", "MeteredGateway", "metered"]
