"""Web pages of other origins that call the API from a browser (CORS)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.typedefs import LooseHeaders

from bottega.cli.console import Console
from bottega.gateway.config.gateway_settings import Config
from bottega.gateway.running.build import build
from bottega.gateway.running.server import GatewayServer
from tests import server as doubles
from tests.gateway.gateways import ENVIRONMENT, gateway_config, run_gateway
from tests.gateway.upstreams import CHUNKS, events, lines

PAGE, OTHER = "https://app.example", "https://evil.example"
CHAT = "/v1/chat/completions"
BODY = {"model": "bottega", "messages": [{"role": "user", "content": "hi"}]}
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-bottega-shots,x-stainless-os",
}


@pytest.fixture
def upstream() -> Iterator[doubles.Server]:
    with doubles.running() as endpoint:
        yield endpoint


@pytest.fixture
def config(upstream: doubles.Server, tmp_path: Path) -> Config:
    config = gateway_config(tmp_path, upstream.url, "[replay]\nseconds = 0")
    origins = (PAGE, "http://localhost:3000")
    return dataclasses.replace(
        config, gateway=dataclasses.replace(config.gateway, allowed_origins=origins)
    )


@pytest.fixture
def server(config: Config) -> GatewayServer:
    return build(config, ENVIRONMENT, more_routes=Console.of(config).routes)


@pytest.fixture
def gateway(server: GatewayServer) -> Iterator[str]:
    with run_gateway(server) as url:
        yield url.removesuffix("/v1")


async def send(
    url: str, method: str = "POST", body: object = None, **headers: str
) -> tuple[int, Mapping[str, str], bytes]:
    data = None if body is None else json.dumps(body)
    named: LooseHeaders = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, data=data, headers=named, allow_redirects=False) as reply,
    ):
        return reply.status, reply.headers, await reply.read()


@pytest.mark.parametrize("origin", [PAGE, "http://localhost:3000"])
@pytest.mark.parametrize(
    "path",
    [
        CHAT,
        "/chat/completions",
        "/v1/responses",
        "/v1/responses/resp_1",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/completions",
        "/embeddings",
        "/v1/models",
        "/v1/files",
        "/v1/files/file-1/content",
        "/v1/batches",
        "/v1/feedback",
    ],
)
async def test_preflight_allows_listed_pages(gateway: str, path: str, origin: str) -> None:
    status, headers, _ = await send(gateway + path, "OPTIONS", **PREFLIGHT | {"Origin": origin})
    assert (status, headers["access-control-allow-origin"]) == (200, origin)
    assert "origin" in headers["vary"].lower()
    assert {"GET", "POST", "DELETE"} <= set(headers["access-control-allow-methods"].split(", "))
    assert headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert "access-control-allow-credentials" not in headers
    assert "access-control-expose-headers" not in headers


@pytest.mark.parametrize("path", [CHAT, "/chat/completions", "/v1/models", "/v1/messages"])
async def test_the_preflight_of_another_page_names_the_setting(gateway: str, path: str) -> None:
    _, _, body = await send(gateway + path, "OPTIONS", **PREFLIGHT | {"Origin": OTHER})
    assert b"gateway.allowed_origins" in body
    _, _, body = await send(gateway + "/v1/v1/messages", body=BODY)
    assert b"leave /v1 out of the base URL" in body


@pytest.mark.parametrize(
    ("path", "origin"),
    [
        *((CHAT, origin) for origin in (OTHER, "null", "https://app.example.evil", f"{PAGE}:8443")),
        *((path, PAGE) for path in ("/ui", "/ui/login", "/ui/keys", "/admin/keys", "/metrics")),
        *((path, PAGE) for path in ("/healthz", "/readyz", "/", "/v1", "/v1x/models")),
    ],
)
async def test_other_pages_and_paths_get_no_permission(
    gateway: str, path: str, origin: str
) -> None:
    for method in ("OPTIONS", "GET", "POST"):
        _, headers, _ = await send(gateway + path, method, **PREFLIGHT | {"Origin": origin})
        assert not [name for name in headers if name.lower().startswith("access-control")], method


async def test_without_listed_pages_nothing_is_allowed(server: GatewayServer, gateway: str) -> None:
    server.gateway.allowed_origins = ()
    status, headers, _ = await send(gateway + CHAT, "OPTIONS", **PREFLIGHT)
    assert status == 404 or status == 405
    assert "access-control-allow-origin" not in headers
    assert (await send(gateway + CHAT, body=BODY, Origin=PAGE))[0] == 403


def check_readable(headers: Mapping[str, str]) -> None:
    """Check that the page may read the reply and all of its headers."""
    assert headers["access-control-allow-origin"] == PAGE
    assert "access-control-allow-credentials" not in headers
    assert headers["access-control-expose-headers"] == "*"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, BODY),
        ("/v1/responses", {"model": "bottega", "input": "hi"}),
        ("/v1/messages", {**BODY, "max_tokens": 5}),
        ("/completions", {"model": "bottega", "prompt": "hi"}),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_listed_page_reads_replies_and_streams(
    gateway: str, upstream: doubles.Server, path: str, body: dict[str, Any], streamed: bool
) -> None:
    upstream.answers = [events(lines(*CHUNKS))] if streamed else [doubles.ok("fine")]
    status, headers, payload = await send(
        gateway + path, body={**body, "stream": streamed}, Origin=PAGE
    )
    assert status == 200, payload
    assert headers["x-bottega-route"] == "large"
    check_readable(headers)


async def test_a_listed_page_reads_errors(server: GatewayServer, gateway: str) -> None:
    """Without the header the page learns only that some error occurred."""
    status, headers, _ = await send(gateway + CHAT, body={**BODY, "model": "x"}, Origin=PAGE)
    assert status == 404
    check_readable(headers)
    assert "x-request-id" in headers
    server.gateway.authenticate = server.accounts.authenticate
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/nothing")):
        status, headers, _ = await send(gateway + path, method, Origin=PAGE)
        assert status in (401, 404)
        assert headers["access-control-allow-origin"] == PAGE
    server.app.limit = 0
    status, headers, _ = await send(gateway + CHAT, body=BODY, Origin=PAGE)
    assert status == 503 and "retry-after" in headers
    check_readable(headers)


async def test_listed_pages_do_not_widen_the_hosts(gateway: str) -> None:
    """A page of a listed name that resolves to loopback is still DNS rebinding."""
    status, headers, payload = await send(
        gateway + CHAT, body=BODY, Origin=PAGE, Host="app.example"
    )
    assert (status, json.loads(payload)["error"]["code"]) == (403, "host_forbidden")
    assert headers["access-control-allow-origin"] == PAGE


async def test_clients_without_a_page_see_no_difference(gateway: str) -> None:
    status, headers, _ = await send(gateway + CHAT, body=BODY)
    assert status == 200
    assert not [name for name in headers if name.lower().startswith(("access-control", "vary"))]
