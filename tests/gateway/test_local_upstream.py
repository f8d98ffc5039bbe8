"""Conversion of bodies to prompts and replies to JSON for an in-process generator."""

from __future__ import annotations

import asyncio
import threading
from base64 import b64encode
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from bottega import pixels
from bottega.errors import GenerationError, ImageError, PromptRejectedError
from bottega.gateway.ports import Upstream
from bottega.gateway.request.reading import Cost, DecodeBudget, embedding_cost
from bottega.gateway.request.upstreams import LocalUpstream
from bottega.generation import ScriptedGenerator
from bottega.image import Image
from bottega.openai_api.errors import ApiError
from bottega.types import Completion, Message, Prompt, Reply, Sampling, Usage
from tests.builders import solid_image

T = TypeVar("T")
USER = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "bottega", "messages": [USER]}


async def parse(body: dict[str, Any]) -> tuple[Prompt, Sampling]:
    generator = ScriptedGenerator(lambda prompt: "fine")
    await LocalUpstream(generator).complete(body)
    return generator.calls[0].prompt, generator.calls[0].sampling


class ReplyStub:
    """Generator that returns the completions it was given."""

    name = "stub"

    def __init__(self, *completions: Completion) -> None:
        self.reply = Reply("stub:v2", completions, Usage(7, 5, 3))
        self.loaded = self.closed = False

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        return self.reply

    async def load(self) -> None:
        self.loaded = True

    async def aclose(self) -> None:
        self.closed = True


class Budget(DecodeBudget):
    """Budget that records the images decoded within it."""

    def __init__(self) -> None:
        super().__init__()
        self.decoded: list[Image] = []

    async def run(
        self,
        images: Collection[Image],
        work: Callable[[], Awaitable[T]],
        cost: Cost = embedding_cost,
    ) -> T:
        self.decoded += images
        assert cost is Image.wire_cost
        return await super().run(images, work, cost)


async def test_large_images_are_reduced_before_the_models_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pixels, "LARGE_PIXELS", 10_000)
    small, large = solid_image(1), solid_image(2, (4096, 4))
    generator, budget = ScriptedGenerator(lambda prompt: "fine"), Budget()
    upstream = LocalUpstream(generator)
    upstream.decoding = budget
    urls = [f"data:image/png;base64,{b64encode(one.data).decode()}" for one in (small, large)]
    urls.append(urls[1])
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    await upstream.complete({"messages": [{"role": "user", "content": parts}]})
    [message] = generator.calls[0].prompt.messages
    assert message.parts[0] == small
    assert [(part.width, part.height) for part in message.parts if isinstance(part, Image)] == [
        (8, 8),
        (2048, 2),
        (2048, 2),
    ]
    assert budget.decoded == [large]


async def test_messages_become_a_prompt() -> None:
    cat, dog = solid_image(1), solid_image(2)
    prompt, _ = await parse(
        {
            "messages": [
                {"role": "developer", "content": "be short"},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "which?"},
                        {"type": "image_url", "image_url": {"url": cat.data_url, "detail": "low"}},
                        {"type": "image_url", "image_url": dog.data_url},
                    ],
                },
                {"role": "assistant", "content": "a cat"},
                USER,
            ]
        }
    )
    assert prompt == Prompt(
        (
            Message("system", ("be short",)),
            Message("user", ("which?", cat, dog)),
            Message("assistant", ("a cat",)),
            Message("user", ("hi",)),
        )
    )


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({}, Sampling(temperature=0.0)),
        ({"temperature": None, "seed": None, "n": None, "stop": None}, Sampling()),
        ({"temperature": 1, "max_tokens": 9, "n": 2, "seed": -3}, Sampling(1.0, 9, 2, -3)),
        ({"max_completion_tokens": 8, "max_tokens": 9}, Sampling(max_tokens=8)),
        ({"stop": "."}, Sampling(stop=(".",))),
        ({"stop": [".", "!"], "seed": 2**62 + 1}, Sampling(stop=(".", "!"), seed=2**62 + 1)),
        ({"top_p": 0.5, "tools": [], "logprobs": False, "unheard_of": {}}, Sampling()),
        ({"response_format": {"type": "text"}, "tool_choice": "none"}, Sampling()),
    ],
)
async def test_fields_become_sampling_parameters(
    fields: dict[str, Any], sampling: Sampling
) -> None:
    assert (await parse(BODY | fields))[1] == sampling


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, r"messages\[0\]"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, r"messages\[1\]"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"messages\[0\]"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
        ({"messages": [{"role": "user", "content": []}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, r"content\[0\]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"logprobs": True}, "logprobs"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"n": 0}, "expected an integer from 1 to 128, but got 0"),
        ({"n": 129}, "expected an integer from 1 to 128, but got 129"),
        ({"n": 1.5}, "'n'"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"stop": {}}, "stop"),
    ],
)
async def test_unsupported_fields_are_rejected_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises((PromptRejectedError, ApiError), match=named) as caught:
        await parse(BODY | fields)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("https://example.com/cat.png", PromptRejectedError),
        ("file:///etc/passwd", ApiError),
        (None, ApiError),
        ("data:image/png;base64,!!!", ImageError),
        ("data:image/png;base64,AAAA", ImageError),
    ],
)
async def test_invalid_image_is_rejected(url: object, kind: type[Exception]) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(kind, match=r"messages\[0\].content\[0\]"):
        await parse({"messages": [{"role": "user", "content": [part]}]})


