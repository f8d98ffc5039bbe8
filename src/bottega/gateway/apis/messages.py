"""Anthropic's Messages API on top of chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from bottega.gateway.apis.messages_input import MessagesTranslation, translate, translate_prompt
from bottega.gateway.apis.translation import (
    FieldNames,
    TranslatedEndpoint,
    call_arguments,
    calls_of,
    first_choice,
    object_field,
    stateless,
)
from bottega.gateway.ports import AnswerHandler, RequestRecord
from bottega.openai_api.errors import ApiError
from bottega.openai_api.response import finish_reason, joined_text, parse_usage
from bottega.openai_api.streams import add_call

ContentBlock = dict[str, object]
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
STOP_REASONS = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
NAMES = {
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    ".image_url.url": ".source",
}


def messages_endpoint(chat: AnswerHandler) -> TranslatedEndpoint[MessagesTranslation]:
    """Return the handler of the Messages API on top of `chat`, that of chat completions."""
    return TranslatedEndpoint(
        chat,
        stateless(translate),
        lambda payload, record, request: _message_body(payload, record),
        lambda record, request: MessageEvents(record),
        FieldNames(NAMES, "messages", "Messages reference"),
    )


def token_count_endpoint(count: AnswerHandler) -> TranslatedEndpoint[MessagesTranslation]:
    """Return the handler that counts a request's tokens on top of `count`, that of a chat body,
    which replies `input_tokens`."""
    return TranslatedEndpoint(
        count,
        stateless(translate_prompt),
        lambda payload, record, request: payload,
        lambda record, request: MessageEvents(record),
        FieldNames(NAMES, "messages", "Messages reference"),
    )


def error_body(error: ApiError) -> bytes:
    """Return an error in the format of the Messages API, which names fields in the message."""
    given: dict[str, Any] = orjson.loads(error.body)["error"]
    if error.param and error.param not in given["message"]:
        given["message"] = f"{error.param}: {given['message']}"
    return orjson.dumps(_error(error.status, given))


def _error(status: int, error: Mapping[str, object]) -> ContentBlock:
    other = "invalid_request_error" if 400 <= status < 500 else "api_error"
    fields = {"type": ERROR_TYPES.get(status, other), "message": error.get("message")}
    return {"type": "error", "error": fields}


def _message(record: RequestRecord, model: str, content: list[ContentBlock]) -> ContentBlock:
    return {
        "id": f"msg_{record.request_id.removeprefix('req_')}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(None),
    }


def _message_body(payload: bytes, record: RequestRecord) -> bytes:
    completion: dict[str, Any] = orjson.loads(payload)
    choice = completion["choices"][0]
    message = choice["message"]
    text = _message_text(message)
    calls = calls_of(message)
    content = [_text_block(text)] if text or not calls else []
    content += [_tool_use(call, record, number) for number, call in enumerate(calls)]
    ended = {
        "stop_reason": _stop_reason(choice.get("finish_reason"), bool(calls), message),
        "usage": _usage(completion.get("usage")),
    }
    model = str(completion.get("model") or record.model)
    return orjson.dumps(_message(record, model, content) | ended)


def _message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message or of a piece of it, or else its refusal."""
    content = message.get("content")
    refusal = joined_text(message.get("refusal"), "refusal")
    return joined_text(content, "text") or refusal or ""


def _text_block(text: str) -> ContentBlock:
    return {"type": "text", "text": text}


def _stop_reason(finish: object, has_calls: bool, message: Mapping[str, Any]) -> str:
    if message.get("refusal"):
        return "refusal"
    # Many servers report calls as a usual end; clients of this API then forget them.
    other = "tool_use" if has_calls else "end_turn"
    return STOP_REASONS.get(finish_reason(finish), other)


def _usage(usage: object) -> ContentBlock:
    """Return the token counts; input tokens exclude those that were read from a cache."""
    counts = parse_usage({"usage": usage if isinstance(usage, dict) else {}})
    return {
        "input_tokens": max(0, counts.prompt_tokens - counts.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached_tokens,
        "output_tokens": counts.completion_tokens,
    }


def _tool_use(call: Mapping[str, object], record: RequestRecord, number: int) -> ContentBlock:
    """Return the block of a complete call; its id and name come from the upstream. Arguments that
    are no JSON object are passed on as a text, as are those with brackets nested deeper than orjson
    encodes."""
    function = object_field(call, "function")
    id, name = call.get("id"), function.get("name")
    arguments = call_arguments(function.get("arguments"))
    try:
        given = orjson.loads(arguments or "{}")
        orjson.dumps({"content": [{"input": {"arguments": given}}]})
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        given = arguments
    generated_id = f"toolu_{record.request_id.removeprefix('req_')}{number:02d}"
    return {
        "type": "tool_use",
        "id": id if isinstance(id, str) and id else generated_id,
        "name": name if isinstance(name, str) else "",
        "input": given if isinstance(given, dict) else {"arguments": given},
    }


@dataclass
class MessageEvents:
    """Translator of a chat stream. Text is streamed; tool calls are sent when they are complete,
    because this protocol has one open block at a time and chat streams may have several."""

    record: RequestRecord
    final: bytes | None = None
    _blocks: int = 0
    _is_begun: bool = False
    _is_text_open: bool = False
    _is_refusal: bool = False
    _calls: list[ContentBlock] = field(default_factory=list)
    _finish: object = None
    _usage: object = None

    def take(self, chunk: Mapping[str, Any]) -> Iterator[bytes]:
        if not self._is_begun:
            yield self._start_event(str(chunk.get("model") or self.record.model))
        self._usage = chunk.get("usage") or self._usage
        for choice in first_choice(chunk):
            self._finish = choice.get("finish_reason") or self._finish
            delta = choice.get("delta") or {}
            self._is_refusal = self._is_refusal or bool(delta.get("refusal"))
            if text := _message_text(delta):
                yield from self._text_events(text)
            for piece in calls_of(delta):
                add_call(self._calls, piece)

    def end(self) -> Iterator[bytes]:
        if not (self._is_text_open or self._calls):
            yield from self._text_events("")
        if self._is_text_open:
            yield self._close_block()
        for number, call in enumerate(self._calls):
            block = _tool_use(call, self.record, number)
            yield self._open_block(block | {"input": {}})
            given = orjson.dumps(block["input"]).decode()
            yield self._delta({"type": "input_json_delta", "partial_json": given})
            yield self._close_block()
        stop = _stop_reason(self._finish, bool(self._calls), {"refusal": self._is_refusal})
        delta = {"stop_reason": stop, "stop_sequence": None}
        yield _event("message_delta", delta=delta, usage=_usage(self._usage))
        yield _event("message_stop")

    def fail(self, error: Mapping[str, object]) -> Iterator[bytes]:
        if not self._is_begun:
            yield self._start_event(self.record.model)
        yield _event("error", error=_error(500, error)["error"])

    def _start_event(self, model: str) -> bytes:
        self._is_begun = True
        return _event("message_start", message=_message(self.record, model, []))

    def _text_events(self, text: str) -> Iterator[bytes]:
        if not self._is_text_open:
            self._is_text_open = True
            yield self._open_block(_text_block(""))
        yield self._delta({"type": "text_delta", "text": text})

    def _open_block(self, block: ContentBlock) -> bytes:
        return _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: ContentBlock) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _close_block(self) -> bytes:
        self._blocks += 1
        return _event("content_block_stop", index=self._blocks - 1)


def _event(kind: str, **fields: object) -> bytes:
    data = orjson.dumps({"type": kind, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
