"""What an upstream's refusal is to the gateway: the client's affair or the operator's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass

import aiohttp
import orjson
from yarl import URL

from bottega.errors import (
    EndpointError,
    EndpointTimeoutError,
    GarbledError,
    RejectedError,
    ServerFailedError,
    SettingError,
)
from bottega.gateway.response_cache.replay import events
from bottega.gateway.upstreams.dialect import no_usage
from bottega.gateway.upstreams.sse import DONE, EventReader
from bottega.generation import http_client
from bottega.generation.http_client import NO_HEADERS, Endpoint, failed, shown
from bottega.generation.openai_format import (
    WRONG_PROTOCOL,
    JSONObject,
    parse_completions,
    parse_json,
    reported_failure,
    said_in,
)

# Key, quota, model name and address are the operator's; the client can mend none of them.
OPERATORS = (401, 402, 403, 404, 405, 407, 429)


class RefusedError(RejectedError):
    """The upstream refuses what the client asked. `said` is its own message without secrets;
    `kind`, `code` and `param` are its too, None where it named none."""

    def __init__(self, error: EndpointError, said: str, details: Mapping[str, str]) -> None:
        super().__init__(str(error), hint=error.hint, status=error.status)
        self.retry_after = error.retry_after
        self.said = said
        self.kind = details.get("type")
        self.code = details.get("code")
        self.param = details.get("param")


class MisconfiguredError(RejectedError):
    """The upstream refuses the gateway's key, quota, model name or address. The client gets a 502
    that names the `tier`, which whoever asked it fills in; the message is for the operator."""

    def __init__(self, error: EndpointError) -> None:
        super().__init__(str(error), hint=error.hint, status=502)
        self.retry_after = error.retry_after
        self.tier = ""

    def __str__(self) -> str:
        said = super().__str__()
        return f"tiers.{self.tier}: {said}" if self.tier else said


def upstream_error(
    endpoint: Endpoint,
    model: str,
    status: int,
    body: JSONObject,
    headers: Mapping[str, str] = NO_HEADERS,
) -> EndpointError:
    """`body` is the error's JSON, empty if there was none."""
    said = said_in(body)
    error = failed(endpoint, model, status, said, headers)
    if not isinstance(error, RejectedError):
        return error
    if status in OPERATORS or 300 <= status < 400:
        return MisconfiguredError(error)
    found = body.get("error")
    words = found.items() if isinstance(found, dict) else ()
    details = {name: shown(endpoint, word) for name, word in words if isinstance(word, str)}
    return RefusedError(error, shown(endpoint, said), details)


def error_body(payload: bytes) -> JSONObject:
    """The JSON of an error, empty if it is none: proxies like to send web pages."""
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}


def reported_body(body: JSONObject, said: str) -> JSONObject:
    """The error of a reply whose status is 200, be it of the whole or of one choice."""
    return body if body.get("error") else {"error": {"message": said}}


Fail = Callable[[int, JSONObject, Mapping[str, str]], EndpointError]
STREAMED = {"Accept": "text/event-stream", "Accept-Encoding": "identity"}
# The end of the response comes with or right after `[DONE]`; the connection can serve again then.
LINGER = 0.1


@dataclass(frozen=True)
class Timeouts:
    """Seconds: `total` to the last byte of one attempt; of a stream, `first` to the first event
    (comments that keep it alive are none) and `between` from one piece to the next."""

    total: float = 300.0
    first: float = 120.0
    between: float = 60.0

    def __post_init__(self) -> None:
        if not min(self.total, self.first, self.between) > 0:
            raise SettingError(f"{self} leaves no time", hint="use seconds above 0")

    @classmethod
    def of(cls, given: float | Timeouts) -> Timeouts:
        if isinstance(given, Timeouts):
            return given
        return cls(given, min(given, cls.first), min(given, cls.between))


