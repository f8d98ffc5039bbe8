"""Exact error messages for clients and operators."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image as Pillow

from bottega.errors import SettingError
from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.config.config_file import parse_config
from bottega.gateway.ports import TierCapabilities
from bottega.gateway.request.upstreams import HttpUpstream
from tests.builders import solid_image
from tests.gateway.harness import Harness, harness
from tests.server import Server, refuse

MESSAGES = [{"role": "user", "content": "What is it?"}]
ONE_TOOL = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def chat(model: str = "bottega", messages: object = MESSAGES, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": messages, **more}


def image_messages(url: str) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": "Which?"}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]


def png_of_size(width: int, height: int) -> str:
    """Return a PNG of a few bytes whose header declares many pixels."""
    file = io.BytesIO()
    Pillow.new("1", (1, 1)).save(file, "PNG")
    data = bytearray(file.getvalue())
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return "data:image/png;base64," + base64.b64encode(data).decode()


async def error_of(
    server: Harness, body: Mapping[str, Any], path: str = "chat/completions", **headers: str
) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/{path}", json=body, headers=headers) as response,
    ):
        message = await response.json()
    assert "error" in message, message
    return dict(message["error"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            chat("bottega/apprentice", tools=ONE_TOOL),
            "the tier 'apprentice' does not support this request: it supports no tools"
            " (use the model 'bottega', or remove the tools)",
        ),
        (
            chat("bottega/apprentice", [{"role": "user", "content": "why " * 4000}]),
            "the tier 'apprentice' does not support this request: it supports at most 1,200"
            " tokens, got about 4,571 for the prompt and max_tokens (use the model 'bottega', or"
            " send a shorter text or a lower max_tokens)",
        ),
        (
            chat("bottega/apprentice", image_messages(solid_image(1).data_url)),
            "the tier 'apprentice' does not support this request: it supports no images"
            " (use the model 'bottega', or remove the images)",
        ),
        (
            chat("bottega", [{"role": "user", "content": "why " * 40_000}]),
            "no tier supports this request: they support at most 2,000 tokens, got about"
            " 45,714 for the prompt and max_tokens (send a shorter text or a lower max_tokens)",
        ),
        (chat("bottega:shots=65"), "shots is invalid, got '65' (use a whole number from 0 to 64)"),
        (
            chat("bottega:shots=many"),
            "shots is invalid, got 'many' (use a whole number from 0 to 64)",
        ),
        (
            chat("bottega:master-rate=7"),
            "master-rate is invalid, got '7' (use a number from 0 to 1)",
        ),
        (chat("bottega:route=boss"), "route is invalid, got 'boss' (use apprentice or master)"),
        (chat("bottega:namespace="), "namespace is invalid, got '' (use a name)"),
        (
            chat("bottega:no-store=1"),
            "no-store is invalid, got '1' (write no-store without a value)",
        ),
        (
            chat("bottega:storing"),
            "'storing' is not an override (use shots, master-rate, namespace, route, no-store,"
            " no-retrieve or no-replay: bottega:shots=2,no-store)",
        ),
        (
            chat(max_tokens=0),
            "Invalid value for 'max_tokens': expected an integer of 1 or more, but got 0."
            " (see the chat-completions reference for the fields of a request)",
        ),
        (
            chat(temperature=-0.5),
            "Invalid value for 'temperature': expected a number from 0 to 1e9, but got -0.5."
            " (see the chat-completions reference for the fields of a request)",
        ),
        (
            chat(n="two"),
            "Invalid type for 'n': expected an integer from 1 to 128, but got a string."
            " (see the chat-completions reference for the fields of a request)",
        ),
        (
            chat(messages=image_messages(png_of_size(30_000, 30_000))),
            "The image has more than 50,000,000 pixels. (reduce the image first)",
        ),
        (
            chat(messages=image_messages(png_of_size(7100, 7100))),
            "The image has 7100 x 7100 pixels, more than 50,000,000. (reduce the image first)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_client_errors(tmp_path: Path, body: dict[str, Any], message: str) -> None:
    capabilities = {
        "apprentice": TierCapabilities(images=0, tools=False, context=1200),
        "master": TierCapabilities(context=2000),
    }
    with harness(tmp_path, capabilities=capabilities) as server:
        assert (await error_of(server, body))["message"] == message


@pytest.mark.parametrize(
    "url", [png_of_size(30_000, 30_000), "data:image/png;base64,AAAA", png_of_size(7100, 7100)]
)
async def test_invalid_image_is_named(tmp_path: Path, url: str) -> None:
    with harness(tmp_path) as server:
        error = await error_of(server, chat(messages=image_messages(url)))
        assert (error["code"], error["param"]) == (
            "invalid_image",
            "messages[1].content[1].image_url.url",
        )
        parts = [
            {"type": "input_text", "text": "Which?"},
            {"type": "input_image", "image_url": url},
        ]
        request = {"model": "bottega", "input": [{"role": "user", "content": parts}]}
        error = await error_of(server, request, "responses")
        assert (error["code"], error["param"]) == ("invalid_image", "input[0].content[1].image_url")


async def test_unfetched_image_is_named(tmp_path: Path) -> None:
    with harness(tmp_path) as server:
        error = await error_of(server, chat(messages=image_messages("http://127.0.0.1/a.png")))
    assert (error["code"], error["param"]) == (
        "image_url_not_fetched",
        "messages[1].content[1].image_url.url",
    )


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "the request has no API key (send Authorization: Bearer KEY;"),
        ({"Authorization": "Basic c2st"}, "the request has no API key"),
        ({"Authorization": "Bearer "}, "the request has no API key"),
        ({"Authorization": "Bearer sk-b"}, "the API key is unknown (ask the operator"),
    ],
)
async def test_missing_key_differs_from_an_unknown_key(
    tmp_path: Path, headers: dict[str, str], message: str
) -> None:
    account = Account("a", "a")
    with harness(tmp_path, authenticate=lambda key: account if key == "sk-a" else None) as server:
        error = await error_of(server, chat(), **headers)
    assert error["message"].startswith(message)
    assert error["code"] == "invalid_api_key"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [401, 404])
async def test_misconfigured_tier_is_named(
    endpoint: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int, stream: bool
) -> None:
    endpoint.answers = [refuse(status, "who are you?")]
    with harness(tmp_path, master=HttpUpstream("huge", base_url=endpoint.url)) as server:
        error = await error_of(server, chat("bottega/master", stream=stream))
    assert error["message"].startswith("the tier 'master' of this gateway is misconfigured")
    assert error["code"] == "upstream_misconfigured"
    assert "who are you?" not in error["message"]
    assert "tiers.master: " in caplog.text


BOTH = '[tiers.a]\nmodel = "bundled"\n[tiers.b]\nmodel = "bundled:master"\n[route]\n'


@pytest.mark.parametrize(
    ("route", "message", "hint"),
    [
        ('router = "budget"', "f: route router 'budget' needs usd_per_1k", "usd_per_1k = 1.0"),
        (
            'router = "coverage"',
            "f: route router 'coverage' needs either min_similarity or master_rate",
            "min_similarity = 0.8",
        ),
        (
            'router = "coverage"\nmin_similarity = 0.8\nmaster_rate = 0.1',
            "f: route router 'coverage' needs either min_similarity or master_rate, not both",
            "remove one of them",
        ),
        (
            'router = "confidence"',
            "f: route router 'confidence' needs min_confidence",
            "min_confidence = 0.7",
        ),
    ],
)
def test_operator_errors(route: str, message: str, hint: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse_config(BOTH + route, "f")
    assert str(caught.value) == message
    assert hint in caught.value.hint


@pytest.mark.parametrize("path", ["models", "nowhere", "models/boss"])
async def test_errors_of_other_routes_have_a_request_id(tmp_path: Path, path: str) -> None:
    with harness(tmp_path, authenticate=lambda key: None) as server:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{server.url}/{path}") as response,
        ):
            assert response.status in (401, 404)
            assert response.headers["x-request-id"].startswith("req_")
