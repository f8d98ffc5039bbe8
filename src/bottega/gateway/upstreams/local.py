"""A generator in this process as an upstream: bodies to prompts, replies to JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, cast, runtime_checkable

import orjson

from bottega.errors import SettingError
from bottega.gateway.decode_budget import DecodeBudget
from bottega.image import Image
from bottega.openai_api.request import (
    Body,
    ChatMessage,
    OtherPart,
    Part,
    TextPart,
    parse_messages,
)
from bottega.openai_api.response import ChatCompletion, completion_json
from bottega.openai_api.streams import to_chunks
from bottega.protocols import Generator
from bottega.types import Message, Prompt, Reply, Role, Sampling

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
MAX_CHOICES = 128  # as OpenAI allows
MAX_STOPS = 16


@runtime_checkable
class Loads(Protocol):
    async def load(self) -> None: ...


class LocalUpstream:
    """Answers with a generator. `sampling` gives what a body leaves out: without a temperature the
    answer is greedy, unlike OpenAI's.

    A body that needs an unsupported feature (tools, JSON formats, output constraints,
    log-probabilities, audio) or has an invalid value raises `SettingError`; an unreadable image
    raises `ImageError`. Other sampling parameters, such as `top_p`, have no effect. A stream starts
    when the answer is complete.
    """

    def __init__(self, generator: Generator, *, sampling: Sampling | None = None) -> None:
        self._generator = generator
        self._sampling = sampling or Sampling()
        self.decoding = DecodeBudget()

    @property
    def model(self) -> str:
        return self._generator.name

    def __repr__(self) -> str:
        return f"LocalUpstream({self.model!r})"

    async def complete(self, body: Body, /) -> ChatCompletion:
        reply = await self._reply(body)
        payload = orjson.dumps(completion_json(reply))
        return ChatCompletion(payload, reply.model, reply.completions, reply.usage)

    async def stream(self, body: Body, /) -> AsyncGenerator[bytes]:
        completed = await self.complete(body)
        for payload in to_chunks(completed.payload, include_usage=True):
            yield payload

    async def check(self) -> None:
        """Loads the model if it is not loaded yet."""
        if isinstance(self._generator, Loads):
            await self._generator.load()

    async def aclose(self) -> None:
        await self._generator.aclose()

    async def _reply(self, body: Body) -> Reply:
        sampling = body_to_sampling(body, self._sampling)
        prompt = await self._reduced(await body_to_prompt(body))
        return await self._generator.generate(prompt, sampling)

    async def _reduced(self, prompt: Prompt) -> Prompt:
        """Return the prompt with large images reduced as for an endpoint. They are decoded here,
        within the budget, because the model's only thread would delay all other requests."""
        parts = (part for message in prompt.messages for part in message.parts)
        large = {part for part in parts if isinstance(part, Image) and part.is_large}
        if not large:
            return prompt
        encode = partial(asyncio.to_thread, _reduced_as_for_endpoints, large)
        small = await self.decoding.run(large, encode, Image.wire_cost)
        messages = (
            replace(message, parts=tuple(small.get(part, part) for part in message.parts))
            for message in prompt.messages
        )
        return replace(prompt, messages=tuple(messages))


def _reduced_as_for_endpoints(images: Collection[Image]) -> dict[object, Image]:
    return {image: Image.from_data_url(image.data_url) for image in images}


async def body_to_prompt(body: Body) -> Prompt:
    """Return the prompt of a body; decode data URLs off the event loop. Raises `ApiError`,
    `ImageError`, and `SettingError` for anything that the model does not support."""
    messages = parse_messages(body.get("messages"))
    if any(message.images for message in messages):
        return await asyncio.to_thread(_prompt, messages)
    return _prompt(messages)


def _prompt(messages: Sequence[ChatMessage]) -> Prompt:
    return Prompt(tuple(_message(one, f"messages[{i}]") for i, one in enumerate(messages)))


def _message(message: ChatMessage, where: str) -> Message:
    role = ROLES.get(message.role)
    if role is None:
        raise SettingError(
            f"{where}.role is not supported by this model, got {message.role!r}",
            hint=f"use one of {', '.join(ROLES)}",
        )
    if message.raw.get("tool_calls") or message.raw.get("function_call"):
        raise _unsupported(f"{where}.tool_calls")
    if message.parts is None:
        raise SettingError(f"{where}.content is missing", hint="send a text or a list of parts")
    return Message(role, tuple(_part(part, where, i) for i, part in enumerate(message.parts)))


def _part(part: Part, where: str, number: int) -> str | Image:
    if isinstance(part, TextPart):
        return part.text
    if isinstance(part, OtherPart):
        raise SettingError(
            f"{part.param} is not supported by this model, got a part of type {part.kind[:64]!r}",
            hint="send parts of type text and image_url",
        )
    if not part.url.startswith("data:"):
        raise SettingError(f"{part.param} is not a data URL", hint="send data:image/png;base64,...")
    return Image.from_data_url(part.url, source=f"{where}.content[{number}]")


def body_to_sampling(body: Body, base: Sampling) -> Sampling:
    for name in UNSUPPORTED:
        if body.get(name) not in (None, False, [], 0, "none"):
            raise _unsupported(name)
    kind = body.get("response_format")
    if isinstance(kind, dict) and kind.get("type") != "text":
        raise _unsupported("response_format")
    if body.get("modalities") not in (None, ["text"]):
        raise _unsupported("modalities")
    limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    n = _integer(body, "n", base.n)
    if n > MAX_CHOICES:
        raise SettingError(f"n is {n}", hint=f"ask for {MAX_CHOICES} choices at most")
    return Sampling(
        temperature=_number(body, "temperature", base.temperature),
        max_tokens=_integer(body, limit, base.max_tokens),
        n=n,
        seed=base.seed if body.get("seed") is None else _integer(body, "seed", 0),
        stop=_stops(body.get("stop"), base.stop),
    )


UNSUPPORTED = (
    "tools",
    "functions",
    "logprobs",
    "top_logprobs",
    "audio",
    "guided_choice",
    "guided_json",
    "guided_regex",
    "structured_outputs",
)


def _unsupported(name: str) -> SettingError:
    return SettingError(
        f"{name} is not supported by this model",
        hint="leave it out, or ask a model behind an endpoint",
    )


def _number(body: Body, name: str, base: float) -> float:
    value = body.get(name)
    if value is None:
        return base
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(
            f"{name} must be a number, got {value!r}"[:200], hint=f"send {name} as a JSON number"
        )
    return float(value)


def _integer(body: Body, name: str, base: int) -> int:
    found = body.get(name)
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    value = _number(body, name, float(base))
    if not value.is_integer():
        raise SettingError(f"{name} is {value:g}", hint=f"send {name} as a whole number")
    return int(value)


def _stops(given: object, base: tuple[str, ...]) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    if stops is None:
        return base
    fits = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not fits or not all(isinstance(one, str) and one for one in cast(list[object], stops)):
        raise SettingError(
            "stop must be a text or a list of texts", hint=f"send {MAX_STOPS} at most, none empty"
        )
    return tuple(cast(list[str], stops))
