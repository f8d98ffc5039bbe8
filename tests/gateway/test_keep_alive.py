"""Streams that are silent: keep-alives, then the answer of any tier, or an error."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
from aiohttp import web

from bottega.gateway.asgi import App
from bottega.gateway.ports import RequestRecord
from bottega.gateway.request import exchange
from bottega.gateway.request.exchange import ChatEndpoint
from tests.gateway.harness import Harness, client, harness, user_messages
from tests.gateway.upstreams import CHUNKS, events, lines, signal_on_disconnect, upstream
from tests.server import Answer, Server, ok, refuse

COMMENT, PING = b": keep-alive\n\n", b'event: ping\ndata: {"type": "ping"}\n\n'
TURNS = [{"role": "user", "content": "hi"}]
APIS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": TURNS},
    "responses": {"input": "hi"},
    "messages": {"messages": TURNS, "max_tokens": 9},
    "completions": {"prompt": "hi"},
}
ERRORS = {
    "chat/completions": '{"error":{"message":"the model of this gateway failed"',
    "responses": "event: error\n",
    "messages": 'event: error\ndata: {"type":"error","error":{"type":"api_error"',
    "completions": '{"error":{"message":"the model of this gateway failed"',
}
ENDS = {
    "chat/completions": "data: [DONE]\n\n",
    "responses": "event: response.completed\n",
    "messages": 'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    "completions": "data: [DONE]\n\n",
}


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "POLL_SECONDS", 0.005)


class Gate:
    """Pause of an upstream until the test opens it."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.open = self._opened.set

    def before(self, answer: Answer, begun: bytes = b"") -> Answer:
        """Return an answer that writes the beginning of a stream, and the rest after the pause."""

        async def later(request: web.Request) -> web.StreamResponse:
            if not begun:
                await self.wait()
                return await answer(request)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(begun)
            await self.wait()
            await response.write(lines(*CHUNKS[1:]))
            return response

        return later

    async def wait(self) -> None:
        while not self._opened.is_set():  # noqa: ASYNC110 - the test runs in another thread
            await asyncio.sleep(0.005)


