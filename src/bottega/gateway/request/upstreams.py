"""Upstreams: HTTP endpoints, generators in this process, and timed ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import orjson

from bottega._util.caching import FairSemaphore
from bottega.errors import EndpointError, GarbledError, PromptRejectedError, RejectedError
from bottega.gateway.errors import MisconfiguredError, tier_fix
from bottega.gateway.ports import PrefixUpstream, Upstream
from bottega.gateway.request.reading import DecodeBudget
from bottega.gateway.telemetry.metrics import Histogram
from bottega.image import Image
from bottega.openai_api.client import LIMITS, Breaker, ChatClient, RetryPolicy
from bottega.openai_api.endpoint import Endpoint
from bottega.openai_api.errors import WRONG_PROTOCOL
from bottega.openai_api.request import (
    FIELDS,
    Body,
    ChatMessage,
    OtherPart,
    Part,
    TextPart,
    parse_messages,
)
from bottega.openai_api.response import (
    ChatCompletion,
    completion_json,
    error_body,
    get,
    reported_failure,
)
from bottega.openai_api.streams import to_chunks
from bottega.protocols import Generator, PrefixGenerator
from bottega.types import Message, Prefix, Prompt, Role, Sampling

LONGEST_WAIT = 8.0
LONGEST_TOTAL = 20.0
CHECK_SECONDS = 5.0
# Requests that a model of this process has at a time: two batches, so the next one is full.
LOCAL_SLOTS = 32
# Statuses of a wrong key, quota, model name or address, which only the operator can change.
OPERATOR_STATUSES = (401, 402, 403, 404, 405, 407, 429)
NO_MODEL_LIST = (404, 405, 501)
ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
MAX_STOPS = 16
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


class HttpUpstream:
    """OpenAI, vLLM, Ollama, another gateway: any server of `{base_url}/chat/completions`.

    Forwards a client's body unchanged except for `model`, `extra_body` (the operator's fields win;
    None leaves a field out), `max_tokens` if the body has no token limit, and the name of that
    limit if the server rejects it. `timeout` covers one attempt to its last byte, in seconds.
    `retries` come after the first attempt, and only before the first content of a stream;
    `concurrency` limits concurrent requests, streams included. `base_url` and
    `api_key` default to OPENAI_BASE_URL and OPENAI_API_KEY. Raises `RequestRejectedError` for
    errors of the client's request, `MisconfiguredError` for those that only the operator can fix;
    `is_misconfigured` is then True until the next answer. Their hints name `key_variable`, the
    environment variable of the key.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float = 300.0,
        retries: int | RetryPolicy = 2,
        concurrency: int = 256,
        extra_body: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        max_tokens: int | None = None,
        breaker: Breaker | None = None,
        key_variable: str | None = None,
    ) -> None:
        self.model = model
        self.breaker = breaker or Breaker()
        self._timeout = timeout
        self._client = ChatClient(
            model,
            Endpoint.locate(base_url, api_key, headers),
            timeout,
            retries
            if isinstance(retries, RetryPolicy)
            # A client is waiting, and another tier may answer: shorter waits than for a batch.
            else RetryPolicy(retries + 1, longest_wait=LONGEST_WAIT, longest_total=LONGEST_TOTAL),
            concurrency,
            self.breaker,
        )
        self._extra = dict(extra_body or {})
        self._max_tokens, self._key_variable = max_tokens, key_variable
        # None removes a field that the client may have sent.
        absent = [name for name, value in self._extra.items() if value is None]
        self._left_out = ("stream", "stream_options", *absent)
        self.is_misconfigured = False

    @property
    def base_url(self) -> str:
        """Base URL without credentials."""
        return self._client.base_url

    def __repr__(self) -> str:
        return f"HttpUpstream({self.model!r}, base_url={self.base_url!r})"

    async def complete(self, body: Body, /) -> ChatCompletion:
        with self._operator_errors():
            completed = await self._client.complete(self._fields(body))
        self.is_misconfigured = False
        return completed

    async def stream(self, body: Body, /) -> AsyncGenerator[bytes]:
        """Yield the JSON of each chunk. Always requests the usage and ignores
        `include_usage` of the client."""
        given = body.get("stream_options")
        options = {**(given if isinstance(given, dict) else {}), "include_usage": True}
        fields = self._fields(body) | {"stream": True, "stream_options": options}
        with self._operator_errors():
            async with aclosing(self._client.stream(fields)) as events:
                async for payload in events:
                    self.is_misconfigured = False  # the first chunk proves that key and model work
                    yield payload

    async def check(self) -> None:
        """Request the list of models; a server without one counts as up."""
        self.breaker.check()
        try:
            with suppress(GarbledError):
                await self._model_list("/models")
        except RejectedError as error:
            raise self._misconfigured(error) if _is_the_operators(error) else error from None

    async def models(self) -> list[str] | None:
        """Return the ids of the server's models, None without a list. A model that is not in it,
        such as one on another page, is requested by its name. Raises `EndpointError`, also for a
        reply that is no list, such as a web page."""
        found = await self._model_list("/models")
        if found and self.model not in found:
            with suppress(EndpointError):
                found += await self._model_list(f"/models/{self.model}") or []
        return found

    async def _model_list(self, path: str) -> list[str] | None:
        response = await self._client.get(path, min(CHECK_SECONDS, self._timeout))
        if response.status in NO_MODEL_LIST:
            return None
        body = error_body(response.payload)
        if response.status >= 300:
            raise self._client.error(response.status, body, response.headers)
        if failure := reported_failure(body):
            raise self._client.error(*failure)
        rows = [body] if body.get("object") == "model" else body.get("data")
        if not isinstance(rows, list):
            raise GarbledError(f"{self.base_url} sent no list of models", hint=WRONG_PROTOCOL)
        return [id for row in rows if isinstance(id := get(row, "id"), str)]

    async def aclose(self) -> None:
        await self._client.aclose()

    def _fields(self, body: Body) -> dict[str, object]:
        fields = {**body, "model": self.model, **self._extra}
        has_limit = any(fields.get(name) is not None for name in LIMITS)
        if self._max_tokens is not None and not has_limit:
            fields["max_tokens"] = self._max_tokens
        for name in self._left_out:
            fields.pop(name, None)
        return fields

    @contextmanager
    def _operator_errors(self) -> Iterator[None]:
        try:
            yield
        except RejectedError as error:
            if not _is_the_operators(error):
                raise
            self.is_misconfigured = True
            raise self._misconfigured(error) from error

    def _misconfigured(self, error: RejectedError) -> MisconfiguredError:
        return MisconfiguredError(error, tier_fix(error, self._key_variable, self.model)[1])


