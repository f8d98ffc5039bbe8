"""Clients of benchmarks/soak.py: they send all kinds of requests and check the full text of
the replies.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import aiohttp
import numpy as np
from PIL import Image as Pillow

from bottega.image import Image
from tests.gateway.marked_replies import digest, is_start, parse_reply, parse_start

MODELS = {"bottega/master": "large", "bottega/apprentice": "small"}
"""Model names at the endpoint of the tiers."""
EXPECTED = {429, 502, 503, 504}
"""Statuses of a gateway with a failing upstream."""
IMAGES, SIDE = 400, 24
STUCK = 90.0


@dataclass(frozen=True)
class Question:
    number: int
    image: int | None

    @property
    def text(self) -> str:
        return f"What did the master paint in case {self.number}?"

    @property
    def digest(self) -> str:
        return digest(self.text, [] if self.image is None else [image(self.image).data])

    @property
    def turn(self) -> Mapping[str, object]:
        if self.image is None:
            return {"role": "user", "content": self.text}
        url = {"url": image(self.image).data_url}
        text = {"type": "text", "text": self.text}
        return {"role": "user", "content": [{"type": "image_url", "image_url": url}, text]}


@cache
def image(number: int) -> Image:
    pixels = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    buffer = io.BytesIO()
    Pillow.fromarray(pixels).save(buffer, "PNG")
    return Image.from_bytes(buffer.getvalue())


@dataclass(frozen=True)
class TenantKey:
    """Tenant with its key and its namespace for stored answers."""

    key: str
    namespace: str


@dataclass(frozen=True)
class StoredAnswer:
    """Times of a request and of its acknowledged storing."""

    requested: float
    acknowledged: float


@dataclass
class ReplyLog:
    """Statistics of the gateway's replies to all clients."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    kept: dict[tuple[str, str], dict[str, StoredAnswer]] = field(default_factory=dict)
    """Acknowledged answers by namespace and question, then by id."""
    first_namespace: dict[int, str] = field(default_factory=dict)
    """Namespace that received each reply first."""

    def keep(self, tenant: TenantKey, question: Question, id: str, requested: float) -> None:
        self.counts["stored"] += 1
        kept = self.kept.setdefault((tenant.namespace, question.digest), {})
        kept[id] = StoredAnswer(requested, time.monotonic())

    def lost(self, namespace: str, there: Mapping[str, Sequence[str]]) -> list[str]:
        """Return questions whose acknowledged answer is not in the file. `there` maps questions to
        stored ids. A newer answer replaces an older one; of two overlapping answers either may
        remain.
        """
        return [
            f"{namespace}: {question}, of {sorted(kept)} there is {there.get(question)}"
            for (where, question), kept in self.kept.items()
            if where == namespace and not _holds(kept, there.get(question, ()))
        ]

    def is_wrong(self, why: str, *more: object) -> None:
        self.counts["wrong"] += 1
        self.wrong.append(f"{why}: {' | '.join(map(str, more))}"[:1000])


def _holds(kept: Mapping[str, StoredAnswer], there: Sequence[str]) -> bool:
    """Whether a stored id was never acknowledged, or no newer request followed its
    acknowledgement."""
    newest = max(one.requested for one in kept.values())
    return any(id not in kept or newest <= kept[id].acknowledged for id in there)


@dataclass
class Reply:
    """Result of one request. `whole` means a complete reply, `failed` a reply that reports a
    failure.
    """

    headers: Mapping[str, str]
    text: str = ""
    finish: str | None = None
    whole: bool = False
    failed: bool = False
    stored: str | None = None
    usage: Mapping[str, int] | None = None

    @property
    def replayed(self) -> bool:
        return self.headers.get("x-bottega-cache") == "replayed"


