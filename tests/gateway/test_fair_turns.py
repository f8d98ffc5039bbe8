"""One key's open streams, stalled uploads and large bodies beside the requests of another key."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger_schema import FILE
from bottega.gateway.request.exchange import BodyBudget
from bottega.gateway.running.build import build
from bottega.gateway.running.server import GatewayServer
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.gateway.half_requests import begin, reply, send_chunk
from tests.server import Server, ok, running

MB = 1 << 20
CHAT = "/v1/chat/completions"
FILE_PART = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n'
PURPOSE_PART = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
MULTIPART = "multipart/form-data; boundary=b"
BUDGET = "\n[limits]\nreceiving_mb = 4\n"


@dataclass
class Gateway:
    """Running gateway with the keys `greedy`, `other` and `admin`."""

    url: str
    keys: dict[str, str]
    server: GatewayServer

    @property
    def bodies(self) -> BodyBudget:
        return self.server.inner.bodies

    def begin(
        self, path: str, who: str, sent: bytes, length: int | None = None, method: str = "POST"
    ) -> socket.socket:
        """Send the beginning of a body of `length` bytes, by default all of it."""
        kind = MULTIPART if sent.startswith(b"--b") else "application/json"
        headers = {"authorization": f"Bearer {self.keys.get(who)}", "content-type": kind}
        return begin(self.url, method, path, headers, length, sent)

    def ask(self, who: str, text: str) -> None:
        ask(f"{self.url}/v1", text, key=self.keys[who], model="bottega/large")


@contextmanager
def gateway(folder: Path, endpoint: Server, more: str = "") -> Iterator[Gateway]:
    accounts = Accounts(folder / FILE)
    keys = {
        name: accounts.add(name, admin=name == "admin", tiers=("*",))[1]
        for name in ("greedy", "other", "admin")
    }
    accounts.close()
    server = build(gateway_config(folder, endpoint.url, more), ENVIRONMENT)
    with run_gateway(server) as url:
        yield Gateway(url.removesuffix("/v1"), keys, server)


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def question(text: str) -> bytes:
    turns = [{"role": "user", "content": text}]
    return json.dumps({"model": "bottega/large", "messages": turns, "stream": True}).encode()


def test_open_streams_of_one_key_leave_a_slot_for_another(endpoint: Server, tmp_path: Path) -> None:
    ended, streams = threading.Event(), list[str]()

    async def answer(request: web.Request) -> web.StreamResponse:
        if b"stream" in await request.read():
            streams.append(request.path)
            while not ended.is_set():  # noqa: ASYNC110 - set in another thread
                await asyncio.sleep(0.01)
        return await ok("fine")(request)

    endpoint.answers = [answer]
    with gateway(tmp_path, endpoint) as one, ExitStack() as open_streams:
        one.ask("other", "first")
        for number in range(40):
            sent = question(f"stream {number}")
            open_streams.enter_context(one.begin(CHAT, "greedy", sent, len(sent)))
        until(lambda: len(streams) == 15)
        for number in range(3):
            one.ask("other", f"lone {number}")
        assert len(streams) == 15
        ended.set()
    assert endpoint.most_at_once == 16


def test_stalled_uploads_of_one_key_do_not_stop_another(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint) as one, ExitStack() as stalled:
        for _ in range(8):
            stalled.enter_context(one.begin("/v1/files", "greedy", FILE_PART, 8 * MB))
        whole = FILE_PART + PURPOSE_PART
        status, body = reply(one.begin("/v1/files", "other", whole, len(whole)))
        assert status == 200 and json.loads(body)["bytes"] == 2


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Return a gateway with a budget of 4 MB that does not wait for bodies."""
    folder = tmp_path_factory.mktemp("quick")
    with running() as endpoint, gateway(folder, endpoint, BUDGET) as one:
        one.bodies.stalled_seconds = 0.1
        yield one


JSON_ENDPOINTS = (
    *(CHAT, "/v1/responses", "/v1/messages", "/v1/completions", "/v1/embeddings"),
    *("/v1/feedback", "/v1/batches", "/admin/keys", "/admin/keys/x/rotate", "/admin/import"),
)
ENDPOINTS = [
    *(("POST", path, b"{") for path in JSON_ENDPOINTS),
    ("PATCH", "/admin/keys/x", b"{"),
    ("POST", "/v1/files", FILE_PART),
]


