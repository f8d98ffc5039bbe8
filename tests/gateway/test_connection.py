"""Malicious clients on raw sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.running.connection import ClientConnection
from bottega.generation import ScriptedGenerator
from bottega.types import Prompt, Reply, Sampling
from tests.gateway.harness import Harness, harness

BODY = json.dumps(
    {"model": "bottega", "messages": [{"role": "user", "content": "What is 3 + 4?"}]}
).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
KEY = b"Authorization: Bearer sk-a\r\n"
PLAIN = b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Harness]:
    accounts = {"sk-a": Account("a", "team a", namespace="team-a")}
    with harness(tmp_path, authenticate=lambda token: accounts.get(token or "")) as server:
        yield server


def connected(harness: Harness, receives: int | None = None) -> socket.socket:
    server = socket.socket()
    if receives:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
    server.settimeout(10)
    server.connect(("127.0.0.1", int(harness.url.split(":")[2].removesuffix("/v1"))))
    return server


def reply(client: socket.socket) -> bytes:
    """Read until the peer closes; empty if it sent nothing."""
    received = b""
    try:
        while piece := client.recv(1 << 16):
            received += piece
    except ConnectionError:
        pass
    client.close()
    return received


def ask(harness: Harness, sent: bytes) -> bytes:
    client = connected(harness)
    client.sendall(sent)
    return reply(client)


def status(received: bytes) -> int:
    return int(received.split(b" ", 2)[1]) if received else 0


def test_endless_header_does_not_block_other_requests(kept: Harness) -> None:
    """Each 64 MB blocked all requests for ten seconds."""
    client = connected(kept)

    def flood() -> None:
        with suppress(OSError):
            client.sendall(HEAD + b"X-Endless: " + b"a" * (64 << 20))

    flooding = threading.Thread(target=flood)
    flooding.start()
    begun = time.monotonic()
    assert status(ask(kept, b"GET /healthz HTTP/1.0\r\n\r\n")) == 200
    flooding.join(10)
    assert not flooding.is_alive() and time.monotonic() - begun < 5
    assert status(reply(client)) in (431, 0)


@pytest.mark.parametrize(
    "more",
    [b"".join(b"X-%d: a\r\n" % i for i in range(101)), b"X-A: %b\r\n" % (b"a" * 33_000)],
)
def test_too_many_or_too_large_headers_are_rejected(kept: Harness, more: bytes) -> None:
    assert status(ask(kept, HEAD + KEY + more + PLAIN)) == 431


def test_trailers_are_not_headers(kept: Harness) -> None:
    """A proxy checks headers but not trailers."""
    chunked = b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n%x\r\n%b\r\n0\r\n%b\r\n"
    trailing_key = chunked % (len(BODY), BODY, KEY)
    assert status(ask(kept, HEAD + trailing_key)) == 401
    key_before = chunked % (len(BODY), BODY, b"X-Bottega-Shots: wrong\r\n")
    assert status(ask(kept, HEAD + KEY + key_before)) == 200


def test_endless_trailers_are_cut(kept: Harness) -> None:
    client = connected(kept)
    client.sendall(HEAD + KEY + b"Transfer-Encoding: chunked\r\n\r\n")
    client.sendall(b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY))
    with pytest.raises(OSError):
        for _ in range(64):
            client.sendall(b"X-T: " + b"a" * (1 << 20) + b"\r\n")
    client.close()


@pytest.mark.parametrize(
    "half", [b"", b"POST /v1/chat", HEAD + KEY, HEAD + KEY + b"Content-Length: 100\r\n\r\n{"]
)
def test_slow_requests_time_out(
    kept: Harness, half: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClientConnection, "header_seconds", 0.2)
    monkeypatch.setattr(ClientConnection, "message_seconds", 0.2)
    monkeypatch.setattr(ClientConnection, "check_seconds", 0.05)
    begun = time.monotonic()
    assert ask(kept, half) == b""
    assert time.monotonic() - begun < 5


class SlowGenerator(ScriptedGenerator):
    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        await asyncio.sleep(0.5)
        return await super().generate(prompt, sampling)


def test_replies_can_take_longer_than_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClientConnection, "header_seconds", 0.1)
    monkeypatch.setattr(ClientConnection, "message_seconds", 0.1)
    monkeypatch.setattr(ClientConnection, "check_seconds", 0.05)
    with harness(tmp_path, apprentice=SlowGenerator(lambda prompt: "seven")) as server:
        received = ask(server, HEAD + b"Connection: close\r\n" + PLAIN)
    assert status(received) == 200 and b"seven" in received


def test_client_that_stops_reading_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it blocks the slots of a tier and all requests waiting for the same answer."""
    monkeypatch.setattr(ClientConnection, "write_seconds", 0.2)
    monkeypatch.setattr(ClientConnection, "check_seconds", 0.05)
    long = ScriptedGenerator(lambda prompt: "seven " * 2_000_000)
    streamed = BODY[:-1] + b', "stream": true}'
    with harness(tmp_path, apprentice=long) as server:
        client = connected(server, receives=4096)
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(streamed), streamed))
        assert server.wait(1).reason == "client left"
        assert server.gateway.response_cache and not len(server.gateway.response_cache.flights)
        client.close()
