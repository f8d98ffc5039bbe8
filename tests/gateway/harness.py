"""Gateway on loopback, in its own thread, with scripted tiers."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import openai
import uvicorn

from bottega._util.caching import LeaderFlight
from bottega.gateway.accounting.access import LocalLimiter
from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.asgi import App
from bottega.gateway.ports import RequestRecord, ServedTier, Tenant, TierCapabilities, Upstream
from bottega.gateway.request.chat import Gateway, ResponseCache
from bottega.gateway.request.completion import Completer, Fallback
from bottega.gateway.request.exchange import ChatEndpoint
from bottega.gateway.request.finalization import Finalizer
from bottega.gateway.request.reading import Fetch, Limits
from bottega.gateway.request.response_store import ResponseStore
from bottega.gateway.request.shadow_calls import ShadowRunner
from bottega.gateway.request.upstreams import LocalUpstream
from bottega.gateway.running.process import CUT_SECONDS, uvicorn_config
from bottega.gateway.state.response_cache import BodyCache, ReplyCache
from bottega.generation import ScriptedGenerator
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.pipeline import Pipeline
from bottega.protocols import Generator, Retriever, Tier
from bottega.recipes import cache_of_thought
from bottega.recording import CacheRecorder
from bottega.routing import AgreementPair
from bottega.types import Example, Prompt
from tests.builders import solid_image

QUESTION = "Which digit is this?"


def last_turn(prompt: Prompt) -> str:
    """Return the text of the last turn and the number of demonstrations before it."""
    last = " ".join(part for part in prompt.messages[-1].parts if isinstance(part, str))
    shown = sum(message.role == "assistant" for message in prompt.messages)
    return f"{last} ({shown} shown)"


@dataclass
class Harness:
    """Running gateway and its state. `records` are the finished requests, in order."""

    url: str
    gateway: Gateway
    caches: dict[str, KnowledgeBase]
    records: list[RequestRecord] = field(default_factory=list)
    pairs: list[tuple[float | None, AgreementPair]] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)

    def examples(self, namespace: str = "") -> list[Example]:
        return list(self.caches[namespace]) if namespace in self.caches else []

    def wait(self, requests: int) -> RequestRecord:
        """Wait for this number of finished requests and return the last."""
        end = time.monotonic() + 60
        while len(self.records) < requests:
            assert time.monotonic() < end, f"only {len(self.records)} requests ended"
            time.sleep(0.005)
        return self.records[requests - 1]

    def until_measured(self, pairs: int) -> None:
        """Wait for this number of compared answers."""
        end = time.monotonic() + 60
        while len(self.pairs) < pairs:
            assert time.monotonic() < end, f"only {len(self.pairs)} answers were compared"
            time.sleep(0.005)


@dataclass
class TenantPool:
    """One tenant per namespace, all in one file in memory or on disk."""

    tiers: Sequence[Tier]
    path: str
    make: Callable[[KnowledgeBase], Pipeline]
    customize: Callable[[Tenant], Tenant]
    asks: Mapping[str, object]
    caches: dict[str, KnowledgeBase] = field(default_factory=dict)

    async def open(self, namespace: str, /) -> Tenant:
        if namespace not in self.caches:
            self.caches[namespace] = KnowledgeBase.open(
                self.path, embed=PixelEmbedder(), namespace=namespace
            )
        cache = self.caches[namespace]
        stored_tiers = frozenset({self.tiers[-1].name})
        writer = CacheRecorder(cache, stored_tiers=stored_tiers)
        asks = {self.tiers[0].name: self.asks}
        return self.customize(
            Tenant(self.make(cache), writer, stored_tiers, confidence_fields=asks)
        )


class NoSpending:
    """Ledger stub of keys that have spent nothing."""

    def spent_this_month(self, account: str, /) -> float:
        return 0.0


def always_first(tiers: Sequence[Tier]) -> Callable[..., Any]:
    async def route(query: object, /) -> Tier:
        return tiers[0]

    return route


@contextmanager
def harness(
    folder: Any,
    *,
    master: Generator | Upstream | None = None,
    apprentice: Generator | Upstream | None = None,
    middle: Mapping[str, Generator] | None = None,
    capabilities: Mapping[str, TierCapabilities] | None = None,
    replays: bool = True,
    identity: Any = "bytes",
    authenticate: Callable[[str | None], Account | None] | None = None,
    fetch: Fetch | None = None,
    limits: Limits | None = None,
    route: Callable[[Sequence[Tier]], Any] = always_first,
    change: Callable[[Pipeline], Pipeline] = lambda pipeline: pipeline,
    asks: Mapping[str, object] | None = None,
    shots: int = 2,
    retrieve: Retriever | None = None,
    customize: Callable[[Tenant], Tenant] = lambda tenant: tenant,
    fallback: Fallback = "any",
    responses: ResponseStore | None = None,
    keep_alive: float = 15.0,
) -> Iterator[Harness]:
    double = ScriptedGenerator(last_turn)
    parts = {
        "apprentice": apprentice or double,
        **(middle or {}),
        "master": master or ScriptedGenerator(last_turn, name="big"),
    }
    tiers = [
        Tier(name, part if isinstance(part, ScriptedGenerator) else double, shots if i == 0 else 0)
        for i, (name, part) in enumerate(parts.items())
    ]
    served = [
        ServedTier(
            tier,
            LocalUpstream(part) if hasattr(part, "generate") else part,  # type: ignore[arg-type]
            (capabilities or {}).get(tier.name, TierCapabilities()),
        )
        for tier, part in zip(tiers, parts.values(), strict=True)
    ]

    def make(cache: KnowledgeBase) -> Pipeline:
        return change(
            cache_of_thought(
                cache, tiers=tiers, route=route(tiers), remember=False, retrieve=retrieve
            )
        )

    tenants = TenantPool(tiers, str(folder / "cache.db"), make, customize, asks or {})
    response_cache = ResponseCache(
        ReplyCache(1 << 20, 60.0), BodyCache(1 << 20), LeaderFlight(), identity
    )
    gateway = Gateway(
        Completer(served, lambda image: image.data_url, fallback=fallback),
        tenants,
        Finalizer(lambda model, usage: usage.prompt_tokens * 1e-6),
        {"bottega": "", **{f"bottega/{tier.name}": tier.name for tier in tiers}, "gpt-4o": ""},
        limiter=LocalLimiter(NoSpending()),
        limits=limits or Limits(),
        authenticate=authenticate,
        response_cache=replace(response_cache, enabled=replays),
        fetch=fetch,
        background=re.compile(r"\A### Task:"),
        response_store=responses,
    )
    server = Harness("", gateway, tenants.caches)

    def measured(
        record: RequestRecord, similarity: float | None, pair: AgreementPair, sampled: bool
    ) -> None:
        server.pairs.append((similarity, pair))
        server.sampled.append(sampled)

    gateway.shadow = ShadowRunner(
        gateway.completer,
        gateway.finalizer,
        server.records.append,
        measured,
        response_cache.replies,
    )
    chat = ChatEndpoint(
        gateway.answer, server.records.append, gateway.limits, keep_alive_seconds=keep_alive
    )
    app = App(gateway, chat)
    with running(app) as server.url:
        yield server
    for cache in tenants.caches.values():
        cache.close()


def client(url: str, **more: Any) -> openai.OpenAI:
    # Loading CA certificates takes longer than most loopback requests, which do not need them.
    more.setdefault("http_client", openai.DefaultHttpxClient(verify=False))
    return openai.OpenAI(base_url=url, api_key="sk-test", max_retries=0, timeout=20, **more)


def user_messages(*shades: int, text: str = QUESTION) -> list[Any]:
    images = [
        {"type": "image_url", "image_url": {"url": solid_image(shade).data_url}} for shade in shades
    ]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def raw(harness: Harness, messages: list[Any], model: str = "bottega", **more: Any) -> Any:
    with client(harness.url) as real:
        reply = real.chat.completions.with_raw_response.create(
            model=model, messages=messages, **more
        )
        reply.http_response.read()  # a stream too: the client closes the connection
        return reply


class FastShutdownServer(uvicorn.Server):
    """Server that polls for shutdown more often than uvicorn's ten times a second, because
    hundreds of tests wait for it."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # noqa: ASYNC110 - uvicorn sets a flag
            await asyncio.sleep(0.005)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        for server in self.servers:
            server.close()
        for connection in list(state.connections):
            connection.shutdown()
        end = time.monotonic() + CUT_SECONDS
        while (state.connections or state.tasks) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        for task in state.tasks:
            task.cancel("shutting down")
        await self.lifespan.shutdown()


@contextmanager
def running(app: Any, port: int = 0) -> Iterator[str]:
    config = uvicorn_config(app)
    config.port = port
    server = FastShutdownServer(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    end = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive() and time.monotonic() < end
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join(20)


__all__ = [
    "QUESTION",
    "Harness",
    "client",
    "harness",
    "last_turn",
    "raw",
    "replace",
    "running",
    "user_messages",
]