def _is_the_operators(error: Exception) -> bool:
    status = (error.status if isinstance(error, RejectedError) else None) or 0
    return status in OPERATOR_STATUSES or 300 <= status < 400


@runtime_checkable
class Loads(Protocol):
    async def load(self) -> None: ...


class LocalUpstream:
    """Answers with a generator. `sampling` gives what a body leaves out: without a temperature the
    answer is greedy, unlike OpenAI's.

    A body that needs an unsupported feature (tools, JSON formats, output constraints,
    log-probabilities, audio) or has an invalid value raises `PromptRejectedError`; an unreadable
    image raises `ImageError`. Other sampling parameters, such as `top_p`, have no effect. A stream
    starts when the answer is complete.
    """

    def __init__(self, generator: Generator, *, sampling: Sampling | None = None) -> None:
        self._generator = generator
        self._sampling = sampling or Sampling()
        self.decoding = DecodeBudget()
        self._slots = FairSemaphore.of_slots(LOCAL_SLOTS)

    @property
    def model(self) -> str:
        return self._generator.name

    def __repr__(self) -> str:
        return f"LocalUpstream({self.model!r})"

    async def complete(self, body: Body, /) -> ChatCompletion:
        sampling = _sampling_of(body, self._sampling)
        prompt = await self._reduced(await _prompt(body))
        async with self._slots.hold():
            reply = await self._generator.generate(prompt, sampling)
        payload = orjson.dumps(completion_json(reply))
        return ChatCompletion(payload, reply.model, reply.completions, reply.usage)

    async def stream(self, body: Body, /) -> AsyncGenerator[bytes]:
        completed = await self.complete(body)
        for payload in to_chunks(completed.payload, include_usage=True):
            yield payload

    def with_prefix(self, prefix: Prefix, /) -> LocalUpstream:
        """Return an upstream of the same model that puts a KV prefix in front of every prompt."""
        generator = cast(PrefixGenerator, self._generator).with_prefix(prefix)
        upstream = LocalUpstream(generator, sampling=self._sampling)
        upstream.decoding, upstream._slots = self.decoding, self._slots
        return upstream

    async def check(self) -> None:
        """Loads the model if it is not loaded yet."""
        if isinstance(self._generator, Loads):
            await self._generator.load()

    async def aclose(self) -> None:
        await self._generator.aclose()

    async def _reduced(self, prompt: Prompt) -> Prompt:
        """Return the prompt with large images reduced as for an endpoint. They are decoded here,
        within the budget, because the model's only thread would delay all other requests."""
        large = {image for image in prompt.images if image.is_large}
        if not large:
            return prompt

        def encode() -> dict[object, Image]:
            return {image: Image.from_data_url(image.data_url) for image in large}

        small = await self.decoding.run(large, partial(asyncio.to_thread, encode), Image.wire_cost)
        messages = (
            replace(message, parts=tuple(small.get(part, part) for part in message.parts))
            for message in prompt.messages
        )
        return replace(prompt, messages=tuple(messages))


