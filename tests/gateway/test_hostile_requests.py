"""Requests from hostile clients that must be rejected."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.asgi import App
from bottega.gateway.request.exchange import ChatEndpoint
from bottega.gateway.request.jobs import context_of
from bottega.gateway.request.reading import Limits
from bottega.generation import ScriptedGenerator
from bottega.openai_api.request import Body, parse_request
from bottega.openai_api.response import ChatCompletion, parse_completions
from bottega.openai_api.streams import to_chunks
from tests.builders import solid_image
from tests.gateway.harness import QUESTION, Harness, harness, running

ACCOUNTS = {
    "sk-a": Account("a", "team a", namespace="team-a"),
    "sk-none": Account("d", "no namespace"),
    "sk-admin": Account("e", "operator", admin=True),
    "sk-view": Account("f", "viewer", viewer=True),
}


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Harness]:
    with harness(
        tmp_path,
        master=ScriptedGenerator(lambda prompt: "seven", name="big"),
        authenticate=lambda token: ACCOUNTS.get(token or ""),
    ) as server:
        yield server


@pytest.fixture
def open_to_all(tmp_path: Path) -> Iterator[Harness]:
    with harness(tmp_path) as server:
        yield server


def body(model: str = "bottega/master", shade: int = 7, **more: Any) -> dict[str, Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": solid_image(shade).data_url}},
        {"type": "text", "text": QUESTION},
    ]
    return {"model": model, "messages": [{"role": "user", "content": parts}], **more}


async def ask(
    harness: Harness, sent: dict[str, Any], key: str = "", **headers: str
) -> tuple[int, Any, dict[str, str]]:
    named = {"Authorization": f"Bearer {key}", **headers}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{harness.url}/chat/completions", json=sent, headers=named) as response,
    ):
        return response.status, await response.text(), dict(response.headers)


@pytest.mark.parametrize("by_header", [False, True])
async def test_cached_reply_of_an_admin_is_not_replayed_to_others(
    shared: Harness, by_header: bool
) -> None:
    """A second key without access to the namespace sends the same bytes."""
    name = "bottega/master" if by_header else "bottega/master:namespace=team-a"
    headers = {"x-bottega-namespace": "team-a"} if by_header else {}
    assert (await ask(shared, body(name), "sk-admin", **headers))[0] == 200
    status, _, received = await ask(shared, body(name), "sk-none", **headers)
    assert (status, received.get("x-bottega-cache")) == (403, None)


async def test_repeat_is_booked_in_its_namespace(shared: Harness) -> None:
    for _ in range(3):
        await ask(shared, body("bottega/master:namespace=team-a"), "sk-admin")
    shared.wait(3)
    assert [one.namespace for one in shared.records] == ["team-a"] * 3
    assert [one.state for one in shared.records] == ["answered", "replayed", "replayed"]


async def test_model_name_length_is_limited(shared: Harness) -> None:
    """The parsed request is cached for the next one."""
    for suffix in ("," * 100_000, "no-store," * 10_000, "namespace=" + "a" * 100_000):
        status, payload, _ = await ask(shared, body(f"bottega:{suffix}"), "sk-a")
        assert (status, json.loads(payload)["error"]["code"]) == (404, "model_not_found")
        assert len(payload) < 2000


async def test_duplicate_keys_are_rejected(shared: Harness) -> None:
    """A proxy may have validated the other copy."""
    sent = orjson.dumps(body())
    for path in ("chat/completions", "responses"):
        async with aiohttp.ClientSession() as session:
            pair = [("Authorization", "Bearer sk-x"), ("Authorization", "Bearer sk-a")]
            async with session.post(f"{shared.url}/{path}", data=sent, headers=pair) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (
                    400,
                    "duplicate_header",
                )


class NamedUpstream:
    """Tier whose upstream reports an arbitrary model name."""

    def __init__(self, name: str) -> None:
        self.model, self._reported_model = "plain", name

    async def complete(self, body: Body, /) -> ChatCompletion:
        message = {"role": "assistant", "content": "seven"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = {"id": "1", "object": "chat.completion", "created": 1, "choices": [choice]}
        return ChatCompletion(
            orjson.dumps(reply | {"model": self._reported_model}),
            self._reported_model,
            parse_completions(reply, "here"),
            None,
        )

    async def stream(self, body: Body, /) -> Any:
        for event in to_chunks((await self.complete(body)).payload, include_usage=False):
            yield event

    async def check(self) -> None: ...

    async def aclose(self) -> None: ...


@pytest.mark.parametrize("name", ["a\r\nSet-Cookie: x=1", "a\0b", "模型", "m" * 100_000])
async def test_any_model_name_is_fit_for_a_header(tmp_path: Path, name: str) -> None:
    with harness(tmp_path, master=NamedUpstream(name)) as server:
        for _ in range(2):  # and again when it is replayed
            status, payload, headers = await ask(server, body())
            assert (status, "Set-Cookie" in headers) == (200, False)
            assert json.loads(payload)["choices"][0]["message"]["content"] == "seven"
            assert len(headers["x-bottega-model"]) <= 200


async def test_leaving_during_the_body_is_no_failure(
    open_to_all: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    port = int(open_to_all.url.split(":")[2].removesuffix("/v1"))
    with caplog.at_level(logging.WARNING):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
            client.sendall(b"Content-Length: 100\r\n\r\n{")
            await asyncio.sleep(0.1)
        ended = await asyncio.to_thread(open_to_all.wait, 1)
        await asyncio.sleep(0.1)
    assert (ended.status, ended.reason) == (499, "client left")
    assert caplog.records == []


async def test_pixels_of_an_image_are_limited(tmp_path: Path) -> None:
    with harness(tmp_path, limits=Limits(image_pixels=63)) as server:
        status, payload, _ = await ask(server, body())
    assert (status, json.loads(payload)["error"]["code"]) == (400, "invalid_image")


async def test_pixels_of_all_images_are_limited(tmp_path: Path) -> None:
    """16 images of 40 million pixels fit into 100 KB and took 16 seconds."""
    limits = Limits(image_pixels=64, request_pixels=5 * 64)
    with harness(tmp_path, limits=limits) as server:
        sent = body()
        parts = sent["messages"][0]["content"]
        parts[:0] = [body(shade=shade)["messages"][0]["content"][0] for shade in range(20, 24)]
        assert (await ask(server, sent))[0] == 200
        parts[:0] = body(shade=24)["messages"][0]["content"][:1]
        status, payload, _ = await ask(server, sent)
    assert (status, json.loads(payload)["error"]["code"]) == (400, "limit_exceeded")


class EndlessUpstream(NamedUpstream):
    async def stream(self, body: Body, /) -> Any:
        while True:
            delta = {"index": 0, "delta": {"content": "word "}, "finish_reason": None}
            yield orjson.dumps({"id": "1", "object": "chat.completion.chunk", "choices": [delta]})
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
async def test_leaving_during_an_answer_is_billed(tmp_path: Path, path: str) -> None:
    """Otherwise clients that always disconnect early exceed their budget."""
    sent = {**body(stream=True), "input": QUESTION}
    del sent["messages" if path == "responses" else "input"]
    with harness(tmp_path, master=EndlessUpstream("plain")) as server:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{server.url}/{path}", json=sent) as response,
        ):
            async for _ in response.content.iter_any():
                if server.records or b"word" in _:
                    break
            response.close()
        ended = await asyncio.to_thread(server.wait, 1)
    assert (ended.status, ended.usage.completion_tokens > 0) == (499, True)
    assert ended.usage.prompt_tokens >= 5
    assert ended.cost_usd is not None and ended.cost_usd > 0


def metrics() -> tuple[bytes, str]:
    return b"requests 1", "text/plain"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),  # possibly through a proxy that adds no header
        ({"X-Forwarded-For": "203.0.113.9"}, 401),
        ({"X-Forwarded-For": "127.0.0.1"}, 401),
        ({"X-Forwarded-For": "203.0.113.9", "Authorization": "Bearer sk-a"}, 403),
        ({"X-Forwarded-For": "203.0.113.9", "Authorization": "Bearer sk-admin"}, 200),
        ({"Authorization": "Bearer sk-view"}, 200),
    ],
)
async def test_metrics_need_the_key_of_an_admin_or_viewer(
    shared: Harness, headers: dict[str, str], status: int
) -> None:
    """Metrics contain tenants and their spending."""
    gateway = shared.gateway
    chat_endpoint = ChatEndpoint(gateway.answer, shared.records.append, Limits(body_mb=1))
    app = App(gateway, chat_endpoint, metrics=metrics)
    with running(app) as url:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{url.removesuffix('/v1')}/metrics", headers=headers) as response,
        ):
            assert response.status == status
            assert (b"requests" in await response.read()) == (status == 200)


STEERED: list[dict[str, Any]] = [
    {"stop": ["e"]},
    {"logit_bias": {"42": 100}},
    {"temperature": 1.9},
    {"guided_choice": ["wrong"]},
    {"structured_outputs": {"choice": ["wrong"]}},
    {"chat_template": "say wrong"},
]
CONSTRAINTS = {"guided_choice", "structured_outputs"}


@pytest.mark.parametrize("steer", STEERED, ids=lambda steer: next(iter(steer)))
async def test_steered_answer_is_no_example_for_others(
    shared: Harness, steer: dict[str, Any]
) -> None:
    """Otherwise any client can dictate the answers stored for the master."""
    shared.gateway.more_fields = frozenset(steer)
    await ask(shared, body(**steer), "sk-a")
    plain = await ask(shared, body("bottega/apprentice", shade=8), "sk-a")
    assert plain[2]["x-bottega-demonstrations"] == "0"
    same = await ask(shared, body("bottega/apprentice", shade=8, **steer), "sk-a")
    if steer.keys() & CONSTRAINTS:  # the apprentice runs in this process and rejects them
        assert same[0] == 400
    else:
        assert same[2]["x-bottega-demonstrations"] == "1"


async def test_tuning_fields_do_not_change_the_context(shared: Harness) -> None:
    tuned: dict[str, Any] = {
        "temperature": 0.7,
        "max_tokens": 50,
        "seed": 3,
        "user": "x",
        "top_p": 0.9,
        "stop": [],
    }
    await ask(shared, body(**tuned), "sk-a")
    plain = await ask(shared, body("bottega/apprentice", shade=8), "sk-a")
    assert plain[2]["x-bottega-demonstrations"] == "1"


def test_image_in_the_instructions_changes_the_context() -> None:
    contexts = set()
    for shade in (1, 1, 2):
        received = body()
        shown = body(shade=shade)["messages"][0]["content"][:1]
        received["messages"].insert(0, {"role": "system", "content": shown})
        contexts.add(context_of(parse_request(received)))
    assert len(contexts) == 2


@pytest.mark.parametrize("kind", ["video_url", "audio_url", "file_url"])
async def test_other_urls_are_rejected(open_to_all: Harness, kind: str) -> None:
    part = {"type": kind, kind: {"url": "http://169.254.169.254/latest/meta-data"}}
    sent = body()
    sent["messages"][0]["content"].append(part)
    status, payload, _ = await ask(open_to_all, sent)
    assert (status, json.loads(payload)["error"]["code"]) == (400, "url_not_fetched")
    assert json.loads(payload)["error"]["param"].endswith(f".{kind}")


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "https://127.0.0.1.evil.example",
        "null",
        "http://localhost:80@evil.example",
        "http://evil.example/localhost",
    ],
)
async def test_web_pages_are_rejected_without_keys(open_to_all: Harness, origin: str) -> None:
    """A browser sends text/plain forms to loopback without a preflight request."""
    status, payload, _ = await ask(open_to_all, body(), Origin=origin)
    assert (status, json.loads(payload)["error"]["code"]) == (403, "origin_forbidden")


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "http://[::1]:80",
        "app://here",
        "http://localhost.",
        "HTTP://127.0.0.1",
    ],
)
async def test_local_clients_are_accepted(open_to_all: Harness, origin: str) -> None:
    assert (await ask(open_to_all, body(), Origin=origin))[0] == 200


async def test_pages_of_allowed_hosts_are_accepted(open_to_all: Harness) -> None:
    open_to_all.gateway.allowed_hosts = ("Gate.local",)
    assert (await ask(open_to_all, body(), Origin="http://gate.local:8000"))[0] == 200
    assert (await ask(open_to_all, body(), Origin="http://other.local:8000"))[0] == 403


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("192.168.0.7", 403),
        ("", 403),
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("gate.local:80", 200),
        ("localhost.:8000", 200),
        ("[0:0:0:0:0:0:0:1]:8000", 200),
        ("[2001:db8::1]:8000", 403),
        ("localhost:", 200),
        ("[::ffff:127.0.0.1]:8000", 200),
        ("[::ffff:192.168.0.7]", 403),
        ("mybox.lan:8000", 200),
        ("[FE80::1]:8000", 200),
        ("[fe80::2]:8000", 403),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/readyz"])
async def test_a_gateway_without_keys_answers_to_local_names(
    open_to_all: Harness, host: str, status: int, path: str
) -> None:
    """DNS rebinding: to a browser a page of evil.example that resolves to 127.0.0.1 and the
    gateway are of one origin."""
    gateway = open_to_all.gateway
    gateway.allowed_hosts = ("Gate.local", "mybox.lan.", "fe80::1")
    app = App(
        gateway,
        ChatEndpoint(gateway.answer, open_to_all.records.append, Limits(body_mb=1)),
        metrics=metrics,
    )
    with running(app) as url:
        async with (
            aiohttp.ClientSession() as session,
            session.get(url.removesuffix("/v1") + path, headers={"Host": host}) as response,
        ):
            assert response.status == status
            if status == 403:
                assert (await response.json())["error"]["code"] == "host_forbidden"


async def test_probes_and_the_metrics_port_accept_every_host_name(open_to_all: Harness) -> None:
    gateway = open_to_all.gateway
    app = App(
        gateway,
        ChatEndpoint(gateway.answer, open_to_all.records.append, Limits(body_mb=1)),
        metrics=metrics,
    )
    with running(app) as url:
        base = url.removesuffix("/v1")
        async with aiohttp.ClientSession(headers={"Host": "10.0.0.7"}) as session:
            async with session.get(base + "/healthz") as response:
                assert response.status == 200
            async with session.get(base + "/metrics") as response:
                assert response.status == 403
            app.metrics_port = int(base.rpartition(":")[2])
            async with session.get(base + "/metrics") as response:
                assert response.status == 200


async def test_a_rebound_host_name_is_rejected(open_to_all: Harness) -> None:
    status, payload, _ = await ask(open_to_all, body(), Host="evil.example:8000")
    assert (status, json.loads(payload)["error"]["code"]) == (403, "host_forbidden")
    assert open_to_all.records == []


async def test_with_keys_a_gateway_has_any_name(shared: Harness) -> None:
    assert (await ask(shared, body(), "sk-a", Host="gateway.example"))[0] == 200


@pytest.mark.parametrize(
    ("path", "status"), [("/metrics", 200), ("/healthz", 200), ("/v1/models", 404), ("/admin", 404)]
)
async def test_the_port_of_the_metrics_serves_nothing_else(
    shared: Harness, path: str, status: int
) -> None:
    gateway = shared.gateway
    app = App(
        gateway,
        ChatEndpoint(gateway.answer, shared.records.append, Limits(body_mb=1)),
        metrics=metrics,
    )
    with running(app) as url:
        root = url.removesuffix("/v1")
        app.metrics_port = int(root.rpartition(":")[2])
        async with aiohttp.ClientSession() as session, session.get(root + path) as response:
            assert response.status == status


async def test_a_key_may_come_from_any_page(shared: Harness) -> None:
    assert (await ask(shared, body(), "sk-a", Origin="http://evil.example"))[0] == 200
