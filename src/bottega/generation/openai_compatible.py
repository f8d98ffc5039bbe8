"""Models behind an HTTP endpoint that speaks the OpenAI chat-completions protocol."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from copy import copy

import orjson
from yarl import URL

from bottega.errors import (
    GarbledError,
    RejectedError,
    SettingError,
)
from bottega.generation.http_client import CALL, Connections, Endpoint, Retrying, exchange, failed
from bottega.generation.lru import Recent
from bottega.generation.openai_format import (
    WRONG_PROTOCOL,
    JSONObject,
    add_usage,
    parse_completions,
    parse_json,
    parse_usage,
    reported_failure,
    request_body,
    server_message,
)
from bottega.image import Image
from bottega.types import Completion, Prompt, Reply, Sampling, Usage

Samples = tuple[tuple[Completion, ...], Usage]
KEEP_ENCODED = 64 * 1024 * 1024
ONE_CHOICE_ONLY = re.compile(
    r"(?i)(?<!\w)['\"`]?n['\"`]?(?!\w) (must|should|>|is not)|one .*choice"
)


class OpenAIGenerator:
    """OpenAI, vLLM, SGLang, Ollama, `transformers serve`, a gateway: whatever serves
    `{base_url}/chat/completions`.

    `base_url` and `api_key` default to OPENAI_BASE_URL and OPENAI_API_KEY; a server on loopback
    needs no key. `timeout` covers one attempt to the last byte of its reply, `retries` come on
    top of the first attempt (pass a `Retrying` to set the waits), `concurrency` limits requests
    under way, not those that wait for a retry. `extra_body` is merged into every request; None
    leaves a field out (`{"temperature": None}`). One instance serves any number of event loops.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float = 120.0,
        retries: int | Retrying = 4,
        concurrency: int = 16,
        extra_body: Mapping[str, object] | None = None,
    ) -> None:
        if not timeout > 0 or concurrency < 1:
            raise SettingError(
                f"timeout={timeout} and concurrency={concurrency} must be positive",
                hint="leave them out for 120 seconds and 16 requests",
            )
        self.name = model
        self._endpoint = Endpoint.locate(base_url, api_key)
        self._connections = Connections(self._endpoint, timeout, concurrency)
        self._retry = retries if isinstance(retries, Retrying) else Retrying(attempts=retries + 1)
        self._extra = dict(extra_body or {})
        self._encoded: Recent[str] = Recent(KEEP_ENCODED, size=len)
        self._limit_field = "max_tokens"
        self._many_choices = True

    @property
    def base_url(self) -> str:
        """Without credentials."""
        return self._endpoint.shown

    @property
    def fingerprint(self) -> str:
        """What decides the output beside prompt and sampling."""
        extra = orjson.dumps(self._extra, option=orjson.OPT_SORT_KEYS).decode()
        return f"{self.name} {extra}" if self._extra else self.name

    def __repr__(self) -> str:
        return f"OpenAIGenerator({self.name!r}, base_url={self.base_url!r})"

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        start = time.perf_counter()
        completions, usage = await self._samples(prompt, sampling)
        return Reply(self.name, completions, usage, time.perf_counter() - start)

    def asking(self, extra_body: Mapping[str, object]) -> OpenAIGenerator:
        """The same endpoint over the same connections, with more in every request."""
        other = copy(self)
        other._extra = {**self._extra, **extra_body}
        return other

    async def list_models(self) -> list[str]:
        """The ids that the endpoint serves, sorted."""
        body = await self._retry(lambda: self._exchange("GET", self._endpoint.url("/models")))
        rows = body.get("data")
        if not isinstance(rows, list):
            raise GarbledError(f"{self.base_url} sent no list of models", hint=WRONG_PROTOCOL)
        return sorted(str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row)

    async def aclose(self) -> None:
        await self._connections.close()

    async def _samples(self, prompt: Prompt, sampling: Sampling) -> Samples:
        """Many servers ignore `n`: what is missing is asked for again, in equal pieces, at once."""
        most = sampling.n if self._many_choices else 1
        found, usage = await self._call(prompt, _piece(sampling, 0, most))
        while (missing := sampling.n - len(found)) > 0:
            size, first = max(1, min(most, len(found))), len(found)
            pieces = [
                _piece(sampling, start, size) for start in range(first, first + missing, size)
            ]
            for more, spent in await self._together(prompt, pieces):
                found, usage = found + more, add_usage(usage, spent)
        return found[: sampling.n], usage

    async def _together(self, prompt: Prompt, pieces: list[Sampling]) -> list[Samples]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._call(prompt, piece)) for piece in pieces]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _call(self, prompt: Prompt, sampling: Sampling) -> Samples:
        limit_field = self._limit_field
        try:
            return await self._ask(prompt, sampling, limit_field)
        except RejectedError as error:
            if error.status not in (400, 422):
                raise
            # Two known dialects; what this server speaks is remembered.
            if limit_field == "max_tokens" and "max_completion_tokens" in str(error):
                self._limit_field = "max_completion_tokens"
            elif sampling.n > 1 and ONE_CHOICE_ONLY.search(str(error)):
                self._many_choices = False
                sampling = _piece(sampling, 0, 1)
            else:
                raise
        return await self._call(prompt, sampling)

    async def _ask(self, prompt: Prompt, sampling: Sampling, limit_field: str) -> Samples:
        url, body = self._endpoint.url(CALL), b""

        async def attempt() -> Samples:
            nonlocal body
            async with (await self._connections.here()).slots:
                # Written only now: a thousand waiting requests must not hold a thousand bodies.
                body = body or await self._body(prompt, sampling, limit_field)
                reply = await self._exchange("POST", url, body)
            return parse_completions(reply, self.base_url), parse_usage(reply)

        return await self._retry(attempt)

    async def _body(self, prompt: Prompt, sampling: Sampling, limit_field: str) -> bytes:
        arguments = (self.name, prompt, sampling, limit_field, self._extra, self._data_url)
        if any(isinstance(part, Image) for message in prompt.messages for part in message.parts):
            return await asyncio.to_thread(request_body, *arguments)
        return request_body(*arguments)

    def _data_url(self, image: Image) -> str:
        """A knowledge base hands out new objects for each query: they do not remember theirs."""
        url = self._encoded.get(image.sha256)
        if url is None:
            self._encoded.put(image.sha256, url := image.data_url)
        return url

    async def _exchange(self, method: str, url: URL, body: bytes | None = None) -> JSONObject:
        connection = await self._connections.here()
        response = await exchange(connection.session, method, url, body, self.base_url)
        if response.status >= 300:
            said = server_message(response.payload)
            raise failed(self._endpoint, self.name, response.status, said, response.headers)
        found = parse_json(response.payload, self.base_url)
        if failure := reported_failure(found):
            raise failed(self._endpoint, self.name, *failure)
        return found


def _piece(sampling: Sampling, start: int, size: int) -> Sampling:
    """`size` of the samples from number `start`. Equal seeds would give equal samples."""
    seed = None if sampling.seed is None else sampling.seed + start
    fields = vars(sampling) | {"n": min(size, sampling.n - start), "seed": seed}
    return Sampling(**fields)
