"""Invalid replies, leaked secrets, unlimited replies, and invalid addresses."""

from __future__ import annotations

import asyncio
import gzip
import traceback
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web

from bottega.errors import (
    EndpointError,
    GarbledError,
    RateLimitedError,
    ServerFailedError,
    SettingError,
)
from bottega.generation import OpenAIGenerator, RetryPolicy
from bottega.openai_api import transport
from bottega.openai_api.endpoint import redactor
from bottega.types import Reply, Sampling, Usage
from tests.generation.prompts import ask
from tests.server import Answer, Server, raw, refuse, reply


async def answer(url: str, **settings: Any) -> Reply:
    given: dict[str, Any] = {"base_url": url, "retries": 0} | settings
    generator = OpenAIGenerator("m", **given)
    try:
        return await generator.generate(ask(), Sampling())
    finally:
        await generator.aclose()


def choice(content: object, **more: object) -> Answer:
    return reply({"choices": [{"message": {"content": content}, "finish_reason": "stop"} | more]})


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"error": {"message": "upstream is down", "code": 502}}, ServerFailedError),
        ({"error": {"message": "slower", "code": "429"}}, RateLimitedError),
        ({"error": "upstream is down"}, ServerFailedError),
        ({"finish_reason": "error"}, ServerFailedError),
    ],
)
async def test_a_choice_that_failed_is_no_answer(
    endpoint: Server, more: dict[str, object], kind: type[EndpointError]
) -> None:
    endpoint.answers = [choice("", **more)]
    with pytest.raises(kind) as caught:
        await answer(endpoint.url)
    assert caught.value.retryable


@pytest.mark.parametrize("content", [{"text": "a"}, 7, True, [], [7], [{"type": "thinking"}]])
async def test_content_without_any_text_is_garbled(endpoint: Server, content: object) -> None:
    endpoint.answers = [choice(content)]
    with pytest.raises(GarbledError, match="without text"):
        await answer(endpoint.url)


@pytest.mark.parametrize(
    ("content", "more", "finish"),
    [
        ([{"type": "refusal", "refusal": "no"}], {}, "refusal"),
        ([{"type": "thinking", "thinking": []}], {"finish_reason": "length"}, "length"),
        ([], {"message": {"content": [], "tool_calls": [{}]}}, "stop"),
    ],
)
async def test_some_answers_have_no_text(
    endpoint: Server, content: object, more: dict[str, object], finish: str
) -> None:
    endpoint.answers = [choice(content, **more)]
    completion = (await answer(endpoint.url)).completions[0]
    assert (completion.text, completion.finish_reason) == ("no" * (finish == "refusal"), finish)


@pytest.mark.parametrize("status", [200, 500])
async def test_a_reply_that_unpacks_without_end_is_not_read(
    endpoint: Server, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_REPLY_MB", 1)
    bomb = gzip.compress(b" " * (8 << 20), 1)
    endpoint.answers = [raw(bomb, status, "application/json", {"Content-Encoding": "gzip"})]
    with pytest.raises(GarbledError, match="more than 1 MB"):
        await answer(endpoint.url, retries=RetryPolicy(3))
    assert len(endpoint.bodies) == 1


@pytest.mark.parametrize(
    ("claimed", "counted"),
    [
        ((-5, -1, -2), Usage(0, 0, 0)),
        ((1e19, 10**18, 5), Usage(2**53, 2**53, 5)),
        ((True, "12", None), Usage(0, 0, 0)),
        ((10, 2, 99), Usage(10, 2, 10)),
    ],
)
async def test_absurd_counts_are_not_believed(
    endpoint: Server, claimed: tuple[object, object, object], counted: Usage
) -> None:
    prompt, completion, cached = claimed
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    endpoint.answers = [reply({"choices": [{"message": {"content": "a"}}], "usage": usage})]
    assert (await answer(endpoint.url)).usage == counted


async def echo(request: web.Request) -> web.StreamResponse:
    message = f"refused {request.headers.get('Authorization')} at {request.raw_path}"
    return web.json_response({"error": {"message": message + " hunter2"}}, status=401)


async def test_echoed_credentials_are_redacted(endpoint: Server) -> None:
    endpoint.answers = [echo]
    url = endpoint.url.replace("//", "//user:hunter2@") + "?api-key=QUERYKEY%2F99%2B"
    with pytest.raises(EndpointError) as caught:
        await answer(url)
    assert endpoint.headers[0]["Authorization"] == "Basic dXNlcjpodW50ZXIy"
    assert "QUERYKEY" in endpoint.paths[0]
    assert "refused" in str(caught.value)
    for secret in ("hunter2", "dXNlcjpodW50ZXIy", "QUERYKEY", "99%2B"):
        assert secret not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("secret", ["p@ss w/rd+%", "Ünlaut&=?", "a" * 400])
def test_a_secret_is_redacted_however_it_is_quoted(secret: str) -> None:
    redact = redactor([secret])
    for way in (secret, quote(secret), quote(secret, safe=""), quote(secret).lower()):
        assert redact(f"key={way};") == "key=[redacted];"


async def test_a_secret_at_the_end_of_a_long_message_is_not_cut_in_half(endpoint: Server) -> None:
    endpoint.answers = [refuse(400, "x" * 295 + " s3cret-key")]
    with pytest.raises(EndpointError) as caught:
        await answer(endpoint.url, api_key="s3cret-key")
    assert "s3c" not in str(caught.value)


async def test_a_message_of_megabytes_is_not_searched(endpoint: Server) -> None:
    endpoint.answers = [refuse(400, "no " * 1_000_000)]
    with pytest.raises(EndpointError) as caught:
        await answer(endpoint.url)
    assert str(caught.value).endswith("answered 400")


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 200 OK\r\nA\r\n\r\n"])
async def test_no_cause_shows_the_whole_url(greeting: bytes) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        url = f"http://127.0.0.1:{port}/v1?api-key=QUERYKEY"  # a traceback quotes the call's line
        with pytest.raises(ServerFailedError) as caught:
            await answer(url)
    assert "QUERYKEY" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://x/v1", "http://", "http://a:b:c"])
def test_a_base_url_that_is_none(url: str) -> None:
    with pytest.raises(SettingError) as caught:
        OpenAIGenerator("m", base_url=url)
    assert "http" in caught.value.hint


@pytest.mark.parametrize(
    "host", ["a..b", ".a", "a" * 300, "xn--a", "ü..b", "user:hunter2@a:99999", "[::1"]
)
def test_a_host_that_cannot_be_one(host: str) -> None:
    with pytest.raises(SettingError) as caught:
        OpenAIGenerator("m", base_url=f"http://{host}/v1")
    assert "http" in caught.value.hint
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))