@pytest.mark.parametrize("length", [1000, 10 * MB, None])
@pytest.mark.parametrize(("method", "path", "sent"), ENDPOINTS)
def test_a_stalled_body_gets_408(
    quick: Gateway, method: str, path: str, sent: bytes, length: int | None
) -> None:
    status, body = reply(quick.begin(path, "admin", sent, length, method))
    assert status == 408 and "did not arrive in time" in body and "without pauses" in body
    assert "body_timeout" in body or path == "/v1/messages"  # errors of Anthropic have no code


@pytest.mark.parametrize(("method", "path", "sent"), ENDPOINTS)
def test_no_body_is_read_without_a_key(quick: Gateway, method: str, path: str, sent: bytes) -> None:
    assert reply(quick.begin(path, "nobody", sent, 10 * MB, method))[0] == 401


def test_bodies_of_one_key_leave_a_quarter_for_another(endpoint: Server, tmp_path: Path) -> None:
    large = question("x" * 900_000)
    with gateway(tmp_path, endpoint, BUDGET) as one:
        one.ask("other", "x" * 100_000)  # a body that counts
        one.bodies.wait_seconds = 0.1
        with ExitStack() as stalled:
            for _ in range(3):
                stalled.enter_context(one.begin("/v1/files", "greedy", FILE_PART, MB))
            until(lambda: one.bodies.bytes.free == MB)
            status, body = reply(one.begin(CHAT, "greedy", large[:1000], len(large)))
            assert status == 503 and "receiving_busy" in body
            one.ask("greedy", "a small body never waits")
            assert reply(one.begin(CHAT, "other", large, len(large)))[0] == 200
        until(lambda: one.bodies.bytes.free == 4 * MB)


def test_a_body_above_the_budget_leaves_a_quarter(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint, BUDGET) as one:
        with one.begin("/v1/files", "greedy", FILE_PART, 100 * MB):
            until(lambda: one.bodies.bytes.free == MB)
        until(lambda: one.bodies.bytes.free == 4 * MB)


def test_chunked_bodies_count_as_they_arrive(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint, BUDGET) as one:
        part = FILE_PART + b"x" * (MB + MB // 2)
        with one.begin("/v1/files", "greedy", part, None):
            until(lambda: one.bodies.bytes.free == 2 * MB)
        until(lambda: one.bodies.bytes.free == 4 * MB)


def test_growing_bodies_never_wait_for_each_other(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint, BUDGET) as one, ExitStack() as opened:
        one.bodies.wait_seconds = 600.0
        begun = FILE_PART[:-4] + b"x" * (MB + MB // 2)
        first, second = (
            opened.enter_context(one.begin("/v1/files", who, begun, None))
            for who in ("greedy", "other")
        )
        until(lambda: one.bodies.bytes.free == 0)
        send_chunk(first, b"x" * MB)
        until(lambda: one.bodies.bytes.free == 2 * MB)  # the reply waits for the rest
        large = question("x" * 200_000)
        assert reply(one.begin(CHAT, "admin", large, len(large)))[0] == 200
        send_chunk(second, b"x" * MB)
        send_chunk(second, b"\r\n" + PURPOSE_PART)
        send_chunk(second, b"")
        assert reply(second)[0] == 200
        for _ in range(8):
            send_chunk(first, b"x" * MB)
        send_chunk(first, b"")
        status, body = reply(first)
        assert status == 503 and "receiving_busy" in body
        until(lambda: one.bodies.bytes.free == 4 * MB)


@pytest.mark.parametrize("path", ["/v1/files", CHAT])
@pytest.mark.parametrize("is_chunked", [True, False])
def test_clients_read_why_their_body_is_refused(
    endpoint: Server, tmp_path: Path, path: str, is_chunked: bool
) -> None:
    part = FILE_PART[:-4] if path == "/v1/files" else b'{"model": "'
    with gateway(tmp_path, endpoint, BUDGET) as one, ExitStack() as stalled:
        for who in ("greedy", "other"):
            begun = FILE_PART + b"x" * (MB + MB // 2)
            stalled.enter_context(one.begin("/v1/files", who, begun, None))
        until(lambda: one.bodies.bytes.free == 0)
        one.bodies.wait_seconds = 0.1
        whole = part + b"x" * (8 * MB)
        status, body = reply(one.begin(path, "admin", whole, None if is_chunked else len(whole)))
        assert status == 503 and "receiving_busy" in body