async def _prompt(body: Body) -> Prompt:
    """Return the prompt of a body; decode data URLs off the event loop. Raises `ApiError`,
    `ImageError`, and `PromptRejectedError` for anything that the model does not support."""
    messages = parse_messages(body.get("messages"))

    def convert() -> Prompt:
        return Prompt(tuple(_message(one, f"messages[{i}]") for i, one in enumerate(messages)))

    if any(message.images for message in messages):  # text alone is not worth a thread
        return await asyncio.to_thread(convert)
    return convert()


def _message(message: ChatMessage, where: str) -> Message:
    role = ROLES.get(message.role)
    if role is None:
        raise PromptRejectedError(
            f"{where}.role is not supported by this model, got {message.role!r}",
            hint=f"use one of {', '.join(ROLES)}",
        )
    if message.raw.get("tool_calls") or message.raw.get("function_call"):
        raise _unsupported(f"{where}.tool_calls")
    if message.parts is None:
        raise PromptRejectedError(
            f"{where}.content is missing", hint="send a text or a list of parts"
        )
    return Message(role, tuple(_part(part, where, i) for i, part in enumerate(message.parts)))


def _part(part: Part, where: str, number: int) -> str | Image:
    if isinstance(part, TextPart):
        return part.text
    if isinstance(part, OtherPart):
        raise PromptRejectedError(
            f"{part.param} is not supported by this model, got a part of type {part.kind[:64]!r}",
            hint="send parts of type text and image_url",
        )
    if not part.url.startswith("data:"):
        raise PromptRejectedError(
            f"{part.param} is not a data URL", hint="send data:image/png;base64,..."
        )
    return Image.from_data_url(part.url, source=f"{where}.content[{number}]")


def _sampling_of(body: Body, base: Sampling) -> Sampling:
    for name in UNSUPPORTED:
        if body.get(name) not in (None, False, [], 0, "none"):
            raise _unsupported(name)
    given = {name: value for name, value in body.items() if value is not None}
    response_format = given.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type") != "text":
        raise _unsupported("response_format")
    if given.get("modalities", ["text"]) != ["text"]:
        raise _unsupported("modalities")
    for name, value in given.items():
        if (kind := FIELDS.get(name)) and not kind.fits(value):
            kind.reject(name, value)
    fields: dict[str, Any] = {
        name: given[name]
        for name in ("temperature", "max_tokens", "n", "seed", "stop")
        if name in given
    }
    if "temperature" in fields:
        fields["temperature"] = float(fields["temperature"])
    if "max_completion_tokens" in given:
        fields["max_tokens"] = given["max_completion_tokens"]
    if "stop" in fields:
        stops = [fields["stop"]] if isinstance(fields["stop"], str) else fields["stop"]
        if len(stops) > MAX_STOPS or "" in stops:
            raise PromptRejectedError(
                f"stop must have at most {MAX_STOPS} texts, none empty, got {len(stops)}",
                hint="send fewer stop texts, and no empty one",
            )
        fields["stop"] = tuple(stops)
    return replace(base, **fields)


def _unsupported(name: str) -> PromptRejectedError:
    return PromptRejectedError(
        f"{name} is not supported by this model",
        hint="leave it out, or use a model with an HTTP endpoint",
    )


class TimedUpstream:
    """Upstream that measures the seconds of replies, of a stream those up to its first event."""

    def __init__(self, upstream: Upstream, seconds: Histogram) -> None:
        self._upstream, self._seconds = upstream, seconds

    @property
    def model(self) -> str:
        return self._upstream.model

    def with_prefix(self, prefix: Prefix, /) -> TimedUpstream:
        return TimedUpstream(
            cast(PrefixUpstream, self._upstream).with_prefix(prefix), self._seconds
        )

    async def complete(self, body: Body, /) -> ChatCompletion:
        with self._seconds.time():
            return await self._upstream.complete(body)

    async def stream(self, body: Body, /) -> AsyncGenerator[bytes]:
        async with aclosing(self._upstream.stream(body)) as events:
            with self._seconds.time():  # until the first event, as a client measures it
                first = await anext(events, None)
            if first is not None:
                yield first
                async for event in events:
                    yield event

    async def check(self) -> None:
        await self._upstream.check()

    async def aclose(self) -> None:
        await self._upstream.aclose()
