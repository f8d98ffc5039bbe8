"""Streams from a real server on loopback: whole, cut, late, flooding, closed."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from typing import Any

import orjson
import pytest
from aiohttp import web

from bottega.errors import EndpointTimeoutError, GarbledError, ServerFailedError
from bottega.gateway.request.upstreams import HttpUpstream
from bottega.openai_api.client import Breaker, Tolerance
from tests.gateway.upstreams import (
    BODY,
    CHUNKS,
    USAGE,
    chunk,
    completed,
    events,
    lines,
    seen,
    signal_on_disconnect,
    streamed,
    upstream,
)
from tests.server import Answer, Server, cut, ok, refuse, slowly, stall


async def test_stream_arrives_unchanged(endpoint: Server) -> None:
    endpoint.answers = [events(lines(*CHUNKS))]
    assert await streamed(upstream(endpoint), BODY | {"stream_options": {"z": 1}}) == CHUNKS
    request = {"stream": True, "stream_options": {"z": 1, "include_usage": True}}
    assert endpoint.bodies == [BODY | {"model": "m"} | request]
    headers = endpoint.headers[0]
    # Compression buffers small chunks.
    assert (headers["Accept"], headers["Accept-Encoding"]) == ("text/event-stream", "identity")


@pytest.mark.parametrize(
    "failing",
    [
        refuse(500),
        events(lines({"error": {"message": "overloaded", "code": 503}})),
        events(b""),
        events(b"data: [DONE]\n\n"),
        events(b"data: {oops\n\n"),
        events(b": wait\n\n", end="abort"),
        cut(),
    ],
    ids=["500", "error", "nothing", "only done", "garbage", "cut", "cut json"],
)
async def test_failure_before_the_first_event_is_retried(endpoint: Server, failing: Answer) -> None:
    endpoint.answers = [failing, events(lines(*CHUNKS))]
    assert await streamed(upstream(endpoint)) == CHUNKS
    assert len(endpoint.bodies) == 2


@pytest.mark.parametrize(
    ("rest", "kind", "message"),
    [
        (events(lines(chunk("a"), {"error": {"message": "lost a GPU"}})), ServerFailedError, "GPU"),
        (events(lines(chunk("a"), done=False), end="abort"), ServerFailedError, "cut"),
        (events(lines(chunk("a"), done=False)), ServerFailedError, "cut"),
        (events(lines(chunk("a"), done=False) + b'data: {"choi'), ServerFailedError, "cut"),
        (events(lines(chunk("a"), done=False) + b"data: {oops\n\n"), GarbledError, "JSON"),
        (events(lines(chunk("a"), [1])), GarbledError, "object"),
        (events(lines(chunk("a"), {"choices": 1})), GarbledError, "choices"),
        (events(lines(chunk("a"), {"choices": [None]})), GarbledError, "choices"),
        (events(lines(chunk("a"), chunk(finish="error"))), ServerFailedError, "502"),
    ],
)
async def test_broken_stream_raises_after_its_events(
    endpoint: Server, rest: Answer, kind: type[Exception], message: str
) -> None:
    endpoint.answers = [rest]
    got, target = [], upstream(endpoint)
    with pytest.raises(kind, match=message):
        async for payload in target.stream(BODY):
            got.append(orjson.loads(payload))
    await target.aclose()
    assert got == [chunk("a")]
    assert len(endpoint.bodies) == 1


@pytest.mark.parametrize(
    "sent",
    [
        events(lines(*CHUNKS, done=False)),
        events(lines(*CHUNKS, done=False).rstrip()),
        events(lines(*CHUNKS), end="abort"),
        events(lines(*CHUNKS, done=False), end="abort"),
        events(lines(*CHUNKS).replace(b"\n", b"\r\n")),
        events(
            b"\xef\xbb\xbf: hello\n\nevent: x\nid: 3\n",
            lines(*CHUNKS),
            b"data: after the end",
        ),
        events(lines(*CHUNKS), kind="text/plain"),
    ],
)
async def test_complete_answer_may_end_in_many_ways(endpoint: Server, sent: Answer) -> None:
    endpoint.answers = [sent]
    assert await streamed(upstream(endpoint, retries=0)) == CHUNKS


@pytest.mark.parametrize(
    "rest",
    [
        [40.0],
        [b": alive\n\n", 0.01] * 2000,
        [b"data: " + b"x" * 500_000],
        [b"data: {}\n\n" * 100_000] * 3,
        [b"data: " + b"x" * 500_000 + b"\n\n", 40.0],
    ],
    ids=["nothing", "comments", "large event", "many events", "large event, nothing"],
)
async def test_what_follows_a_complete_answer_changes_nothing(
    endpoint: Server, rest: list[bytes | float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.openai_api.transport.END_SECONDS", 0.1)
    monkeypatch.setattr("bottega.openai_api.transport.MAX_REPLY_MB", 1)
    monkeypatch.setattr("bottega.openai_api.streams.MAX_EVENT", 1 << 17)
    endpoint.answers = [events(lines(*CHUNKS, done=False), *rest), ok("the slot is free")]
    target = upstream(endpoint, retries=0, concurrency=1, timeout=30.0)
    async with aclosing(target.stream(BODY)) as stream:
        assert [orjson.loads(payload) async for payload in stream] == CHUNKS
    await completed(target)


async def test_unfinished_choice_raises(endpoint: Server) -> None:
    endpoint.answers = [events(lines(chunk("a"), chunk(finish="stop"), done=False))]
    with pytest.raises(ServerFailedError, match="cut"):
        await streamed(upstream(endpoint, retries=0), BODY | {"n": 2})


async def test_single_bytes_are_read(endpoint: Server) -> None:
    sent = [chunk("añ€😀"), chunk(finish="stop")]
    endpoint.answers = [events(*(bytes([byte]) for byte in lines(*sent)))]
    assert await streamed(upstream(endpoint)) == sent


async def test_complete_reply_is_sent_as_a_stream(endpoint: Server) -> None:
    endpoint.answers = [ok("a b", id="c", model="n")]
    chunks = await streamed(upstream(endpoint))
    deltas = [choice["delta"] for target in chunks for choice in target["choices"]]
    assert [delta.get("content") for delta in deltas] == ["", "a b", None]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["prompt_tokens"] == 10


@pytest.mark.parametrize("size", ["event", "stream"])
async def test_oversized_replies_are_not_read(
    endpoint: Server, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if size == "event":
        monkeypatch.setattr("bottega.openai_api.streams.MAX_EVENT", 1 << 16)
        flood = [b"data: "] + [b"x" * 50_000] * 40
    else:
        monkeypatch.setattr("bottega.openai_api.transport.MAX_REPLY_MB", 1)
        flood = [lines(chunk("x" * 50_000), done=False)] * 40
    endpoint.answers = [events(*flood)]
    with pytest.raises(GarbledError, match="MB"):
        await streamed(upstream(endpoint, retries=3))
    assert len(endpoint.bodies) == 1


def beats(piece: bytes, times: int) -> list[bytes | float]:
    return [piece, 0.02] * times


def repeated(piece: bytes) -> Answer:
    return events(*beats(piece, 2000))


COMMENT = b": alive\n\n"


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
NEVER_ENDING = {
    "no response": slowly(events(lines(*CHUNKS)), 40.0),
    "nothing": events(40.0),
    "comments": repeated(COMMENT),
    "pings": repeated(PING),
    "roles": repeated(lines(ROLE, done=False)),
    "chunk, nothing": events(lines(chunk("a"), done=False), 40.0),
    "chunks": repeated(lines(chunk("a"), done=False)),
    "half of a reply": stall(40.0),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", NEVER_ENDING)
async def test_timeout_covers_an_attempt_whatever_arrives(
    endpoint: Server, name: str, stream: bool
) -> None:
    endpoint.answers = [NEVER_ENDING[name]]
    target = upstream(endpoint, timeout=0.25, retries=0)
    with pytest.raises(EndpointTimeoutError, match=r"did not finish its reply within 0\.25 s"):
        await (streamed if stream else completed)(target)


@pytest.mark.parametrize(
    "sent",
    [
        events(*beats(COMMENT, 15), lines(*CHUNKS)),
        events(*beats(PING, 15), lines(*CHUNKS)),
        events(0.3, lines(*CHUNKS)),
        events(lines(chunk("a"), done=False), COMMENT, 0.3, lines(*CHUNKS[1:])),
        events(lines(chunk("a"), done=False), 0.3, lines(*CHUNKS[1:])),
    ],
    ids=["comments", "pings", "silence", "comment between", "silence between"],
)
async def test_timeout_is_the_only_limit_of_a_stream(
    endpoint: Server, sent: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.openai_api.transport.CONNECT_SECONDS", 1e5)
    loop = asyncio.get_running_loop()
    begun, real = loop.time(), loop.time
    monkeypatch.setattr(loop, "time", lambda: begun + (real() - begun) * 1000)  # 0.3 s: 5 minutes
    endpoint.answers = [sent]
    assert await streamed(upstream(endpoint, timeout=1e5, retries=0)) == CHUNKS


EMPTY = {
    "role": ROLE,
    "no text": chunk(""),
    "null": {"choices": [{"index": 0, "delta": {"content": None, "tool_calls": []}}]},
    "no delta": {"choices": [{"index": 0, "delta": None}]},
    "filter results": {"choices": [], "prompt_filter_results": [{"prompt_index": 0}]},
    "usage": USAGE,
}
BREAKS: dict[str, tuple[bytes, str]] = {
    "error": (lines({"error": {"message": "lost a GPU"}}), ""),
    "error choice": (lines(chunk(finish="error")), ""),
    "garbage": (b"data: {oops\n\n", ""),
    "cut": (b"", "abort"),
    "end": (b"", ""),
    "done": (b"data: [DONE]\n\n", ""),
}


@pytest.mark.parametrize("broken", BREAKS)
@pytest.mark.parametrize("name", EMPTY)
async def test_failure_before_the_first_content_is_retried(
    endpoint: Server, name: str, broken: str
) -> None:
    begun, (rest, end) = lines(ROLE, EMPTY[name], done=False), BREAKS[broken]
    endpoint.answers = [events(begun, rest, end=end), events(begun, lines(*CHUNKS))]
    assert await streamed(upstream(endpoint)) == [ROLE, EMPTY[name], *CHUNKS]
    assert len(endpoint.bodies) == 2


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "a"},
        {"content": [{"type": "text", "text": "a"}]},
        {"reasoning_content": "hm"},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]},
        {"function_call": {"name": "f"}},
        {"audio": {"data": "UklG"}},
    ],
    ids=lambda delta: next(iter(delta)),
)
async def test_first_content_ends_the_retries(endpoint: Server, delta: dict[str, Any]) -> None:
    piece = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    endpoint.answers = [events(lines(ROLE, piece, {"error": {"message": "lost a GPU"}}))]
    got, target = [], upstream(endpoint)
    with pytest.raises(ServerFailedError):
        async for payload in target.stream(BODY):
            got.append(orjson.loads(payload))
    await target.aclose()
    assert (got, len(endpoint.bodies)) == ([ROLE, piece], 1)


async def test_empty_answers_arrive_with_their_end(endpoint: Server) -> None:
    sent = [ROLE, chunk(finish="stop"), USAGE]
    endpoint.answers = [events(lines(*sent))]
    assert await streamed(upstream(endpoint)) == sent


async def test_closing_a_stream_ends_its_request(endpoint: Server) -> None:
    gone = threading.Event()
    endpoint.answers = [signal_on_disconnect(events(lines(chunk("a"), done=False), 30.0), gone)]
    target = upstream(endpoint, concurrency=1)
    async with aclosing(target.stream(BODY)) as stream:
        assert orjson.loads(await anext(stream)) == chunk("a")
    assert await seen(gone)
    endpoint.answers = [ok("the slot is free")]
    await completed(target)


async def test_finished_stream_frees_its_connection(
    endpoint: Server,
) -> None:
    ports = set()

    async def noting(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername")[1])
        return await events(lines(*CHUNKS))(request)

    endpoint.answers = [noting]
    target = upstream(endpoint)
    for _ in range(3):
        assert [payload async for payload in target.stream(BODY)]
    await target.aclose()
    assert len(ports) == 1


async def test_streams_count_towards_concurrency(endpoint: Server) -> None:
    endpoint.answers = [events(lines(*CHUNKS[:1], done=False), 0.05, lines(*CHUNKS[1:]))]
    target = upstream(endpoint, concurrency=2)
    await asyncio.gather(*(_drained(target) for _ in range(5)))
    await target.aclose()
    assert endpoint.most_at_once == 2


async def _drained(target: HttpUpstream) -> None:
    assert len([payload async for payload in target.stream(BODY)]) == len(CHUNKS)


async def test_cut_streams_open_the_breaker(endpoint: Server) -> None:
    endpoint.answers = [events(lines(chunk("a"), done=False))]
    target = upstream(endpoint, breaker=Breaker(Tolerance(failures=2)))
    for _ in range(2):
        with pytest.raises(ServerFailedError):
            await streamed(target)
    assert target.breaker.state == "open"


async def test_first_event_closes_the_breaker(endpoint: Server) -> None:
    endpoint.answers = [refuse(500), events(lines(chunk("a"), done=False), 30.0), ok("b")]
    tolerance = Tolerance(failures=1, pause=0.01, longest_pause=60)
    target = upstream(endpoint, breaker=Breaker(tolerance), retries=0)
    with pytest.raises(ServerFailedError):
        await target.complete(BODY)
    await asyncio.sleep(0.02)
    async with aclosing(target.stream(BODY)) as stream:
        await anext(stream)
        await target.complete(BODY)
    await target.aclose()
