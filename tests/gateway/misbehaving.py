"""A chat-completions endpoint that misbehaves on a seeded schedule, and never says a wrong word:
what it does say is the right answer, or the beginning of one.

In a process of its own: python -m tests.gateway.misbehaving --port 9000 --seed 1 [--well 0.6]
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from tests.gateway.right import Spoken, asked
from tests.server import raw, refuse, reply

HANGS = 60.0
"""Seconds: longer than any time-out that a test sets."""


@dataclass(frozen=True)
class Asked:
    """A request, and all that it may draw by lot."""

    request: web.Request
    spoken: Spoken
    rng: random.Random
    usage: bool

    def completion(self, content: str | None, finish: str | None = "stop") -> dict[str, Any]:
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return self._named("chat.completion", [choice]) | {"usage": USAGE}

    def chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return self._named("chat.completion.chunk", [choice])

    def chunks(self, text: str, finish: str | None = "stop") -> list[dict[str, Any]]:
        """A role, the text in pieces, an end; `usage` last if it was asked for."""
        found, at = [self.chunk({"role": "assistant", "content": ""})], 0
        while at < len(text):
            piece = text[at : at + self.rng.randint(1, 12)]
            found.append(self.chunk({"content": piece}))
            at += len(piece)
        if finish is not None:
            found.append(self.chunk({}, finish))
        if self.usage and finish is not None:
            found.append(self._named("chat.completion.chunk", []) | {"usage": USAGE})
        return found

    def part(self) -> str:
        """Of the answer, never the whole."""
        return self.spoken.text[: self.rng.randrange(1, len(self.spoken.text) - 1)]

    def _named(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        number = self.spoken.number
        named = {"id": f"chatcmpl-{number}", "object": kind, "created": 1700000000 + number}
        return {**named, "model": self.spoken.model, "choices": choices}


USAGE = {"prompt_tokens": 20, "completion_tokens": 12, "total_tokens": 32}
Trick = Callable[[Asked], Awaitable[web.StreamResponse]]


async def well(asked: Asked) -> web.StreamResponse:
    return await reply(asked.completion(asked.spoken.text))(asked.request)


async def slow(asked: Asked) -> web.StreamResponse:
    await asyncio.sleep(asked.rng.uniform(0.1, 1.5))
    return await well(asked)


async def hangs(asked: Asked) -> web.StreamResponse:
    await asyncio.sleep(HANGS)
    return await well(asked)


def fails(status: int) -> Trick:
    async def trick(asked: Asked) -> web.StreamResponse:
        return await refuse(status, "something broke")(asked.request)

    return trick


async def busy(asked: Asked) -> web.StreamResponse:
    """Asks for a wait."""
    after = asked.rng.choice(["0", "0.2", "1", "soon"])
    return await refuse(429, "slow down", retry_after=after)(asked.request)


async def cut_body(asked: Asked) -> web.StreamResponse:
    """The length of a whole reply, a part of it, a closed connection."""
    whole = orjson.dumps(asked.completion(asked.spoken.text))
    response = web.StreamResponse(
        headers={"content-type": "application/json", "content-length": str(len(whole))}
    )
    await response.prepare(asked.request)
    await response.write(whole[: asked.rng.randrange(len(whole))])
    return cut(asked, response)


async def no_reply(asked: Asked) -> web.StreamResponse:
    return cut(asked, web.StreamResponse())


def cut(asked: Asked, response: web.StreamResponse) -> web.StreamResponse:
    if asked.request.transport is not None:
        asked.request.transport.abort()
    return response


async def garbage(asked: Asked) -> web.StreamResponse:
    said = asked.rng.choice([b"{", b"\xff\xfe\x00", b"[]", b"null", b'{"choices": 3}', b"", b"{}"])
    return await raw(said, 200, "application/json")(asked.request)


async def truncated(asked: Asked) -> web.StreamResponse:
    """JSON that ends too early, by a proxy that says that all is well."""
    whole = orjson.dumps(asked.completion(asked.spoken.text))
    return await raw(whole[: asked.rng.randrange(1, len(whole))], 200, "application/json")(
        asked.request
    )


async def page(asked: Asked) -> web.StreamResponse:
    return await raw(b"<html><body>Please log in</body></html>", 200)(asked.request)


async def wrong_type(asked: Asked) -> web.StreamResponse:
    return await raw(orjson.dumps(asked.completion(asked.spoken.text)), 200, "text/plain")(
        asked.request
    )


async def no_choices(asked: Asked) -> web.StreamResponse:
    said = asked.completion("")
    return await reply(said | {"choices": []})(asked.request)


async def null_content(asked: Asked) -> web.StreamResponse:
    return await reply(asked.completion(None))(asked.request)


async def too_long(asked: Asked) -> web.StreamResponse:
    """Cut at the token limit, as it says itself."""
    return await reply(asked.completion(asked.part(), "length"))(asked.request)


async def filtered(asked: Asked) -> web.StreamResponse:
    return await reply(asked.completion(asked.part(), "content_filter"))(asked.request)


PLAIN: dict[str, Trick] = {
    "slow": slow,
    "hangs": hangs,
    "500": fails(500),
    "502": fails(502),
    "503": fails(503),
    "429": busy,
    "cut body": cut_body,
    "no reply": no_reply,
    "garbage": garbage,
    "truncated": truncated,
    "page": page,
    "wrong type": wrong_type,
    "no choices": no_choices,
    "null content": null_content,
    "length": too_long,
    "filtered": filtered,
}


@dataclass
class Events:
    """A stream as it goes out: in pieces that end anywhere, between events, too."""

    asked: Asked
    response: web.StreamResponse
    line_end: bytes = b"\n"
    pause: float = 0.0

    @classmethod
    async def begin(cls, asked: Asked, pause: float = 0.0) -> Events:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(asked.request)
        ends = asked.rng.choice([b"\n", b"\n", b"\r\n"])
        return cls(asked, response, ends, pause)

    async def send(self, chunks: list[dict[str, Any]]) -> None:
        for chunk in chunks:
            await self.line(b"data: " + orjson.dumps(chunk))
            if self.asked.rng.random() < 0.05:
                await self.line(b": still here")

    async def done(self) -> web.StreamResponse:
        await self.line(b"data: [DONE]")
        return self.response

    async def line(self, text: bytes) -> None:
        whole = text + self.line_end * 2
        if self.asked.rng.random() < 0.2:
            at = self.asked.rng.randrange(len(whole))
            await self.response.write(whole[:at])
            await asyncio.sleep(0.001)
            whole = whole[at:]
        await self.response.write(whole)
        if self.pause:
            await asyncio.sleep(self.pause)


async def streams_well(asked: Asked) -> web.StreamResponse:
    events = await Events.begin(asked)
    await events.send(asked.chunks(asked.spoken.text))
    return await events.done()


async def streams_slowly(asked: Asked) -> web.StreamResponse:
    events = await Events.begin(asked, pause=asked.rng.uniform(0.005, 0.08))
    await events.send(asked.chunks(asked.spoken.text))
    return await events.done()


async def stalls(asked: Asked) -> web.StreamResponse:
    """Silence after a part."""
    events = await Events.begin(asked)
    await events.send(asked.chunks(asked.part(), None))
    await asyncio.sleep(HANGS)
    return events.response


async def cut_stream(asked: Asked) -> web.StreamResponse:
    events = await Events.begin(asked)
    await events.send(asked.chunks(asked.part(), None))
    return cut(asked, events.response)


async def ends_early(asked: Asked) -> web.StreamResponse:
    """A part, then a proper end of the connection: no finish_reason and no [DONE]."""
    events = await Events.begin(asked)
    await events.send(asked.chunks(asked.part(), None))
    return events.response


async def never_done(asked: Asked) -> web.StreamResponse:
    """All of it but for the [DONE]."""
    events = await Events.begin(asked)
    await events.send(asked.chunks(asked.spoken.text))
    return events.response


async def breaks_inside(asked: Asked) -> web.StreamResponse:
    """An error in mid-stream, as OpenAI's servers send it."""
    events = await Events.begin(asked)
    await events.send(asked.chunks(asked.part(), None))
    await events.line(b'data: {"error": {"message": "overloaded", "type": "server_error"}}')
    return events.response


