from __future__ import annotations

import asyncio
import base64
import gc
import time
from typing import Any

import orjson
import pytest
from openai.types.chat import completion_create_params
from pydantic import TypeAdapter

from bottega.errors import (
    EndpointError,
    EndpointTimeoutError,
    GarbledError,
    ImageError,
    RateLimitedError,
    RejectedError,
    ServerFailedError,
    SettingError,
    UnreachableError,
)
from bottega.generation import OpenAIGenerator, RetryPolicy
from bottega.image import Image
from bottega.types import Message, Prompt, Sampling
from tests.builders import solid_image
from tests.generation.prompts import ask, shown
from tests.server import Server, cut, ok, raw, refuse, reply, slowly, stall

REQUEST: TypeAdapter[Any] = TypeAdapter(completion_create_params.CompletionCreateParamsNonStreaming)


class Clock:
    def __init__(self) -> None:
        self.waits: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.waits.append(seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def model(endpoint: Server, clock: Clock | None = None, **settings: Any) -> OpenAIGenerator:
    quick = RetryPolicy(sleep=clock or Clock())
    given: dict[str, Any] = {"base_url": endpoint.url, "retries": quick} | settings
    return OpenAIGenerator("m", **given)


async def error_of(generator: OpenAIGenerator) -> EndpointError:
    with pytest.raises(EndpointError) as caught:
        await generator.generate(ask(), Sampling())
    await generator.aclose()
    assert caught.value.hint
    return caught.value


async def test_the_request_is_what_the_protocol_defines(endpoint: Server) -> None:
    system = Message("system", ("be brief",))
    prompt = Prompt((system, *shown(1, 2).messages))
    sampling = Sampling(temperature=0.5, max_tokens=7, n=1, seed=3, stop=("\n",))
    generator = model(endpoint, extra_body={"top_k": 5, "seed": None})
    completion = (await generator.generate(prompt, sampling)).completions[0]
    await generator.aclose()

    body = endpoint.bodies[0]
    REQUEST.validate_python(body)
    assert completion.text == "fine"
    assert endpoint.paths == ["/v1/chat/completions"]
    assert "Authorization" not in endpoint.headers[0]
    assert {name: body[name] for name in body if name != "messages"} == {
        "model": "m", "temperature": 0.5, "max_tokens": 7, "stop": ["\n"], "top_k": 5,
    }  # fmt: skip
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    assert body["messages"][2] == {"role": "assistant", "content": "label 1"}
    image, question = body["messages"][3]["content"]
    assert question == {"type": "text", "text": "What is in the image above?"}
    kind, _, data = image["image_url"]["url"].partition(",")
    assert (kind, base64.b64decode(data)) == ("data:image/png;base64", solid_image(2).data)


async def test_usage_and_choices_are_parsed(endpoint: Server) -> None:
    usage = {
        "prompt_tokens": 30,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 20},
    }
    logprobs = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.0}]}
    message = {"role": "assistant", "content": [{"type": "text", "text": "ab"}]}
    choice = {"message": message, "finish_reason": "length", "logprobs": logprobs}
    endpoint.answers = [reply({"choices": [choice], "usage": usage})]
    generator = model(endpoint)
    answer = await generator.generate(ask(), Sampling())
    await generator.aclose()
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (30, 4)
    assert answer.usage.cached_tokens == 20
    completion = answer.completions[0]
    assert (completion.text, completion.finish_reason) == ("ab", "length")
    assert completion.logprob == pytest.approx(-1.5)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": None, "refusal": "I cannot"}, ("I cannot", "refusal")),
        ({"content": None, "tool_calls": [{}]}, ("", "tool_calls")),
        ({"content": ""}, ("", "tool_calls")),
    ],
)
async def test_a_reply_without_content_is_an_answer(
    endpoint: Server, message: dict[str, object], expected: tuple[str, str]
) -> None:
    endpoint.answers = [reply({"choices": [{"message": message, "finish_reason": "tool_calls"}]})]
    generator = model(endpoint)
    completion = (await generator.generate(ask(), Sampling())).completions[0]
    await generator.aclose()
    assert (completion.text, completion.finish_reason) == expected


