"""Chat-completions endpoint that fails on a seeded schedule. All its texts are correct answers, or
the start of one.

In a process of its own: `python -m tests.gateway.faulty_upstream --port 9000 --seed 1`.
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

from tests.gateway.marked_replies import MarkedReply, question_digest
from tests.server import raw, refuse, reply

HANG_SECONDS = 60.0
"""Longer than any time-out that a test sets."""


@dataclass(frozen=True)
class FaultyRequest:
    """A request, with the random state of its reply."""

    request: web.Request
    marked: MarkedReply
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
        """Return a role chunk, text chunks and a final chunk; then the usage if requested."""
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
        """Return an incomplete part of the answer."""
        return self.marked.text[: self.rng.randrange(1, len(self.marked.text) - 1)]

    def _named(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        number = self.marked.number
        named = {"id": f"chatcmpl-{number}", "object": kind, "created": 1700000000 + number}
        return {**named, "model": self.marked.model, "choices": choices}


USAGE = {"prompt_tokens": 20, "completion_tokens": 12, "total_tokens": 32}
Fault = Callable[[FaultyRequest], Awaitable[web.StreamResponse]]


async def correct(request: FaultyRequest) -> web.StreamResponse:
    return await reply(request.completion(request.marked.text))(request.request)


async def slow(request: FaultyRequest) -> web.StreamResponse:
    await asyncio.sleep(request.rng.uniform(0.1, 1.5))
    return await correct(request)


async def hang(request: FaultyRequest) -> web.StreamResponse:
    await asyncio.sleep(HANG_SECONDS)
    return await correct(request)


def fail(status: int) -> Fault:
    async def fault(request: FaultyRequest) -> web.StreamResponse:
        return await refuse(status, "something broke")(request.request)

    return fault


async def busy(request: FaultyRequest) -> web.StreamResponse:
    """Request a wait."""
    after = request.rng.choice(["0", "0.2", "1", "soon"])
    return await refuse(429, "slow down", retry_after=after)(request.request)


async def cut_body(request: FaultyRequest) -> web.StreamResponse:
    """Send the length of the whole reply and a part of it, then close the connection."""
    whole = orjson.dumps(request.completion(request.marked.text))
    response = web.StreamResponse(
        headers={"content-type": "application/json", "content-length": str(len(whole))}
    )
    await response.prepare(request.request)
    await response.write(whole[: request.rng.randrange(len(whole))])
    return cut(request, response)


async def no_reply(request: FaultyRequest) -> web.StreamResponse:
    return cut(request, web.StreamResponse())


def cut(request: FaultyRequest, response: web.StreamResponse) -> web.StreamResponse:
    if request.request.transport is not None:
        request.request.transport.abort()
    return response


async def garbage(request: FaultyRequest) -> web.StreamResponse:
    payload = request.rng.choice(
        [b"{", b"\xff\xfe\x00", b"[]", b"null", b'{"choices": 3}', b"", b"{}"]
    )
    return await raw(payload, 200, "application/json")(request.request)


async def truncated(request: FaultyRequest) -> web.StreamResponse:
    """Truncated JSON from a proxy that reports success."""
    whole = orjson.dumps(request.completion(request.marked.text))
    return await raw(whole[: request.rng.randrange(1, len(whole))], 200, "application/json")(
        request.request
    )


async def page(request: FaultyRequest) -> web.StreamResponse:
    return await raw(b"<html><body>Please log in</body></html>", 200)(request.request)


async def wrong_content_type(request: FaultyRequest) -> web.StreamResponse:
    return await raw(orjson.dumps(request.completion(request.marked.text)), 200, "text/plain")(
        request.request
    )


async def no_choices(request: FaultyRequest) -> web.StreamResponse:
    payload = request.completion("")
    return await reply(payload | {"choices": []})(request.request)


async def null_content(request: FaultyRequest) -> web.StreamResponse:
    return await reply(request.completion(None))(request.request)


async def too_long(request: FaultyRequest) -> web.StreamResponse:
    """Send a reply that ends at the token limit."""
    return await reply(request.completion(request.part(), "length"))(request.request)


async def filtered(request: FaultyRequest) -> web.StreamResponse:
    return await reply(request.completion(request.part(), "content_filter"))(request.request)


PLAIN: dict[str, Fault] = {
    "slow": slow,
    "hangs": hang,
    "500": fail(500),
    "502": fail(502),
    "503": fail(503),
    "429": busy,
    "cut body": cut_body,
    "no reply": no_reply,
    "garbage": garbage,
    "truncated": truncated,
    "page": page,
    "wrong type": wrong_content_type,
    "no choices": no_choices,
    "null content": null_content,
    "length": too_long,
    "filtered": filtered,
}


@dataclass
class Events:
    """Stream writer that cuts chunks at arbitrary bytes, also between events."""

    request: FaultyRequest
    response: web.StreamResponse
    line_end: bytes = b"\n"
    pause: float = 0.0

    @classmethod
    async def begin(cls, request: FaultyRequest, pause: float = 0.0) -> Events:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request.request)
        ends = request.rng.choice([b"\n", b"\n", b"\r\n"])
        return cls(request, response, ends, pause)

    async def send(self, chunks: list[dict[str, Any]]) -> None:
        for chunk in chunks:
            await self.line(b"data: " + orjson.dumps(chunk))
            if self.request.rng.random() < 0.05:
                await self.line(b": still here")

    async def done(self) -> web.StreamResponse:
        await self.line(b"data: [DONE]")
        return self.response

    async def line(self, text: bytes) -> None:
        whole = text + self.line_end * 2
        if self.request.rng.random() < 0.2:
            at = self.request.rng.randrange(len(whole))
            await self.response.write(whole[:at])
            await asyncio.sleep(0.001)
            whole = whole[at:]
        await self.response.write(whole)
        if self.pause:
            await asyncio.sleep(self.pause)


async def correct_stream(request: FaultyRequest) -> web.StreamResponse:
    events = await Events.begin(request)
    await events.send(request.chunks(request.marked.text))
    return await events.done()


async def slow_stream(request: FaultyRequest) -> web.StreamResponse:
    events = await Events.begin(request, pause=request.rng.uniform(0.005, 0.08))
    await events.send(request.chunks(request.marked.text))
    return await events.done()


async def stall(request: FaultyRequest) -> web.StreamResponse:
    """Send a part, then nothing."""
    events = await Events.begin(request)
    await events.send(request.chunks(request.part(), None))
    await asyncio.sleep(HANG_SECONDS)
    return events.response


async def cut_stream(request: FaultyRequest) -> web.StreamResponse:
    events = await Events.begin(request)
    await events.send(request.chunks(request.part(), None))
    return cut(request, events.response)


async def early_end(request: FaultyRequest) -> web.StreamResponse:
    """Send a part and end the connection, without finish_reason and [DONE]."""
    events = await Events.begin(request)
    await events.send(request.chunks(request.part(), None))
    return events.response


async def missing_done(request: FaultyRequest) -> web.StreamResponse:
    """Send everything except [DONE]."""
    events = await Events.begin(request)
    await events.send(request.chunks(request.marked.text))
    return events.response


async def error_inside(request: FaultyRequest) -> web.StreamResponse:
    """Send an error in mid-stream, as OpenAI's servers do."""
    events = await Events.begin(request)
    await events.send(request.chunks(request.part(), None))
    await events.line(b'data: {"error": {"message": "overloaded", "type": "server_error"}}')
    return events.response