async def test_images_are_decoded_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    honest = Image.from_data_url

    def noting(url: str, *, source: str | None = None) -> Image:
        threads.append(threading.get_ident())
        return honest(url, source=source)

    monkeypatch.setattr(Image, "from_data_url", noting)
    part = {"type": "image_url", "image_url": solid_image(1).data_url}
    await parse({"messages": [{"role": "user", "content": [part]}]})
    assert threads and threading.get_ident() not in threads


async def test_openai_client_parses_the_reply() -> None:
    generator = ReplyStub(Completion("a b", "length"), Completion("no", "refusal"))
    reply = await LocalUpstream(generator).complete(BODY)
    parsed = ChatCompletion.model_validate_json(reply.payload, strict=True)
    assert (reply.model, reply.usage) == ("stub:v2", Usage(7, 5, 3))
    assert reply.completions == generator.reply.completions
    assert parsed.id.startswith("chatcmpl-") and parsed.model == "stub:v2"
    assert [one.index for one in parsed.choices] == [0, 1]
    assert [one.finish_reason for one in parsed.choices] == ["length", "stop"]
    assert [one.message.content for one in parsed.choices] == ["a b", ""]
    assert [one.message.refusal for one in parsed.choices] == [None, "no"]
    assert parsed.usage and parsed.usage.prompt_tokens_details
    assert (parsed.usage.total_tokens, parsed.usage.prompt_tokens_details.cached_tokens) == (12, 3)


async def test_stream_has_the_protocol_order() -> None:
    generator = ReplyStub(Completion("a b"), Completion("", "length"))
    payloads = [payload async for payload in LocalUpstream(generator).stream(BODY)]
    chunks = [ChatCompletionChunk.model_validate_json(payload, strict=True) for payload in payloads]
    parts = [
        (choice.index, choice.delta.role, choice.delta.content, choice.finish_reason)
        for one in chunks
        for choice in one.choices
    ]
    assert parts == [
        (0, "assistant", "", None),
        (0, None, "a b", None),
        (0, None, None, "stop"),
        (1, "assistant", "", None),
        (1, None, None, "length"),
    ]
    assert [one.usage is None for one in chunks] == [True] * 5 + [False]
    assert chunks[-1].choices == [] and chunks[-1].usage and chunks[-1].usage.prompt_tokens == 7
    assert len({one.id for one in chunks}) == 1
    assert all(b'"usage":null' in payload for payload in payloads[:-1])


async def test_generator_error_is_raised_before_the_first_event() -> None:
    upstream = LocalUpstream(ScriptedGenerator([GenerationError("out of memory")]))
    with pytest.raises(GenerationError, match="memory"):
        await anext(upstream.stream(BODY))


async def test_check_loads_the_model() -> None:
    generator = ReplyStub(Completion("a"))
    upstream: Upstream = LocalUpstream(generator)
    await upstream.check()
    await upstream.aclose()
    assert (generator.loaded, generator.closed, upstream.model) == (True, True, "stub")
    await LocalUpstream(ScriptedGenerator([])).check()


async def test_cancelling_a_call_cancels_the_generator() -> None:
    generator = ScriptedGenerator(lambda prompt: "late", latency=30)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await LocalUpstream(generator).complete(BODY)


async def test_defaults_come_from_the_operator() -> None:
    generator = ScriptedGenerator(lambda prompt: "fine")
    await LocalUpstream(generator, sampling=Sampling(0.5, 700)).complete(BODY | {"seed": 4})
    assert generator.calls[0].sampling == Sampling(0.5, 700, seed=4)