@pytest.mark.parametrize("each", [1, 2])
async def test_ignored_n_is_made_up_for(endpoint: Server, each: int) -> None:
    endpoint.answers = [ok(*["x"] * each)]
    generator = model(endpoint)
    answer = await generator.generate(ask(), Sampling(n=5, seed=10, temperature=1))
    await generator.aclose()
    assert len(answer.completions) == 5
    assert answer.usage.prompt_tokens == 10 * len(endpoint.bodies)
    seeds = sorted(body["seed"] for body in endpoint.bodies)
    assert seeds == ([10, 11, 12, 13, 14] if each == 1 else [10, 12, 14])


async def test_dialects_are_learned_once(endpoint: Server) -> None:
    endpoint.answers = [
        refuse(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."),
        refuse(400, "'n' must be at most 1"),
        ok("x"),
    ]
    generator = model(endpoint)
    for _ in range(2):
        assert len((await generator.generate(ask(), Sampling(n=2))).completions) == 2
    await generator.aclose()
    assert len(endpoint.bodies) == 6
    assert all("max_tokens" not in body and "n" not in body for body in endpoint.bodies[2:])


async def test_a_dead_endpoint_is_named_without_its_credentials(clock: Clock) -> None:
    generator = OpenAIGenerator(
        "m", base_url="http://user:hunter22@127.0.0.1:9/v1/", retries=RetryPolicy(3, sleep=clock)
    )
    error = await error_of(generator)
    assert isinstance(error, UnreachableError)
    assert "http://127.0.0.1:9/v1" in str(error)
    assert "OPENAI_BASE_URL" in error.hint
    assert "hunter22" not in f"{error!r} {error.hint} {generator!r} {vars(generator)}"
    assert len(clock.waits) == 2


async def test_a_web_page_is_not_asked_for_twice(endpoint: Server) -> None:
    endpoint.answers = [raw(b"<!doctype html><h1>Welcome</h1>")]
    error = await error_of(model(endpoint))
    assert isinstance(error, GarbledError)
    assert "/v1" in error.hint
    assert len(endpoint.bodies) == 1


@pytest.mark.parametrize(
    "bad",
    [
        raw(b'{"choices": [', kind="application/json"),
        reply([1]),
        reply({"choices": []}),
        reply({"id": "x"}),
        reply({"choices": [{"text": "old protocol"}]}),
    ],
)
async def test_a_garbled_reply_is_retried(endpoint: Server, bad: Any) -> None:
    endpoint.answers = [bad, ok("fine")]
    generator = model(endpoint)
    assert (await generator.generate(ask(), Sampling())).completions[0].text == "fine"
    endpoint.answers = [bad]
    assert isinstance(await error_of(generator), GarbledError)


@pytest.mark.parametrize(
    ("headers", "least", "most"),
    [
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5, 1.65),
        ({"retry-after": "3"}, 3.0, 3.3),
        ({"retry-after": "soon"}, 0.0, 0.5),
        ({}, 0.0, 0.5),
    ],
)
async def test_rate_limits_are_waited_for(
    endpoint: Server, clock: Clock, headers: dict[str, str], least: float, most: float
) -> None:
    endpoint.answers = [refuse(429, **headers), ok("fine")]
    generator = model(endpoint, clock)
    await generator.generate(ask(), Sampling())
    await generator.aclose()
    assert len(clock.waits) == 1
    assert least <= clock.waits[0] <= most


async def test_too_long_a_wait_is_reported_instead(endpoint: Server, clock: Clock) -> None:
    endpoint.answers = [refuse(429, **{"retry-after": "3600"})]
    error = await error_of(model(endpoint, clock))
    assert isinstance(error, RateLimitedError)
    assert (error.retry_after, error.retryable, clock.waits) == (3600.0, True, [])


async def test_server_failures_are_retried_and_keep_their_type(
    endpoint: Server, clock: Clock
) -> None:
    endpoint.answers = [refuse(500), refuse(503), refuse(409), refuse(408), ok("fine")]
    generator = model(endpoint, clock)
    assert (await generator.generate(ask(), Sampling())).completions[0].text == "fine"
    assert len(clock.waits) == 4
    endpoint.answers = [refuse(503, "overloaded")]
    error = await error_of(generator)
    assert isinstance(error, ServerFailedError)
    assert (error.status, error.retryable) == (503, True)
    assert "overloaded" in str(error)


