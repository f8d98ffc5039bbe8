"""OpenAI's Responses API without stored responses. Each request is translated into a chat
completion, so keys, limits, routes, examples and the response cache apply as usual."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import orjson

from bottega.gateway.endpoint import Answer, Reply, RequestRecord
from bottega.gateway.responses.input import ChatTranslation, translate
from bottega.gateway.responses.output import ResponseEvents, ResponseTemplate, response_body
from bottega.openai_api.errors import ApiError
from bottega.openai_api.streams import DONE_EVENT

MESSAGE = re.compile(r"messages\[(\d+)\](?:\.content)?")
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    ".image_url.url": ".image_url",
}
NAME_PATTERN = re.compile("|".join(map(re.escape, NAMES)))


@dataclass(frozen=True)
class ResponsesEndpoint:
    """Handler of the Responses API on top of `chat`, the handler of chat completions."""

    chat: Answer

    async def answer(
        self,
        record: RequestRecord,
        headers: Mapping[str, str],
        body: Callable[[], Awaitable[bytes]],
    ) -> Reply:
        requests: list[tuple[Mapping[str, object], ChatTranslation]] = []

        async def chat_body() -> bytes:
            raw = await body()
            request = _object(raw)
            if request is None:
                return raw  # the chat handler reports the error
            requests.append((request, translate(request)))
            return _encode(requests[0][1])

        try:
            reply = await self.chat(record, headers, chat_body)
        except ApiError as error:
            origins = requests[0][1].origins if requests else ()
            raise to_responses_error(error, origins) from error
        template = ResponseTemplate(record.request_id.removeprefix("req_"), requests[0][0])
        if reply.events is None:
            return replace(reply, payload=response_body(reply.payload, template))
        return replace(
            reply, events=_translate(reply.events, ResponseEvents(template, record.model))
        )


def to_responses_error(error: ApiError, origins: Sequence[str]) -> ApiError:
    """Return an error about the chat body with the field names of the Responses request."""

    message, param = str(error), error.param
    if param is not None:
        param = MESSAGE.sub(lambda found: _origin(int(found[1]), origins), param)
        param = NAME_PATTERN.sub(lambda found: NAMES[found[0]], param)
        message = message.replace(error.param or param, param)
    return ApiError(
        message,
        status=error.status,
        type=error.type,
        code=error.code,
        param=param,
        headers=error.headers,
        hint=error.hint.replace("chat-completions reference", "Responses reference"),
    )


def _origin(number: int, origins: Sequence[str]) -> str:
    return origins[number] if number < len(origins) else "input"


def _object(raw: bytes) -> Mapping[str, object] | None:
    try:
        given = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return given if isinstance(given, dict) else None


def _encode(chat: ChatTranslation) -> bytes:
    try:
        return orjson.dumps(chat.body)
    except orjson.JSONEncodeError as error:  # orjson parses deeper nesting than it can encode
        raise ApiError(
            "the request has brackets nested too deeply", code="limit_exceeded", hint="send less"
        ) from error


async def _translate(
    chunks: AsyncGenerator[bytes], events: ResponseEvents
) -> AsyncGenerator[bytes]:
    try:
        async for chunk in chunks:
            if chunk == DONE_EVENT:
                for event in events.end():
                    yield event
            elif chunk.startswith(b":"):  # a comment
                yield chunk
            else:
                data = orjson.loads(chunk.removeprefix(b"data: "))
                failed = isinstance(data.get("error"), dict)
                for event in events.fail(data["error"]) if failed else events.take(data):
                    yield event
    finally:
        await chunks.aclose()
