"""Generator for endpoints of the OpenAI chat-completions protocol."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Self

import orjson

from bottega._util.event_loops import gather_or_cancel
from bottega.errors import GarbledError, RejectedError
from bottega.openai_api.client import ChatClient, Convert, Fields, RetryPolicy
from bottega.openai_api.endpoint import CHAT_PATH, Endpoint
from bottega.openai_api.errors import WRONG_PROTOCOL
from bottega.openai_api.request import data_url_cache, messages_json, sampling_fields
from bottega.types import Prompt, Reply, Samples, Sampling, Usage

ONE_CHOICE_ONLY = re.compile(
    r"(?i)(?<!\w)['\"`]?n['\"`]?(?!\w) (must|should|>|is not)|one .*choice"
)


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