@dataclass
class Client:
    """Client that sends requests in sequence until it is stopped."""

    url: str
    tenant: TenantKey
    log: ReplyLog
    rng: random.Random
    questions: int
    down: asyncio.Event
    """Set while the gateway may be dead."""

    async def run(self, session: aiohttp.ClientSession, until: asyncio.Event) -> None:
        actions = [self.request, self.disconnect, self.send_invalid]
        while not until.is_set():
            [action] = self.rng.choices(actions, [90, 6, 4])
            self.log.counts["requests"] += 1
            try:
                async with asyncio.timeout(STUCK):
                    await action(session)
            except TimeoutError:
                self.log.is_wrong("no reply in time", STUCK)
            except (aiohttp.ClientError, ConnectionError) as problem:
                if self.down.is_set():
                    self.log.counts["during downtime"] += 1
                    await asyncio.sleep(0.3)
                else:
                    self.log.is_wrong("the connection was lost", repr(problem))

    async def request(self, session: aiohttp.ClientSession) -> None:
        question, body, headers = self.draw()
        requested = time.monotonic()
        async with self.post(session, body, headers) as response:
            if response.status != 200:
                self.refused(response.status, await response.text())
                return
            streamed = body.get("stream")
            reply = await (streamed_reply if streamed else plain_reply)(response)
        if streamed and not reply.whole and self.down.is_set():
            self.log.counts["during downtime"] += 1
        else:
            self.judge(question, body, reply, requested)

    async def disconnect(self, session: aiohttp.ClientSession) -> None:
        """Disconnect before or during the reply."""
        _, body, headers = self.draw()
        self.log.counts["left"] += 1
        try:
            async with asyncio.timeout(self.rng.uniform(0.001, 0.4)):
                async with self.post(session, body | {"stream": True}, headers) as response:
                    async for _ in response.content.iter_any():
                        if self.rng.random() < 0.2:
                            response.close()
                            return
        except TimeoutError:
            return

    async def send_invalid(self, session: aiohttp.ClientSession) -> None:
        """Send an invalid request; the right answer is an error that explains the problem."""
        _, body, _ = self.draw()
        body.pop("tools", None)  # the upstream checks requests with tools
        status, sent, key = self.rng.choice(
            [
                (400, b"{", self.tenant.key),
                (400, json.dumps(body | {"messages": "hello"}).encode(), self.tenant.key),
                (400, json.dumps(body | {"messages": [BROKEN_IMAGE]}).encode(), self.tenant.key),
                (401, json.dumps(body).encode(), "sk-unknown"),
                (404, json.dumps(body | {"model": "unknown"}).encode(), self.tenant.key),
            ]
        )
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        url = f"{self.url}/v1/chat/completions"
        async with session.post(url, data=sent, headers=headers) as response:
            text = await response.text()
            full = response.status in EXPECTED and '"overloaded"' in text  # checked before the body
            if full or (response.status == status and '"error"' in text):
                self.log.counts["correctly rejected"] += 1
            else:
                self.log.is_wrong(f"expected status {status}", response.status, text)

    def draw(self) -> tuple[Question, dict[str, Any], dict[str, str]]:
        """Choose a question, often a repeated one, and a kind of request."""
        rng = self.rng
        number = rng.randrange(40 if rng.random() < 0.3 else self.questions)
        question = Question(number, None if number % 10 == 9 else number * 7 % IMAGES)
        body: dict[str, Any] = {"model": "bottega", "temperature": 0, "max_tokens": 100}
        body["messages"] = [{"role": "system", "content": "Be brief."}, question.turn]
        if rng.random() < 0.4:
            body["stream"] = True
            if rng.random() < 0.5:
                body["stream_options"] = {"include_usage": True}
        headers = {"authorization": f"Bearer {self.tenant.key}"}
        if rng.random() < 0.15:
            body["model"] = rng.choice(list(MODELS))
        if rng.random() < 0.15:
            headers["x-bottega-cache"] = rng.choice(["no-store", "no-retrieve", "no-replay"])
        if rng.random() < 0.03:
            body["tools"] = [TOOL]
        return question, body, headers

    def post(
        self, session: aiohttp.ClientSession, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Any:
        return session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)

    def refused(self, status: int, text: str) -> None:
        if status in EXPECTED and '"error"' in text:
            self.log.refused[status] += 1
        else:
            self.log.is_wrong("an unexpected error", status, text)

    def judge(
        self, question: Question, body: Mapping[str, Any], reply: Reply, requested: float
    ) -> None:
        why = self.reply_problem(question, body, reply)
        if why is not None:
            self.log.is_wrong(why, question, body["model"], reply)
            return
        if reply.stored is not None and not reply.replayed:
            self.log.keep(self.tenant, question, reply.stored, requested)
        kind = "interrupted" if reply.failed else reply.finish if reply.text else "empty"
        self.log.counts["right" if kind == "stop" else f"{kind}, as reported"] += 1
        self.log.counts["streamed"] += bool(body.get("stream"))
        self.log.counts["replayed"] += reply.replayed
        self.log.counts["shown examples"] += (
            reply.headers.get("x-bottega-demonstrations", "0") != "0"
        )

    def reply_problem(
        self, question: Question, body: Mapping[str, Any], reply: Reply
    ) -> str | None:
        """Return the problem of a reply, or None."""
        if not is_start(reply.text, question.digest):
            return "not an answer to this question"
        spoken = parse_start(reply.text)
        if spoken is not None:
            whose = self.log.first_namespace.setdefault(spoken.number, self.tenant.namespace)
            if whose != self.tenant.namespace:
                return f"a reply of namespace {whose}"
            if MODELS.get(body["model"], spoken.model) != spoken.model:
                return "another tier than the requested one"
        if reply.failed:
            return "stored despite a failure" if reply.stored else None
        if not reply.whole:
            return "a stream without an end marker"
        if reply.finish == "stop" and reply.text and parse_reply(reply.text) is None:
            return "a part, returned as complete"
        if reply.finish not in ("stop", "length", "content_filter"):
            return "no finish_reason"
        if reply.finish != "stop" or not reply.text:
            return "stored although incomplete" if reply.stored or reply.replayed else None
        if reply.stored and (spoken is None or spoken.model != "large"):
            return "stored, but not the master's"
        return None


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
BROKEN_IMAGE = {
    "role": "user",
    "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
}


async def plain_reply(response: aiohttp.ClientResponse) -> Reply:
    document = json.loads(await response.read())
    [choice] = document["choices"]
    return Reply(
        response.headers,
        choice["message"]["content"] or "",
        choice["finish_reason"],
        whole=True,
        stored=response.headers.get("x-bottega-stored"),
        usage=document.get("usage"),
    )


async def streamed_reply(response: aiohttp.ClientResponse) -> Reply:
    reply = Reply(response.headers, stored=response.headers.get("x-bottega-stored"))
    try:
        async for line in lines(response):
            take(line, reply)
    except aiohttp.ClientPayloadError:
        reply.whole = False
    return reply


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    held = b""
    async for piece in response.content.iter_any():
        *whole, held = (held + piece).split(b"\n")
        for line in whole:
            yield line.decode()


def take(line: str, reply: Reply) -> None:
    if line.startswith(": stored "):
        reply.stored = line.removeprefix(": stored ").strip()
    elif line.strip() == "data: [DONE]":
        reply.whole = True
    elif line.startswith("data: "):
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            reply.failed = True
        reply.usage = event.get("usage") or reply.usage
        for choice in event.get("choices", []):
            reply.text += choice["delta"].get("content") or ""
            reply.finish = choice.get("finish_reason") or reply.finish