async def test_the_server_says_whether_to_retry(endpoint: Server, clock: Clock) -> None:
    endpoint.answers = [refuse(400, **{"x-should-retry": "true"}), ok("fine")]
    generator = model(endpoint, clock)
    await generator.generate(ask(), Sampling())
    endpoint.answers = [refuse(500, **{"x-should-retry": "false"})]
    assert isinstance(await error_of(generator), ServerFailedError)
    assert len(clock.waits) == 1


async def test_a_failure_with_status_200_is_a_failure(endpoint: Server) -> None:
    endpoint.answers = [reply({"error": {"message": "upstream", "code": 429}}), ok("fine")]
    generator = model(endpoint)
    assert (await generator.generate(ask(), Sampling())).completions[0].text == "fine"
    await generator.aclose()


async def test_a_stalled_answer_times_out(endpoint: Server) -> None:
    endpoint.answers = [stall()]
    retries = RetryPolicy(2, sleep=Clock())
    start = time.monotonic()
    error = await error_of(model(endpoint, timeout=0.2, retries=retries))
    assert isinstance(error, EndpointTimeoutError)
    assert time.monotonic() - start < 5


async def test_a_cut_connection_is_retried(endpoint: Server) -> None:
    endpoint.answers = [cut(), ok("fine")]
    generator = model(endpoint)
    assert (await generator.generate(ask(), Sampling())).completions[0].text == "fine"
    endpoint.answers = [cut()]
    assert isinstance(await error_of(generator), ServerFailedError)


@pytest.mark.parametrize(
    ("status", "word"), [(401, "OPENAI_API_KEY"), (403, "key"), (404, "'m'"), (413, "fewer")]
)
async def test_rejections_say_what_to_do_and_never_show_the_key(
    endpoint: Server, status: int, word: str
) -> None:
    key = "sk-test-0123456789abcdef"
    endpoint.answers = [refuse(status, f"Incorrect API key provided: {key}, or Bearer abc.def")]
    generator = model(endpoint, api_key=f" {key}\n")
    error = await error_of(generator)
    assert isinstance(error, RejectedError)
    assert word in error.hint
    assert endpoint.headers[0]["Authorization"] == f"Bearer {key}"
    assert len(endpoint.bodies) == 1
    seen = f"{error!r} {error.hint} {error.__cause__!r} {generator!r} {vars(generator)}"
    assert "0123456789" not in seen
    assert "abc.def" not in seen


async def test_a_key_of_any_shape_is_redacted(endpoint: Server) -> None:
    endpoint.answers = [refuse(400, "bad key s3cret in a long story " + "x" * 1000)]
    error = await error_of(model(endpoint, api_key="s3cret"))
    assert "s3cret" not in str(error)
    assert len(str(error)) < 400


LINK = "Requests exceed the call rate limit. To raise the quota, see https://aka.example/quota"


@pytest.mark.parametrize(
    ("body", "headers", "is_used_up"),
    [
        ({"message": "no money", "code": "insufficient_quota"}, {}, True),
        ({"message": "no money", "type": "insufficient_quota", "code": None}, {}, True),
        ({"message": "no money", "code": "insufficient_quota"}, {"retry-after": "3600"}, True),
        ({"message": "no money", "code": "insufficient_quota"}, {"retry-after": "2"}, False),
        ({"message": LINK, "code": "429"}, {}, False),
        ({"message": LINK, "code": "RateLimitReached"}, {"retry-after": "7"}, False),
        ({"message": "You exceeded your current quota", "code": 429}, {}, False),
        ({"message": "quota", "type": "rate_limit_error"}, {}, False),
        ("quota", {}, False),
    ],
)
async def test_only_a_used_up_account_is_not_retried(
    endpoint: Server, body: object, headers: dict[str, str], is_used_up: bool
) -> None:
    """The code or type of the error decides, not its text."""
    for sent in ({"error": body}, [{"error": body}]):  # a list: Gemini
        endpoint.answers = [raw(orjson.dumps(sent), 429, "application/json", headers)]
        error = await error_of(model(endpoint, retries=0))
        assert isinstance(error, RejectedError) is is_used_up
        assert isinstance(error, RateLimitedError) is not is_used_up
        assert ("billing" in error.hint) is is_used_up
        assert error.retry_after == (float(headers["retry-after"]) if headers else None)