async def garbage_inside(asked: Asked) -> web.StreamResponse:
    events = await Events.begin(asked)
    await events.send(asked.chunks(asked.part(), None))
    await events.line(b"data: " + asked.rng.choice([b"{", b"<html>", b"\xff\xfe", b"[1]", b"null"]))
    return await events.done()


async def empty_stream(asked: Asked) -> web.StreamResponse:
    return await (await Events.begin(asked)).done()


async def streams_too_long(asked: Asked) -> web.StreamResponse:
    events = await Events.begin(asked)
    await events.send(asked.chunks(asked.part(), "length"))
    return await events.done()


async def odd_chunks(asked: Asked) -> web.StreamResponse:
    """Chunks that say nothing, as other servers send them, around a right answer."""
    events, nothing = await Events.begin(asked), asked.chunk({"content": None})
    first, *rest = asked.chunks(asked.spoken.text)
    await events.send([first | {"choices": []}, first, nothing, *rest])
    return await events.done()


STREAMED: dict[str, Trick] = {
    **{name: PLAIN[name] for name in ("hangs", "500", "502", "503", "429", "no reply", "page")},
    "not a stream": well,
    "slow": streams_slowly,
    "stalls": stalls,
    "cut stream": cut_stream,
    "ends early": ends_early,
    "never done": never_done,
    "breaks inside": breaks_inside,
    "garbage inside": garbage_inside,
    "empty stream": empty_stream,
    "length": streams_too_long,
    "odd chunks": odd_chunks,
}
RARE = {"hangs", "stalls"}  # each holds a client for a whole time-out


