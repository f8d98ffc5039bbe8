"""Headers and keys that the operator adds to the requests of a tier."""

from __future__ import annotations

import io
import json
import logging
import re
import textwrap
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bottega.cli.serve_check import print_config
from bottega.errors import SettingError
from bottega.gateway.config.config_file import parse_config
from bottega.gateway.config.gateway_settings import Config
from bottega.gateway.running.build import build
from bottega.gateway.running.tiers import build_tiers
from bottega.gateway.telemetry.logs import log_to
from bottega.generation import OpenAIGenerator
from bottega.types import Message, Prompt, Sampling
from tests import server as doubles
from tests.gateway.gateways import ask, run_gateway
from tests.gateway.upstreams import CHUNKS, events, lines

KEY, PORTAL = "0f3a9c5d7b1e4628", "portal/secret+value"
ENVIRONMENT = {"AZURE_KEY": KEY, "PORTAL_KEY": f"{PORTAL}\n"}
PROMPT = Prompt((Message("user", ("hi",)),))
HEADERS = """
    api_key_env = "AZURE_KEY"
    api_key_header = "api-key"
    headers = { "X-Team" = "vision" }
    headers_env = { "x-portal-key" = "PORTAL_KEY" }
"""


def tier(url: str, settings: str, folder: Path = Path("data")) -> Config:
    return parse_config(
        textwrap.dedent(f"""
            [gateway]
            data = "{folder}"
            [tiers.azure]
            model = "openai:gpt-x"
            base_url = "{url}"
            price = [1.0, 1.0]
            retries = 0
            {settings}
            [cache]
            embed = "words"
        """)
    )


@pytest.fixture
def upstream() -> Iterator[doubles.Server]:
    with doubles.running() as endpoint:
        yield endpoint


def check_sent(headers: dict[str, str]) -> None:
    sent = {name.lower(): value for name, value in headers.items()}
    found = [sent.get(name) for name in ("api-key", "x-team", "x-portal-key", "authorization")]
    assert found == [KEY, "vision", PORTAL, None]


def test_every_request_of_the_tier_has_the_headers(
    upstream: doubles.Server, tmp_path: Path
) -> None:
    config = tier(upstream.url, HEADERS, tmp_path)
    with run_gateway(build(config, ENVIRONMENT)) as url:
        upstream.answers = [doubles.ok("fine")]
        ask(url, "one")
        upstream.answers = [events(lines(*CHUNKS))]
        with pytest.raises(json.JSONDecodeError):  # a stream
            ask(url, "two", stream=True)
    assert set(upstream.paths) == {"/v1/models", "/v1/chat/completions"}
    assert len(upstream.headers) >= 3
    for headers in upstream.headers:
        check_sent(headers)


async def test_searches_and_confidence_use_the_same_headers(upstream: doubles.Server) -> None:
    tiers = build_tiers(tier(upstream.url, HEADERS), ENVIRONMENT)
    try:
        await tiers.served[0].tier.generator.generate(PROMPT, Sampling())
    finally:
        await tiers.aclose()
    check_sent(upstream.headers[0])


@pytest.mark.parametrize("status", [400, 401, 429, 500, 502])
def test_values_are_neither_in_errors_nor_in_logs(
    upstream: doubles.Server, tmp_path: Path, status: int
) -> None:
    """Some servers quote the key that they reject."""
    quoting = doubles.refuse(status, f"the key {KEY} or {PORTAL} of portal%2Fsecret%2Bvalue fails")
    config = tier(upstream.url, HEADERS, tmp_path)
    stream = io.StringIO()
    server = build(config, ENVIRONMENT)
    with (
        log_to(stream, secrets=server.tier_set.secrets),
        run_gateway(server, ready=False) as url,
    ):
        upstream.answers = [quoting]
        with pytest.raises(urllib.error.HTTPError) as failed:
            ask(url, "one")
        shown = failed.value.read().decode()
        logging.getLogger("bottega.test").warning("the value %s of a header", PORTAL)
    for text in (shown, stream.getvalue()):
        assert text
        assert not [one for one in (KEY, PORTAL, "portal%2Fsecret") if one in text]


