"""Upstream that forwards bodies to an endpoint of the chat-completions protocol."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager

from bottega.errors import RejectedError, SettingError
from bottega.gateway.errors import MisconfiguredError
from bottega.openai_api.client import Breaker, ChatClient, RetryPolicy
from bottega.openai_api.endpoint import Endpoint
from bottega.openai_api.request import Body
from bottega.openai_api.response import ChatCompletion, error_body
from bottega.openai_api.transport import Timeouts

# A client is waiting, and another tier may answer: shorter waits than for a batch.
LONGEST_WAIT = 8.0
LONGEST_TOTAL = 20.0
CHECK_SECONDS = 5.0
# Statuses of a wrong key, quota, model name or address, which only the operator can change.
OPERATOR_STATUSES = (401, 402, 403, 404, 405, 407, 429)
NO_MODEL_LIST = (404, 405, 501)


class HttpUpstream:
    """OpenAI, vLLM, Ollama, another gateway: any server of `{base_url}/chat/completions`.

    Forwards a client's body unchanged except for `model`, `extra_body` (the operator's fields win;
    None leaves a field out) and the name of the token limit if the server rejects the client's.
    `retries` come after the first attempt, and only before a client was sent anything;
    `concurrency` limits concurrent requests, streams included. `base_url` and `api_key` default to
    OPENAI_BASE_URL and OPENAI_API_KEY. Raises `RequestRejectedError` for errors of the client's
    request, `MisconfiguredError` for those that only the operator can fix; `is_misconfigured` is
    then True until the next answer.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float | Timeouts = 300.0,
        retries: int | RetryPolicy = 2,
        concurrency: int = 256,
        extra_body: Mapping[str, object] | None = None,
        breaker: Breaker | None = None,
    ) -> None:
        if concurrency < 1:
            raise SettingError(
                f"concurrency must be at least 1, got {concurrency}", hint="set concurrency = 1"
            )
        self.model = model
        self.breaker = breaker or Breaker()
        self._timeouts = Timeouts.of(timeout)
        self._client = ChatClient(
            model,
            Endpoint.locate(base_url, api_key),
            self._timeouts,
            retries if isinstance(retries, RetryPolicy) else _retry_policy(retries),
            concurrency,
            self.breaker,
        )
        self._extra = dict(extra_body or {})
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
                    self.is_misconfigured = False
                    yield payload

    async def check(self) -> None:
        """Request the list of models; a server without one counts as up."""
        self.breaker.check()
        response = await self._client.get("/models", min(CHECK_SECONDS, self._timeouts.total))
        if response.status >= 300 and response.status not in NO_MODEL_LIST:
            body = error_body(response.payload)
            error = self._client.error(response.status, body, response.headers)
            raise MisconfiguredError(error) if _is_the_operators(error) else error

    async def aclose(self) -> None:
        await self._client.aclose()

    def _fields(self, body: Body) -> dict[str, object]:
        fields = {**body, "model": self.model, **self._extra}
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
            raise MisconfiguredError(error) from error


def _is_the_operators(error: Exception) -> bool:
    status = (error.status if isinstance(error, RejectedError) else None) or 0
    return status in OPERATOR_STATUSES or 300 <= status < 400


def _retry_policy(retries: int) -> RetryPolicy:
    return RetryPolicy(retries + 1, longest_wait=LONGEST_WAIT, longest_total=LONGEST_TOTAL)