async def garbage_inside(request: FaultyRequest) -> web.StreamResponse:
    events = await Events.begin(request)
    await events.send(request.chunks(request.part(), None))
    await events.line(
        b"data: " + request.rng.choice([b"{", b"<html>", b"\xff\xfe", b"[1]", b"null"])
    )
    return await events.done()


async def empty_stream(request: FaultyRequest) -> web.StreamResponse:
    return await (await Events.begin(request)).done()


async def long_stream(request: FaultyRequest) -> web.StreamResponse:
    events = await Events.begin(request)
    await events.send(request.chunks(request.part(), "length"))
    return await events.done()


async def odd_chunks(request: FaultyRequest) -> web.StreamResponse:
    """Send a correct answer with empty chunks, as other servers do."""
    events, nothing = await Events.begin(request), request.chunk({"content": None})
    first, *rest = request.chunks(request.marked.text)
    await events.send([first | {"choices": []}, first, nothing, *rest])
    return await events.done()


STREAMED: dict[str, Fault] = {
    **{name: PLAIN[name] for name in ("hangs", "500", "502", "503", "429", "no reply", "page")},
    "not a stream": correct,
    "slow": slow_stream,
    "stalls": stall,
    "cut stream": cut_stream,
    "ends early": early_end,
    "never done": missing_done,
    "breaks inside": error_inside,
    "garbage inside": garbage_inside,
    "empty stream": empty_stream,
    "length": long_stream,
    "odd chunks": odd_chunks,
}
RARE = {"hangs", "stalls"}  # each delays a client by a full timeout


@dataclass
class FaultyUpstream:
    """Endpoint whose seed decides which requests fail; the share `correct` succeeds."""

    seed: int = 0
    correct: float = 0.6
    done: Counter[str] = field(default_factory=Counter)
    now: int = 0
    left: int = 0
    """Number of requests that their clients cancelled."""

    def fault(self, number: int, *, streamed: bool) -> tuple[str, Fault]:
        rng = random.Random(f"{self.seed}/{number}")
        if rng.random() < self.correct:
            return "correct", correct_stream if streamed else correct
        faults = STREAMED if streamed else PLAIN
        weights = [0.2 if name in RARE else 1.0 for name in faults]
        [name] = rng.choices(list(faults), weights)
        return name, faults[name]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        number, streamed = self.done.total(), bool(body.get("stream"))
        name, fault = self.fault(number, streamed=streamed)
        self.done[f"streamed: {name}" if streamed else name] += 1
        marked = MarkedReply(question_digest(body["messages"]), body["model"], number)
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        rng = random.Random(f"{self.seed}/{number}/{name}")
        self.now += 1
        try:
            return await fault(FaultyRequest(request, marked, rng, usage))
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        finally:
            self.now -= 1

    async def models(self, request: web.Request) -> web.StreamResponse:
        return await reply({"object": "list", "data": []})(request)

    async def counts(self, request: web.Request) -> web.StreamResponse:
        return await reply({"done": self.done, "now": self.now, "left": self.left})(request)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/counts", self.counts)
        return app


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--correct", type=float, default=0.6)
    chosen = parser.parse_args()
    web.run_app(
        FaultyUpstream(chosen.seed, chosen.correct).app(),
        host="127.0.0.1",
        port=chosen.port,
        access_log=None,
        print=None,
        handler_cancellation=True,
    )


if __name__ == "__main__":
    main()