def test_the_check_shows_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    config = tier("http://localhost:9/v1", HEADERS)
    print_config(config, ENVIRONMENT)
    shown = capsys.readouterr().out
    assert re.search("headers +X-Team, x-portal-key, api-key", shown)
    assert KEY not in shown and PORTAL not in shown


@pytest.mark.parametrize(
    ("settings", "problem", "hint"),
    [
        *(
            (f'headers = {{ "{name}" = "x" }}', f"the header '{name}' must not be set", "remove it")
            for name in (
                *("authorization", "Authorization", "content-type", "Host", "content-length"),
                *("transfer-encoding", "connection", "accept", "accept-encoding", "traceparent"),
            )
        ),
        ('api_key_header = "Authorization"', "api_key_header is invalid", "remove it"),
        ('headers_env = { host = "PORTAL_KEY" }', "tiers.azure.headers_env is invalid", "remove"),
        *(
            (f'headers = {{ "{name}" = "x" }}', "letters, digits and -", "x-team")
            for name in ("", "x team", "x:team", "x-té", "x\\r\\nhost")
        ),
        *(
            (f'headers = {{ "{name}" = "x" }}', "must not be in a file", "headers_env")
            for name in ("api-key", "X-Api-Key", "x-auth", "cookie", "x-secret", "X-Token")
        ),
        ('headers = { x-team = "sk-0123456789abcdef" }', "looks like a secret", "variable"),
        ("headers = { x-team = 5 }", "tiers.azure.headers.x-team must be text", "x-team ="),
        ('headers_env = { x-key = "0f3a9c5d7b1e4628" }', "name of an environment variable", "TEAM"),
        (
            'headers = { x-a = "1", X-A = "2" }',
            "must name each header once, got 'x-a'",
            "remove one",
        ),
        (
            'headers_env = { api-key = "PORTAL_KEY" }\napi_key_env = "AZURE_KEY"\n'
            'api_key_header = "API-Key"',
            "must name each header once, got 'api-key'",
            "remove one",
        ),
        ('api_key_header = "api-key"', "api_key_header has no effect", "api_key_env"),
    ],
)
def test_invalid_headers_are_rejected(settings: str, problem: str, hint: str) -> None:
    with pytest.raises(SettingError, match=re.escape(problem)) as rejected:
        tier("http://localhost:9/v1", settings)
    assert str(rejected.value).startswith("bottega.toml")
    assert hint in rejected.value.hint
    assert KEY not in str(rejected.value) + rejected.value.hint


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"AZURE_KEY": KEY}, "headers_env.x-portal-key has no value: PORTAL_KEY is not set"),
        ({"AZURE_KEY": KEY, "PORTAL_KEY": ""}, "PORTAL_KEY is not set"),
        ({"AZURE_KEY": KEY, "PORTAL_KEY": "a\r\nb: c"}, "characters that a header cannot contain"),
        ({"AZURE_KEY": "ké" * 8, "PORTAL_KEY": PORTAL}, "characters that a header cannot contain"),
    ],
)
def test_invalid_values_are_rejected(environment: dict[str, str], problem: str) -> None:
    with pytest.raises(SettingError, match=re.escape(problem)) as rejected:
        build_tiers(tier("http://localhost:9/v1", HEADERS), environment)
    assert "a\r\nb: c" not in str(rejected.value)


def test_a_local_model_has_no_headers() -> None:
    settings = '[tiers.a]\nmodel = "bundled"\nheaders = { x-team = "vision" }'
    with pytest.raises(SettingError, match="runs in this process"):
        parse_config(settings)


async def test_generators_of_python_code_send_headers(upstream: doubles.Server) -> None:
    more: Any = {"base_url": upstream.url, "api_key": "", "headers": {"api-key": KEY}}
    generator = OpenAIGenerator("m", **more)
    assert KEY not in repr(generator)
    await generator.generate(PROMPT, Sampling())
    await generator.aclose()
    assert upstream.headers[0]["api-key"] == KEY
    with pytest.raises(SettingError, match="must not be set"):
        OpenAIGenerator("m", **more | {"headers": {"Authorization": "x"}})