async def test_a_redirect_is_not_followed(endpoint: Server) -> None:
    endpoint.answers = [refuse(307, location="http://127.0.0.1:9/stolen")]
    error = await error_of(model(endpoint, api_key="s3cret"))
    assert "redirects" in error.hint


async def test_waiting_for_a_retry_holds_no_slot(endpoint: Server) -> None:
    waiting, go_on = asyncio.Event(), asyncio.Event()

    async def sleep(seconds: float) -> None:
        waiting.set()
        await go_on.wait()

    endpoint.answers = [refuse(500), ok("fine")]
    generator = model(endpoint, concurrency=1, retries=RetryPolicy(sleep=sleep))
    first = asyncio.create_task(generator.generate(ask(), Sampling()))
    await waiting.wait()
    await asyncio.wait_for(generator.generate(ask(), Sampling()), 5)
    go_on.set()
    await first
    await generator.aclose()


async def test_concurrency_is_limited(endpoint: Server) -> None:
    endpoint.answers = [slowly(ok("fine"), 0.02)]
    generator = model(endpoint, concurrency=3)
    await asyncio.gather(*[generator.generate(ask(), Sampling()) for _ in range(9)])
    await generator.aclose()
    assert endpoint.most_at_once == 3


@pytest.mark.filterwarnings("error")
def test_successive_event_loops_leak_nothing(endpoint: Server) -> None:
    generator = model(endpoint)
    for _ in range(3):
        asyncio.run(generator.generate(shown(1), Sampling()))
    gc.collect()
    assert len(endpoint.bodies) == 3


async def test_a_large_body_arrives(endpoint: Server) -> None:
    generator = model(endpoint)
    await generator.generate(ask("x" * 3_000_000), Sampling())
    await generator.aclose()
    assert len(endpoint.bodies[0]["messages"][0]["content"]) == 3_000_000


async def test_a_damaged_image_is_the_callers_error(endpoint: Server) -> None:
    damaged = Image.from_bytes(solid_image(1, (64, 64)).data[:-40])
    generator = model(endpoint)
    with pytest.raises(ImageError):
        await generator.generate(Prompt((Message("user", (damaged,)),)), Sampling())
    await generator.aclose()
    assert endpoint.bodies == []


@pytest.mark.parametrize("tail", ["", "/", "/chat/completions", "/chat/completions/"])
async def test_every_way_to_write_the_base_url(
    endpoint: Server, monkeypatch: pytest.MonkeyPatch, tail: str
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url + tail)
    generator = OpenAIGenerator("m")
    await generator.generate(ask(), Sampling())
    await generator.aclose()
    assert endpoint.paths == ["/v1/chat/completions"]
    assert generator.base_url == endpoint.url


async def test_credentials_in_the_url_and_its_query_are_sent(endpoint: Server) -> None:
    url = endpoint.url.replace("//", "//me:p%40ss@") + "?api-version=1"
    generator = OpenAIGenerator("m", base_url=url)
    await generator.generate(ask(), Sampling())
    await generator.aclose()
    assert endpoint.paths == ["/v1/chat/completions?api-version=1"]
    assert endpoint.headers[0]["Authorization"].startswith("Basic ")


@pytest.mark.parametrize(
    "wrong",
    [{"timeout": 0}, {"timeout": float("nan")}, {"concurrency": 0}, {"retries": -1},
     {"api_key": "a\nb"}],
)  # fmt: skip
def test_settings_that_cannot_work(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingError) as caught:
        OpenAIGenerator("m", **wrong)
    assert caught.value.hint


async def test_models_are_listed(endpoint: Server) -> None:
    endpoint.answers = [reply({"object": "list", "data": [{"id": "b"}, {"id": "a"}]})]
    generator = model(endpoint)
    assert await generator.list_models() == ["a", "b"]
    assert endpoint.paths == ["/v1/models"]
    endpoint.answers = [reply({"data": None})]
    with pytest.raises(GarbledError):
        await generator.list_models()
    await generator.aclose()
