"""Requests whose client leaves before the reply: finished, stored, billed or dropped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from bottega.errors import ServerFailedError
from bottega.gateway.ports import RequestRecord
from bottega.gateway.request import exchange
from bottega.gateway.request.bill import shield_for
from bottega.openai_api.request import Body
from bottega.openai_api.response import ChatCompletion
from bottega.protocols import Tier
from bottega.types import Answer, Completion, Query, Usage
from tests.gateway.harness import Harness, harness, raw, user_messages
from tests.gateway.metered_gateway import PRICE, Meter, metered
from tests.server import Server

FULL = Usage(40, 10)
ROLE = b'data: {"id": "x", "choices": [{"index": 0, "delta": {"role": "assistant"}}]}\n\n'
TEXT = b'data: {"id": "x", "choices": [{"index": 0, "delta": {"content": "A"}}]}\n\n'


class OverloadedMeter(Meter):
    """Upstream that is overloaded and names a time for the next attempt."""

    def __init__(self, seconds: float = 0.0, retry_after: str = "5") -> None:
        super().__init__()
        self.seconds, self.retry_after = seconds, retry_after

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response({"data": []})
        self.calls += 1
        await asyncio.sleep(self.seconds)
        return web.json_response({}, status=503, headers={"retry-after": self.retry_after})


class SilentMeter(Meter):
    """Upstream whose streams send these bytes and then no text."""

    def __init__(self, sent: bytes) -> None:
        super().__init__()
        self.sent = sent

    async def _stream(
        self, request: web.Request, prompt: int, wanted: int, pieces: list[str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(self.sent)
        await asyncio.sleep(30)
        return response


class Reasoning(Meter):
    """Upstream that sends one token after this many silent seconds, and then no more."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    async def _stream(
        self, request: web.Request, prompt: int, wanted: int, pieces: list[str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(ROLE)
        await asyncio.sleep(self.seconds)
        await response.write(TEXT)
        await asyncio.sleep(30)
        return response


class LateUpstream:
    """Upstream that replies after a moment and records whether it was cancelled."""

    model = "late"

    def __init__(self, *, fails: bool = False, seconds: float = 0.4) -> None:
        self.fails, self.seconds = fails, seconds
        self.calls = self.cancelled = 0

    async def complete(self, body: Body, /) -> ChatCompletion:
        self.calls += 1
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fails:
            raise ServerFailedError("down", status=500)
        message = {"role": "assistant", "content": "late words"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        payload = orjson.dumps({"model": self.model, "choices": [choice]})
        return ChatCompletion(payload, self.model, (Completion("late words"),), FULL)

    async def stream(self, body: Body, /) -> AsyncGenerator[bytes]:
        await self.complete(body)
        yield b"{}"

    async def check(self) -> None: ...

    async def aclose(self) -> None: ...


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "POLL_SECONDS", 0.005)


async def leave(
    server: Harness, upstream_stub: LateUpstream, model: str = "bottega", **more: Any
) -> RequestRecord:
    """Send a request, leave once a tier is called, and return how the request ended."""
    body = {"model": model, "messages": user_messages(1), **more}
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(_post(session, f"{server.url}/chat/completions", body))
        while not upstream_stub.calls:  # noqa: ASYNC110 - the gateway runs in another thread
            await asyncio.sleep(0.005)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    return await asyncio.to_thread(server.wait, 1)


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with session.post(url, json=body) as response:
        await response.read()


async def test_late_reply_is_counted_and_stored(tmp_path: Path) -> None:
    """A client that timed out repeats its request, which then costs nothing."""
    master = LateUpstream()
    with harness(tmp_path, master=master) as server:
        left = await leave(server, master, "bottega/master")
        again = await asyncio.to_thread(raw, server, user_messages(1), "bottega/master")
        assert [example.answer for example in server.examples()] == ["late words"]
    assert (left.status, left.state, left.route) == (499, "failed", "master")
    assert left.usage == FULL and left.cost_usd == pytest.approx(40e-6)
    assert again.headers["x-bottega-cache"] == "replayed"


async def test_failed_call_without_a_client_has_no_fallback(tmp_path: Path) -> None:
    apprentice, master = LateUpstream(fails=True), LateUpstream()
    with harness(tmp_path, apprentice=apprentice, master=master) as server:
        left = await leave(server, apprentice)
    assert (left.status, left.cost_usd, master.calls) == (499, 0.0, 0)


async def test_answer_without_a_client_is_not_escalated(tmp_path: Path) -> None:
    async def unsure(query: Query, tier: Tier, answer: Answer, /) -> Tier | None:
        return Tier("master", tier.generator) if tier.name == "apprentice" else None

    apprentice, master = LateUpstream(), LateUpstream()
    with harness(
        tmp_path,
        apprentice=apprentice,
        master=master,
        change=lambda pipeline: replace(pipeline, escalate=unsure),
    ) as server:
        left = await leave(server, apprentice)
        again = await asyncio.to_thread(raw, server, user_messages(1))
    assert (left.status, left.usage) == (499, FULL)
    assert again.headers["x-bottega-route"] == "master"
    assert again.headers["x-bottega-cache"] != "replayed"


async def test_finish_seconds_limits_a_call(tmp_path: Path) -> None:
    slow = LateUpstream(seconds=30)
    with harness(tmp_path, apprentice=slow) as server:
        server.gateway.completer.finish_seconds = 0.1
        left = await leave(server, slow)
    assert slow.cancelled == 1
    assert left.usage.completion_tokens == pytest.approx(50 * left.seconds, rel=0.9)
    assert left.cost_usd is not None and left.cost_usd > 0


@pytest.mark.parametrize("sent", [b": ping\n\n", ROLE], ids=["ping", "role"])
async def test_stream_without_text_is_billed_by_time(
    endpoint: Server, tmp_path: Path, sent: bytes
) -> None:
    """An upstream charges for hidden reasoning, which it never sends."""
    meter = SilentMeter(sent)
    with metered(tmp_path, endpoint, 100.0, meter=meter) as server:
        await server.leave(1, 0.15, stream=True)
        await server.settled(1)
        ((status, prompt, completion, cost),) = server.entries()
    assert status == 499
    assert prompt > 100
    assert completion >= 7  # 50 tokens a second
    assert cost == pytest.approx((prompt + completion) * PRICE)


async def test_cost_of_silent_time_is_limited(endpoint: Server, tmp_path: Path) -> None:
    with metered(tmp_path, endpoint, 100.0, meter=SilentMeter(ROLE)) as server:
        await server.leave(1, 0.15, stream=True, max_tokens=3)
        await server.settled(1)
        ((_, _, completion, _),) = server.entries()
    assert completion == 3


@pytest.mark.parametrize("limit", [1000, 3])
async def test_time_before_the_first_text_is_billed(
    endpoint: Server, tmp_path: Path, limit: int
) -> None:
    """One visible token must not make the hidden reasoning before it free."""
    with metered(tmp_path, endpoint, 100.0, meter=Reasoning(0.1)) as server:
        await server.leave(1, 0.2, stream=True, max_tokens=limit)
        await server.settled(1)
        ((_, _, completion, _),) = server.entries()
    assert min(limit, 6) <= completion <= limit  # 50 tokens a second, and the visible one


async def test_call_waiting_for_a_connection_is_dropped(endpoint: Server, tmp_path: Path) -> None:
    meter = Meter(token_seconds=0.05, reply_tokens=(20, 20))
    with metered(tmp_path, endpoint, 100.0, meter=meter, concurrency=1) as server:
        async with aiohttp.ClientSession() as session:
            first = asyncio.create_task(server.read(session, 0))
            while not meter.calls:  # noqa: ASYNC110 - the server runs in another thread
                await asyncio.sleep(0.005)
            for stream in (False, True):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await server.read(session, 1, stream=stream)
            await first
        await server.settled(3)
        assert meter.calls == 1
        assert sorted(row[3] for row in server.entries())[:2] == [0.0, 0.0]


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_between_attempts_is_free(
    endpoint: Server, tmp_path: Path, stream: bool
) -> None:
    meter = OverloadedMeter()
    with metered(tmp_path, endpoint, 100.0, meter=meter) as server:
        await server.leave(1, 0.05, stream=stream)
        await server.settled(1)
        ((status, _, _, cost),) = server.entries()
    assert (status, cost, meter.calls) == (499, 0.0, 1)


async def test_no_retry_after_the_client_left(endpoint: Server, tmp_path: Path) -> None:
    meter = OverloadedMeter(seconds=0.2, retry_after="0.02")
    with metered(tmp_path, endpoint, 100.0, meter=meter) as server:
        await server.leave(1, 0.05)
        await server.settled(1)
        ((status, _, _, cost),) = server.entries()
    assert (status, cost, meter.calls) == (499, 0.0, 1)


async def test_second_cancellation_does_not_wait() -> None:
    """The gateway cancels a second time when it stops."""
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()

    task = asyncio.create_task(shield_for(work(), 30.0, lambda: True, asyncio.Event()))
    await asyncio.sleep(0)
    begun = time.perf_counter()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set() and time.perf_counter() - begun < 5


async def test_failure_of_a_stopped_call_does_not_replace_the_cancellation() -> None:
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(30)
        finally:
            raise ServerFailedError("down", status=500)

    task = asyncio.create_task(shield_for(work(), 30.0, lambda: False, asyncio.Event()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_finished_call_leaves_no_pending_cancellation() -> None:
    async def work() -> str:
        await asyncio.sleep(0.01)
        return "done"

    async def request() -> str:
        pieces = await shield_for(work(), 30.0, lambda: True, asyncio.Event())
        async with asyncio.timeout(1):
            await asyncio.sleep(0)
        return pieces

    task = asyncio.create_task(request())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "done"
    assert task.cancelling() == 0