@dataclass
class Misbehaving:
    """Request i misbehaves as the seed says, a share of `well` not at all."""

    seed: int = 0
    well: float = 0.6
    done: Counter[str] = field(default_factory=Counter)
    now: int = 0
    left: int = 0
    """How many requests were cancelled by whoever had sent them."""

    def trick(self, number: int, *, streamed: bool) -> tuple[str, Trick]:
        rng = random.Random(f"{self.seed}/{number}")
        if rng.random() < self.well:
            return "well", streams_well if streamed else well
        tricks = STREAMED if streamed else PLAIN
        weights = [0.2 if name in RARE else 1.0 for name in tricks]
        [name] = rng.choices(list(tricks), weights)
        return name, tricks[name]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        number, streamed = self.done.total(), bool(body.get("stream"))
        name, trick = self.trick(number, streamed=streamed)
        self.done[f"streamed: {name}" if streamed else name] += 1
        spoken = Spoken(asked(body["messages"]), body["model"], number)
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        rng = random.Random(f"{self.seed}/{number}/{name}")
        self.now += 1
        try:
            return await trick(Asked(request, spoken, rng, usage))
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        finally:
            self.now -= 1

    async def models(self, request: web.Request) -> web.StreamResponse:
        return await reply({"object": "list", "data": []})(request)

    async def tell(self, request: web.Request) -> web.StreamResponse:
        return await reply({"done": self.done, "now": self.now, "left": self.left})(request)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/told", self.tell)
        return app


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--well", type=float, default=0.6)
    chosen = parser.parse_args()
    web.run_app(
        Misbehaving(chosen.seed, chosen.well).app(),
        host="127.0.0.1",
        port=chosen.port,
        access_log=None,
        print=None,
        handler_cancellation=True,
    )


if __name__ == "__main__":
    main()