@contextmanager
def stream(server: Harness, path: str, **more: Any) -> Iterator[http.client.HTTPResponse]:
    """Send a request and return the response once its headers have arrived."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.netloc, timeout=20)
    body = {"model": "bottega", "stream": True, **APIS[path], **more}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer sk-test"}
    connection.request("POST", f"{address.path}/{path}", orjson.dumps(body), headers)
    try:
        yield connection.getresponse()
    finally:
        connection.close()


def read_until(response: http.client.HTTPResponse, wanted: bytes) -> bytes:
    found = b""
    while not found.endswith(wanted):
        line = response.readline()
        assert line, found
        found += line
    return found


def expected(path: str) -> bytes:
    return PING if path == "messages" else COMMENT


@pytest.mark.parametrize("path", APIS)
def test_silent_streams_are_kept_alive(endpoint: Server, tmp_path: Path, path: str) -> None:
    gate = Gate()
    endpoint.answers = [gate.before(events(lines(*CHUNKS)))]
    tier = upstream(endpoint)
    with harness(tmp_path, apprentice=tier, keep_alive=0.03) as server:
        with stream(server, path) as response:
            assert response.status == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            # A busy machine may send the first keep-alive before the tier is chosen.
            assert response.headers["x-bottega-route"] in ("apprentice", None)
            for _ in range(3):
                assert read_until(response, expected(path)) == expected(path)
            gate.open()
            rest = response.read().decode()
        record = server.wait(1)
    assert ": x-bottega-route: apprentice\n" in rest
    assert ENDS[path] in rest and "x-bottega-fallback" not in rest
    assert (record.state, record.status, record.route) == ("answered", 200, "apprentice")
    assert record.usage.prompt_tokens == 3


@pytest.mark.parametrize("path", APIS)
def test_silence_between_chunks_is_kept_alive(endpoint: Server, tmp_path: Path, path: str) -> None:
    gate = Gate()
    endpoint.answers = [gate.before(ok("unused"), lines(CHUNKS[0], done=False))]
    with (
        harness(tmp_path, apprentice=upstream(endpoint), keep_alive=0.03) as server,
        stream(server, path) as response,
    ):
        while b'"a"' not in response.readline():
            pass
        read_until(response, expected(path))
        gate.open()
        rest = response.read().decode()
        assert server.wait(1).state == "answered"
    assert ENDS[path] in rest


@pytest.mark.parametrize("path", APIS)
def test_later_fallback_is_named_in_a_comment(endpoint: Server, tmp_path: Path, path: str) -> None:
    gate = Gate()
    endpoint.answers = [gate.before(refuse(500)), events(lines(*CHUNKS))]
    tiers = {name: upstream(endpoint, retries=0) for name in ("apprentice", "master")}
    with harness(tmp_path, **tiers, keep_alive=0.03) as server:  # type: ignore[arg-type]
        with stream(server, path) as response:
            read_until(response, expected(path))
            gate.open()
            rest = response.read().decode()
        record = server.wait(1)
    assert ": x-bottega-route: master\n" in rest
    assert ": x-bottega-fallback: apprentice\n" in rest and ENDS[path] in rest
    assert (record.status, record.route, record.fallback) == (200, "master", "apprentice")


@pytest.mark.parametrize("path", APIS)
def test_error_after_a_keep_alive_is_an_event(endpoint: Server, tmp_path: Path, path: str) -> None:
    gate = Gate()
    endpoint.answers = [gate.before(refuse(500))]
    tiers = {name: upstream(endpoint, retries=0) for name in ("apprentice", "master")}
    with harness(tmp_path, **tiers, keep_alive=0.03) as server:  # type: ignore[arg-type]
        with stream(server, path) as response:
            read_until(response, expected(path))
            gate.open()
            rest = response.read().decode()
        record = server.wait(1)
    assert (response.status, ERRORS[path] in rest, ENDS[path] in rest) == (200, True, False)
    assert (record.state, record.status) == ("failed", 502)
    assert (record.reason, record.cost_usd) == ("upstream_failed", 0.0)


@pytest.mark.parametrize("path", APIS)
def test_error_before_the_first_keep_alive_has_its_status(
    endpoint: Server, tmp_path: Path, path: str
) -> None:
    endpoint.answers = [refuse(422, "temperature is invalid")]
    tiers = {name: upstream(endpoint, retries=0) for name in ("apprentice", "master")}
    with (
        harness(tmp_path, **tiers) as server,  # type: ignore[arg-type]
        stream(server, path) as response,
    ):
        assert response.status == 422
        assert response.headers["content-type"] == "application/json"
        assert "temperature is invalid" in orjson.loads(response.read())["error"]["message"]


async def test_first_keep_alive_names_the_tier_that_is_tried() -> None:
    sent, record = list[Any](), RequestRecord("req_1", route="apprentice")

    async def send(message: Any) -> None:
        sent.append(message)

    sender = exchange.ReplySender(send, record, COMMENT)
    await sender.keep_alive()
    assert not sent  # no stream was requested
    record.wants_stream = True
    for _ in range(2):
        await sender.keep_alive()
    start, *kept = sent
    assert start["status"] == 200 and (b"x-bottega-route", b"apprentice") in start["headers"]
    assert [one["body"] for one in kept] == [COMMENT] * 2


def test_stream_that_waits_for_a_slot_is_kept_alive(endpoint: Server, tmp_path: Path) -> None:
    gate = Gate()
    endpoint.answers = [gate.before(ok("unused"), lines(CHUNKS[0], done=False))]
    tier = upstream(endpoint, concurrency=1)
    with (
        harness(tmp_path, apprentice=tier, keep_alive=0.03, replays=False) as server,
        stream(server, "chat/completions") as first,
    ):
        while b'"a"' not in first.readline():
            pass
        with stream(server, "chat/completions") as second:
            assert read_until(second, COMMENT) == COMMENT
            assert len(endpoint.bodies) == 1
            gate.open()
            assert second.read().endswith(b"data: [DONE]\n\n")
        assert first.read().endswith(b"data: [DONE]\n\n")


def test_complete_replies_have_no_keep_alives(endpoint: Server, tmp_path: Path) -> None:
    gate = Gate()
    endpoint.answers = [gate.before(ok("fine"))]
    with harness(tmp_path, apprentice=upstream(endpoint), keep_alive=0.01) as server:
        timer = threading.Timer(0.2, gate.open)
        timer.start()
        with stream(server, "chat/completions", stream=False) as response:
            assert response.headers["content-type"] == "application/json"
            assert orjson.loads(response.read())["choices"][0]["message"]["content"] == "fine"
        timer.join()


async def test_client_that_leaves_after_a_keep_alive_cancels_the_call(
    endpoint: Server, tmp_path: Path
) -> None:
    gone, gate = threading.Event(), Gate()
    endpoint.answers = [signal_on_disconnect(gate.before(ok("late")), gone)]
    with harness(tmp_path, apprentice=upstream(endpoint), keep_alive=0.03) as server:
        with stream(server, "chat/completions") as response:
            read_until(response, COMMENT)
            while not endpoint.bodies:
                read_until(response, COMMENT)
        assert await asyncio.to_thread(gone.wait, 60)
        record = await asyncio.to_thread(server.wait, 1)
    assert (record.state, record.status, record.reason) == ("failed", 499, "client left")


@pytest.mark.parametrize("path", APIS)
async def test_shutdown_after_a_keep_alive_is_an_event(
    endpoint: Server, tmp_path: Path, path: str
) -> None:
    endpoint.answers = [Gate().before(ok("late"))]
    sent, kept = list[Any](), asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message)
        if message.get("body") == expected(path):
            kept.set()

    async def receive() -> Any:
        if sent or received:
            await asyncio.Event().wait()
        received.append(orjson.dumps({"model": "bottega", "stream": True, **APIS[path]}))
        return {"type": "http.request", "body": received[0]}

    received, scope = list[bytes](), {"type": "http", "method": "POST", "path": f"/v1/{path}"}
    with harness(tmp_path, apprentice=upstream(endpoint)) as server:
        gateway = server.gateway
        chat = ChatEndpoint(
            gateway.answer, server.records.append, gateway.limits, keep_alive_seconds=0.01
        )
        headers = [(b"host", b"localhost")]
        work = asyncio.create_task(App(gateway, chat)({**scope, "headers": headers}, receive, send))
        await asyncio.wait_for(kept.wait(), 60)
        work.cancel()
        await asyncio.wait_for(work, 60)
    assert [one.get("status") for one in sent if "status" in one] == [200]
    last = sent[-1]["body"]
    assert b"the gateway is shutting down" in last and not sent[-1].get("more_body")
    assert last.startswith(b"event: error\n" if path == "messages" else b'data: {"error":')
    assert (server.records[0].state, server.records[0].status) == ("failed", 503)


def test_clients_read_kept_streams(endpoint: Server, tmp_path: Path) -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        pieces: list[bytes | float] = [0.08]
        for one in CHUNKS:
            pieces += [lines(one, done=False), 0.08]
        return await events(*pieces)(request)

    endpoint.answers = [slow]
    with (
        harness(tmp_path, apprentice=upstream(endpoint), keep_alive=0.01, replays=False) as server,
        client(server.url) as real,
    ):
        chat = real.chat.completions.create(model="bottega", messages=user_messages(1), stream=True)
        assert "".join(one.choices[0].delta.content or "" for one in chat) == "ab"
        response = real.responses.create(model="bottega", input="hi", stream=True)
        kinds = [one.type for one in response]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        legacy = real.completions.create(model="bottega", prompt="hi", stream=True)
        assert "".join(one.choices[0].text for one in legacy if one.choices) == "ab"
        assert messages_text(server) == "ab"


def messages_text(server: Harness) -> str:
    import anthropic

    url, transport = server.url.removesuffix("/v1"), anthropic.DefaultHttpxClient(verify=False)
    with (
        anthropic.Anthropic(base_url=url, api_key="sk-test", http_client=transport) as real,
        real.messages.stream(model="bottega", max_tokens=9, messages=TURNS) as found,  # type: ignore[arg-type]
    ):
        return found.get_final_text()


@pytest.mark.parametrize("last", [b"", b"data: an error\n\n"])
async def test_nothing_follows_the_end(last: bytes) -> None:
    sent, entered, may_send = list[Any](), asyncio.Event(), asyncio.Event()

    async def send(message: Any) -> None:
        if message.get("body") == COMMENT:
            entered.set()
            await may_send.wait()
        sent.append(message)

    sender = exchange.ReplySender(send, RequestRecord("req_1", wants_stream=True), COMMENT)
    kept = asyncio.create_task(sender.keep_alive())
    await entered.wait()
    ends = [asyncio.create_task(sender.end(one)) for one in (last, b"data: too late\n\n")]
    await asyncio.sleep(0)
    may_send.set()
    await asyncio.gather(kept, *ends)
    await sender.keep_alive()
    assert [one["body"] for one in sent[1:]] == [COMMENT, last]