class Opened:
    """`request`, then `events`, and `close` in any case: what is not read to its end is aborted."""

    def __init__(self, timeouts: Timeouts, where: str, fail: Fail) -> None:
        self._timeouts, self._where, self._fail = timeouts, where, fail
        self._response: aiohttp.ClientResponse | None = None
        self._deadline = asyncio.get_running_loop().time() + timeouts.first

    async def request(self, session: aiohttp.ClientSession, url: URL, body: bytes) -> None:
        """Raises what the status says if it is not 2xx."""
        limit = asyncio.timeout_at(self._deadline)
        try:
            async with limit:
                self._response = await session.post(
                    url,
                    data=http_client.sendable(body),
                    headers=STREAMED,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(
                        total=self._timeouts.total,
                        sock_connect=session.timeout.sock_connect,
                    ),
                )
        except (aiohttp.ClientError, OSError) as error:
            raise self._translated(error, limit, self._timeouts.first) from None
        if self._response.status >= 300:
            said = error_body(await self._whole())
            raise self._fail(self._response.status, said, self._response.headers)

    async def events(self, choices: int) -> AsyncGenerator[bytes]:
        """The JSON of each event. Raises `ServerFailedError` if the stream is cut before each of
        so many choices has ended, `GarbledError` for what is no chunk."""
        assert self._response is not None
        if "json" in (kind := self._response.content_type) or "html" in kind:
            for payload in self._unstreamed(await self._whole()):
                yield payload
            return
        reader, answer = EventReader(self._where), Answer(self._where, self._fail, choices)
        received = 0
        while piece := await self._piece(answer):
            received += len(piece)
            if received > http_client.LONGEST_MB << 20:
                raise http_client.too_long(self._where)
            for payload in reader.feed(piece):
                if payload == DONE:
                    answer.end(announced=True)
                    await self._rest()
                    return
                answer.take(payload)
                yield payload
        for payload in reader.end():
            if payload != DONE and answer.cut_short(payload):
                break
            if payload != DONE:
                yield payload
        answer.end()

    def close(self) -> None:
        if self._response is None:
            return
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()

    async def _piece(self, answer: Answer) -> bytes:
        """Some bytes, none at the end. After the answer's end only the usage can be missing:
        what fails there ends the stream."""
        assert self._response is not None
        within = self._timeouts.between
        now = asyncio.get_running_loop().time()
        limit = asyncio.timeout_at(now + within if answer.begun else self._deadline)
        try:
            async with limit:
                return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            if answer.whole:
                return b""
            waited = within if answer.begun else self._timeouts.first
            raise self._translated(error, limit, waited) from None

    async def _rest(self) -> None:
        assert self._response is not None
        content = self._response.content
        try:
            async with asyncio.timeout(LINGER):
                while not content.at_eof():
                    await content.readany()
        except (aiohttp.ClientError, OSError):
            return  # the answer is whole; `close` drops the connection

    async def _whole(self) -> bytes:
        assert self._response is not None
        limit = asyncio.timeout_at(self._deadline)
        try:
            async with limit:
                return await http_client.read_whole(self._response, self._where)
        except (aiohttp.ClientError, OSError) as error:
            raise self._translated(error, limit, self._timeouts.first) from None

    def _unstreamed(self, payload: bytes) -> list[bytes]:
        """Some servers answer at once though a stream was asked for."""
        reply = parse_json(payload, self._where)
        if failure := reported_failure(reply):
            raise self._fail(failure[0], reported_body(reply, failure[1]), {})
        parse_completions(reply, self._where)
        return list(events(orjson.dumps({"usage": no_usage(), **reply}), include_usage=True))

    def _translated(
        self, error: aiohttp.ClientError | OSError, limit: asyncio.Timeout, waited: float
    ) -> EndpointError:
        if not limit.expired():
            return http_client.translated(error, self._where, self._timeouts.total)
        return EndpointTimeoutError(
            f"{self._where} sent nothing for {waited:g} s",
            hint="raise `timeout`, or look at the server's load",
        )


class Answer:
    """What has come of an answer so far."""

    def __init__(self, where: str, fail: Fail, choices: int) -> None:
        self._where, self._fail, self._choices = where, fail, choices
        self._ended: set[str] = set()
        self.begun = False

    @property
    def whole(self) -> bool:
        return len(self._ended) >= self._choices

    def take(self, payload: bytes) -> None:
        """Raises what the event reports, and `GarbledError` for one that is no chunk."""
        chunk = parse_json(payload, self._where)
        choices = chunk.get("choices")
        if chunk.get("error") or not isinstance(choices, list):
            raise self._trouble(chunk)
        self.begun = True
        for choice in choices:
            if not isinstance(choice, dict) or choice.get("error"):
                raise self._trouble(chunk)
            if (finish := choice.get("finish_reason")) is not None:
                if finish == "error":
                    raise self._trouble(chunk)
                self._ended.add(str(choice.get("index")))

    def _trouble(self, chunk: JSONObject) -> EndpointError:
        if failure := reported_failure(chunk):
            return self._fail(failure[0], reported_body(chunk, failure[1]), {})
        return GarbledError(f"{self._where} sent an event without choices", hint=WRONG_PROTOCOL)

    def cut_short(self, payload: bytes) -> bool:
        """Whether the last event, that no empty line ended, is only a part of one."""
        try:
            orjson.loads(payload)
        except orjson.JSONDecodeError:
            return True
        self.take(payload)
        return False

    def end(self, *, announced: bool = False) -> None:
        """A server that says `[DONE]` may have sent fewer choices than it was asked for."""
        if not (self.whole or (announced and self._ended)):
            raise ServerFailedError(
                f"{self._where} cut the connection in mid-answer",
                hint="try again; look at the server's log",
            )
