"""Other APIs on top of chat completions: fields of their requests, and the common endpoint."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import orjson

from bottega.gateway.errors import note_failure
from bottega.gateway.ports import AnswerHandler, HttpReply, ReadBody, RequestRecord
from bottega.openai_api.errors import JSON_NAMES, ApiError, wrong_type
from bottega.openai_api.request import Body, require
from bottega.openai_api.streams import DONE_EVENT

T = TypeVar("T")
MESSAGE = re.compile(r"messages\[(\d+)\](?:\.content)?")


def typed(value: object, kind: type[T], where: str, expected: str = "") -> T:
    if not isinstance(value, kind):
        wrong_type(where, expected or JSON_NAMES[kind], value)
    return value


def text_field(given: Body, name: str, where: str = "") -> str:
    require(given, name, where)
    return typed(given[name], str, f"{where}.{name}" if where else name)


def optional_field(given: Body, name: str, kind: type[T], where: str = "") -> T | None:
    value = given.get(name)
    return None if value is None else typed(value, kind, f"{where}.{name}" if where else name)


def wrong_value(param: str, expected: str, value: object) -> NoReturn:
    shown = repr(value[:64]) if isinstance(value, str) else JSON_NAMES.get(type(value), "an object")
    if isinstance(value, int | float) and not isinstance(value, bool):
        shown = str(value)
    message = f"Invalid '{param}': expected {expected}, got {shown}."
    raise ApiError(message, code="invalid_value", param=param)


def unsupported(message: str, param: str, hint: str) -> ApiError:
    return ApiError(message, code="unsupported_parameter", param=param, hint=hint)


def type_name(kind: object) -> str:
    """Return the name of a type field for an error. A deeply nested value has no repr."""
    return repr(kind[:64]) if isinstance(kind, str) else JSON_NAMES[type(kind)]


def encode_body(body: object) -> bytes:
    """Return the JSON of a body of a client, or of a part of it. Raises `ApiError`: orjson parses
    deeper nesting than it encodes."""
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError as error:
        message = "the request has brackets nested too deeply"
        raise ApiError(message, code="limit_exceeded", hint="send less") from error


def object_field(found: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = found.get(name)
    return value if isinstance(value, dict) else {}


def call_arguments(value: object) -> str:
    """Return the arguments of a tool call as text; some servers send an object."""
    if isinstance(value, str):
        return value
    return "" if value is None else orjson.dumps(value).decode()


def first_choice(chunk: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of the first choice, the only one that these APIs have; some servers omit
    the index."""
    return (one for one in chunk.get("choices") or () if not one.get("index"))


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of a message, or of a piece of it; the deprecated `function_call` is
    one. Anything else that a server sends there is skipped."""
    calls, function = message.get("tool_calls"), message.get("function_call")
    if not (calls and isinstance(calls, list)):
        calls = [{"index": 0, "function": function}] if isinstance(function, dict) else []
    return [call for call in calls if isinstance(call, dict)]


class Translation(Protocol):
    """Chat body of a request. `origins` are the paths of the contents of its messages in the
    request."""

    @property
    def body(self) -> Body: ...
    @property
    def origins(self) -> Sequence[str]: ...


class EventTranslator(Protocol):
    """Translator of a chat stream. Each method yields the events to send next. `final` is the whole
    reply after `end`, None if the API has no stored replies."""

    @property
    def final(self) -> bytes | None: ...

    def take(self, chunk: Mapping[str, Any], /) -> Iterator[bytes]: ...
    def end(self) -> Iterator[bytes]: ...
    def fail(self, error: Mapping[str, object], /) -> Iterator[bytes]: ...


TranslationT = TypeVar("TranslationT", bound=Translation)
Translate = Callable[[Body, RequestRecord], Awaitable[TranslationT]]


def stateless(translate: Callable[[Body], TranslationT]) -> Translate[TranslationT]:
    """Return a translation that depends on the request alone."""

    async def translated(given: Body, record: RequestRecord) -> TranslationT:
        return translate(given)

    return translated


@dataclass(frozen=True)
class FieldNames:
    """Names of an API for the fields of a chat body. `messages` is the field of its messages,
    `reference` the name of its documentation."""

    names: Mapping[str, str]
    messages: str
    reference: str

    def renamed(self, error: ApiError, origins: Sequence[str] | None) -> ApiError:
        """Return an error about the chat body with the field names of the API. Without `origins` it
        is about the request itself, and has them already."""

        def origin(found: re.Match[str]) -> str:
            number = int(found[1])
            paths = origins or ()
            return paths[number] if number < len(paths) else self.messages

        message, param = str(error), error.param
        if param is not None and origins is not None:
            pattern = re.compile("|".join(map(re.escape, self.names)))
            param = pattern.sub(lambda found: self.names[found[0]], MESSAGE.sub(origin, param))
            message = message.replace(f"'{error.param}'", f"'{param}'")
        return ApiError(
            message,
            status=error.status,
            type=error.type,
            code=error.code,
            param=param,
            headers=error.headers,
            hint=error.hint.replace("chat-completions reference", self.reference),
        )


@dataclass(frozen=True)
class TranslatedEndpoint(Generic[TranslationT]):
    """Handler of another API on top of `chat`, the handler of chat completions. `translate` raises
    `ApiError`; `reply` converts a complete reply, `events` begins a stream. `store` is awaited with
    each complete reply before the client gets its end, for streams with `EventTranslator.final`."""

    chat: AnswerHandler
    translate: Translate[TranslationT]
    reply: Callable[[bytes, RequestRecord, TranslationT], bytes]
    events: Callable[[RequestRecord, TranslationT], EventTranslator]
    fields: FieldNames
    store: Callable[[bytes, RequestRecord, TranslationT], Awaitable[None]] | None = None

    async def answer(
        self, record: RequestRecord, headers: Mapping[str, str], body: ReadBody
    ) -> HttpReply:
        # The chat handler reads the body only after it has checked the key.
        translated: list[TranslationT] = []

        async def chat_body() -> bytes:
            raw = await body()
            try:
                given = orjson.loads(raw)
            except orjson.JSONDecodeError:
                return raw  # the chat handler reports the error
            if not isinstance(given, dict):
                return raw
            translated.append(await self.translate(given, record))
            return encode_body(translated[0].body)

        try:
            reply = await self.chat(record, headers, chat_body)
        except ApiError as error:
            origins = translated[0].origins if translated else None
            raise self.fields.renamed(error, origins) from error
        translation = translated[0]
        if reply.events is None:
            payload = self.reply(reply.payload, record, translation)
            if self.store is not None:
                await self.store(payload, record, translation)
            return replace(reply, payload=payload)
        events = self.events(record, translation)
        return replace(reply, events=self._translated(reply.events, events, record, translation))

    async def _translated(
        self,
        chunks: AsyncGenerator[bytes],
        events: EventTranslator,
        record: RequestRecord,
        translation: TranslationT,
    ) -> AsyncGenerator[bytes]:
        try:
            async for chunk in chunks:
                if chunk == DONE_EVENT:
                    ended = list(events.end())
                    # First: a client may use a response as soon as it has read its end.
                    if self.store is not None and events.final is not None:
                        await self.store(events.final, record, translation)
                    for event in ended:
                        yield event
                elif chunk.startswith(b":"):  # a comment
                    yield chunk
                else:
                    data = orjson.loads(chunk.removeprefix(b"data: "))
                    failed = isinstance(data.get("error"), dict)
                    for event in events.fail(data["error"]) if failed else events.take(data):
                        yield event
        except Exception as error:
            if not record.streamed:
                raise  # the client gets the status
            failure = note_failure(record, error)
            for event in events.fail(orjson.loads(failure.body)["error"]):
                yield event
        finally:
            await chunks.aclose()
