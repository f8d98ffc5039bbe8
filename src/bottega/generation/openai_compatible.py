"""Models behind OpenAI-compatible endpoints, by chat or by text completions."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import Self

import orjson

from bottega._util.event_loops import gather_or_cancel
from bottega.errors import GarbledError, RejectedError, SettingError
from bottega.image import Image
from bottega.openai_api.client import ChatClient, Convert, Fields, RetryPolicy
from bottega.openai_api.endpoint import CHAT_PATH, COMPLETIONS_PATH, Endpoint
from bottega.openai_api.errors import WRONG_PROTOCOL, JSONObject
from bottega.openai_api.request import data_url_cache, messages_json, sampling_fields
from bottega.openai_api.response import get
from bottega.types import Message, Prompt, Reply, Samples, Sampling, Usage

ONE_CHOICE_ONLY = re.compile(
    r"(?i)(?<!\w)['\"`]?n['\"`]?(?!\w) (must|should|>|is not)|one .*choice"
)

QUESTION, ANSWER = "Question:", "Answer:"
NEXT_QUESTION = f"\n{QUESTION}"
MAX_STOPS = 4  # of OpenAI's protocol
BLANK_LINES = re.compile(r"\n\s*\n")


class OpenAIGenerator:
    """OpenAI, vLLM, SGLang, Ollama, `transformers serve`, a gateway: any server of
    `{base_url}/chat/completions`.

    `base_url` and `api_key` default to OPENAI_BASE_URL and OPENAI_API_KEY; a server on loopback
    needs no key. `timeout` covers one attempt to the last byte of its reply, `retries` come after
    the first attempt (pass a `RetryPolicy` to set the waits), `concurrency` limits concurrent
    requests, without those that wait for a retry. `extra_body` is merged into every request; None
    leaves a field out (`{"temperature": None}`). Every request has the `headers`. One instance
    serves any number of event loops.
    """

    path = CHAT_PATH
    convert: Convert | None = None  # turns a reply into a chat completion
    name_prefix = ""  # distinguishes the protocol in `name`

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float = 120.0,
        retries: int | RetryPolicy = 4,
        concurrency: int = 16,
        extra_body: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.name = self.name_prefix + model
        policy = retries if isinstance(retries, RetryPolicy) else RetryPolicy(attempts=retries + 1)
        endpoint = Endpoint.locate(base_url, api_key, headers)
        self._client = ChatClient(
            model, endpoint, timeout, policy, concurrency, path=self.path, convert=self.convert
        )
        self._extra = dict(extra_body or {})
        self._data_url = data_url_cache()
        self._many_choices = True

    @property
    def base_url(self) -> str:
        """Base URL without credentials."""
        return self._client.base_url

    @property
    def fingerprint(self) -> str:
        """Name and extra fields, which decide the output together with prompt and sampling."""
        extra = orjson.dumps(self._extra, option=orjson.OPT_SORT_KEYS).decode()
        return f"{self.name} {extra}" if self._extra else self.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._client.model!r}, base_url={self.base_url!r})"

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        start = time.perf_counter()
        completions, usage = await self._samples(prompt, sampling)
        return Reply(self.name, completions, usage, time.perf_counter() - start)

    def with_extra_body(self, extra_body: Mapping[str, object]) -> Self:
        """Return a generator with more fields in every request, over the same connections."""
        other = copy(self)
        other._extra = {**self._extra, **extra_body}
        return other

    async def list_models(self) -> list[str]:
        """Return the ids that the endpoint serves, sorted."""
        body = await self._client.get_json("/models")
        rows = body.get("data")
        if not isinstance(rows, list):
            raise GarbledError(f"{self.base_url} sent no list of models", hint=WRONG_PROTOCOL)
        return sorted(str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _samples(self, prompt: Prompt, sampling: Sampling) -> Samples:
        """Return `n` samples. Many servers ignore `n`: missing samples are requested in equal
        pieces, concurrently."""
        max_choices = sampling.n if self._many_choices else 1
        found, usage = await self._call(prompt, _piece(sampling, 0, max_choices))
        while (missing := sampling.n - len(found)) > 0:
            size, first = max(1, min(max_choices, len(found))), len(found)
            starts = range(first, first + missing, size)
            pieces = (self._call(prompt, _piece(sampling, start, size)) for start in starts)
            for more, spent in await gather_or_cancel(pieces):
                found, usage = found + more, usage + spent
        return found[: sampling.n], usage

    async def _call(self, prompt: Prompt, sampling: Sampling) -> Samples:
        fields = self._fields(sampling)
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            reply = await self._client.complete(given, partial(self._encode, prompt), prompt)
        except RejectedError as error:
            one_only = error.status in (400, 422) and ONE_CHOICE_ONLY.search(str(error))
            if sampling.n == 1 or not one_only:
                raise
            self._many_choices = False  # remembered for later requests
            return await self._call(prompt, _piece(sampling, 0, 1))
        return reply.completions, reply.usage or Usage()

    def _fields(self, sampling: Sampling) -> Fields:
        """Return the fields of the body except the prompt; fields with None are left out."""
        return {"model": self._client.model, **sampling_fields(sampling), **self._extra}

    def _content(self, prompt: Prompt) -> Fields:
        """Return the fields with the prompt. Blocks while images are encoded."""
        return {"messages": messages_json(prompt.messages, self._data_url)}

    async def _encode(self, prompt: Prompt, fields: Fields) -> bytes:
        def encode() -> bytes:
            return orjson.dumps({**self._content(prompt), **fields})

        if prompt.images:
            return await asyncio.to_thread(encode)
        return encode()


def _piece(sampling: Sampling, start: int, size: int) -> Sampling:
    """Return `size` of the samples from number `start`, with seeds of their own: equal seeds would
    give equal samples."""
    seed = None if sampling.seed is None else sampling.seed + start
    fields = vars(sampling) | {"n": min(size, sampling.n - start), "seed": seed}
    return Sampling(**fields)


class OpenAICompletionsGenerator(OpenAIGenerator):
    """Generator for base models at `{base_url}/completions`: vLLM, llama.cpp, Ollama and others.

    It has the settings of `OpenAIGenerator`. The prompt is text (`render_turns`), and a reply
    ends where the model begins the next question. Its name is `completions:MODEL`. A prompt with an
    image raises `SettingError`.
    """

    turns_only = True  # demonstrations are turns: the model continues their pattern

    path = COMPLETIONS_PATH
    name_prefix = "completions:"

    @staticmethod
    def convert(body: JSONObject) -> JSONObject:
        return to_chat(body)

    def _fields(self, sampling: Sampling) -> Fields:
        """Return the fields of the body. `logprobs` is a number in this protocol."""
        fields = super()._fields(sampling)
        if len(sampling.stop) < MAX_STOPS and "stop" not in self._extra:
            fields["stop"] = [*sampling.stop, NEXT_QUESTION]
        if fields.get("logprobs") is True:
            fields["logprobs"] = 1
        return fields

    def _content(self, prompt: Prompt) -> Fields:
        return {"prompt": render_turns(prompt.messages)}


def render_turns(messages: Sequence[Message]) -> str:
    """Return the messages as text that ends with `Answer:`.

    A user turn becomes `Question: ...` and an assistant turn `Answer: ...`, with a blank line after
    it. A system turn, or a user turn before another one (a passage), is a paragraph. Blank lines in
    turns are removed. Raises `SettingError` for images.
    """
    roles = [message.role for message in messages]
    parts: list[str] = []
    for index, message in enumerate(messages):
        text = BLANK_LINES.sub("\n", _text(message).strip())
        following = roles[index + 1] if index + 1 < len(roles) else "assistant"
        if message.role == "assistant":
            parts.append(f"{ANSWER} {text.removeprefix(ANSWER).lstrip()}\n\n")
        elif message.role == "user" and following == "assistant":
            parts.append(f"{QUESTION} {text}\n")
        else:
            parts.append(f"{text}\n\n")
    # No space at the end: the token of an answer's first word includes the space.
    return "".join(parts) + ANSWER


def _text(message: Message) -> str:
    texts = [part for part in message.parts if isinstance(part, str)]
    if any(isinstance(part, Image) for part in message.parts):
        raise SettingError(
            "text completion reads no images, got a prompt with an image",
            hint="set --model openai:NAME for a vision model with a chat template",
        )
    return "\n".join(texts)


def to_chat(body: JSONObject) -> JSONObject:
    """Return a text completion as the chat completion with the same texts, log-probabilities and
    usage. A choice without text stays unchanged: the parser of chat completions rejects it."""
    choices = body.get("choices")
    if not isinstance(choices, list):
        return body
    return {**body, "choices": [_chat_choice(choice) for choice in choices]}


def _chat_choice(choice: object) -> object:
    text = get(choice, "text")
    if not isinstance(choice, dict) or not isinstance(text, str):
        return choice
    values = get(get(choice, "logprobs"), "token_logprobs")
    tokens = [{"logprob": value} for value in values] if isinstance(values, list) else []
    message = {"role": "assistant", "content": text.strip()}
    return {**choice, "message": message, "logprobs": {"content": tokens} if tokens else None}
