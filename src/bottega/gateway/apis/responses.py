"""Responses API of OpenAI on top of chat completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from bottega.errors import BottegaError
from bottega.gateway.apis.responses_input import ChatTranslation, translate
from bottega.gateway.apis.translation import (
    FieldNames,
    TranslatedEndpoint,
    call_arguments,
    calls_of,
    encode_body,
    first_choice,
    object_field,
    optional_field,
)
from bottega.gateway.ports import AnswerHandler, RequestRecord
from bottega.gateway.request.response_store import ResponseStore, not_stored
from bottega.openai_api.request import Body
from bottega.openai_api.response import finish_reason, joined_text, parse_usage
from bottega.openai_api.streams import add_call

OutputItem = dict[str, object]
INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
# Sent back as they came, null where they were left out.
ECHOED_FIELDS = ("instructions", "max_output_tokens", "temperature", "top_p", "user")
DONE_FIELDS = {"output_text": ("text", "logprobs"), "refusal": ("refusal",)}
MAX_TURNS = 100
FAILURE_CODES = ("server_error", "rate_limit_exceeded")
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    ".image_url.url": ".image_url",
}


@dataclass(frozen=True)
class ResponseTemplate:
    """Response without the model's output."""

    key: str  # all ids of the response contain it
    request: ChatTranslation
    created: int = field(default_factory=lambda: int(time.time()))

    def reply(
        self, model: str, status: str, output: list[OutputItem], **more: object
    ) -> OutputItem:
        given = self.request.given
        text, reasoning = object_field(given, "text"), object_field(given, "reasoning")
        return {
            "id": f"resp_{self.key}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            **{name: given.get(name) for name in ECHOED_FIELDS},
            "max_tool_calls": None,
            "metadata": given.get("metadata") or {},
            "model": model,
            "output": output,
            "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
            "previous_response_id": given.get("previous_response_id"),
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "store": self.request.is_stored,
            "text": {"format": self.request.response_format}
            | ({"verbosity": text["verbosity"]} if text.get("verbosity") else {}),
            "tool_choice": self.request.tool_choice,
            "tools": [
                {"description": None, "parameters": None, "strict": None, **tool}
                for tool in self.request.tools
            ],
            "truncation": "disabled",
            "usage": None,
            **more,
        }

    def ended(
        self, model: str, finish: object, output: list[OutputItem], usage: object
    ) -> OutputItem:
        counts = _usage(usage)
        if (reason := _incomplete_reason(finish)) is None:
            now = int(time.time())
            return self.reply(model, "completed", output, usage=counts, completed_at=now)
        details = {"reason": reason}
        return self.reply(model, "incomplete", output, incomplete_details=details, usage=counts)


@dataclass
class _Message:
    """Message item at `index` of the output, with its texts by type of part."""

    key: str
    index: int
    parts: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"msg_{self.key}{self.index:02d}"

    def item(self, status: str) -> OutputItem:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(kind, text) for kind, text in self.parts.items()],
        }


@dataclass
class _Call:
    """Function call at `index` of the output. `call_id` and `name` come from the upstream."""

    key: str
    index: int
    call_id: object = None
    name: object = None
    arguments: str = ""

    @property
    def id(self) -> str:
        return f"fc_{self.key}{self.index:02d}"

    def item(self, status: str) -> OutputItem:
        given = self.call_id
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": given if isinstance(given, str) and given else f"call_{self.id[3:]}",
            "name": self.name if isinstance(self.name, str) else "",
            "arguments": self.arguments,
        }


def _response_body(payload: bytes, template: ResponseTemplate, model: str) -> bytes:
    completion: dict[str, Any] = orjson.loads(payload)
    choice = completion["choices"][0]
    message, finish = choice["message"], choice.get("finish_reason")
    status = "incomplete" if _incomplete_reason(finish) else "completed"
    calls = calls_of(message)
    output: list[OutputItem] = []
    if (parts := _text_parts(message)) or not calls:
        output.append(_Message(template.key, 0, parts or {"output_text": ""}).item(status))
    for call in calls:
        function = object_field(call, "function")
        item = _Call(template.key, len(output), call.get("id"), function.get("name"))
        item.arguments = call_arguments(function.get("arguments"))
        output.append(item.item(status))
    model, usage = str(completion.get("model") or model), completion.get("usage")
    return orjson.dumps(template.ended(model, finish, output, usage))


def _incomplete_reason(finish: object) -> str | None:
    """Return the reason why an answer is incomplete, None if it is complete."""
    return INCOMPLETE_REASONS.get(finish_reason(finish))


def _usage(usage: object) -> OutputItem | None:
    if not isinstance(usage, dict):
        return None
    counts = parse_usage({"usage": usage})
    thought = object_field(usage, "completion_tokens_details").get("reasoning_tokens")
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": thought if type(thought) is int and thought > 0 else 0
        },
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }


def _text_parts(message: dict[str, Any]) -> dict[str, str]:
    text = joined_text(message.get("content"), "text")
    refused = message.get("refusal") or joined_text(message.get("content"), "refusal")
    parts = {"output_text": text} if text else {}
    if isinstance(refused, str) and refused and refused != text:
        parts["refusal"] = refused
    return parts


class ResponseEvents:
    """Translator of a chat stream. Each method yields the events to send next."""

    def __init__(self, template: ResponseTemplate, model: str) -> None:
        self._template = template
        self._model = model
        self._count = 0
        self._items: list[_Message | _Call] = []
        self._message: _Message | None = None
        self._calls: list[_Call] = []
        self._joined_calls: list[OutputItem] = []
        self._finish: object = None
        self._usage: object = None
        self.final: bytes | None = None

    def take(self, chunk: Mapping[str, Any]) -> Iterator[bytes]:
        if not self._count:
            self._model = str(chunk.get("model") or self._model)
            yield from self._begin()
        self._usage = chunk.get("usage") or self._usage
        for choice in first_choice(chunk):
            self._finish = choice.get("finish_reason") or self._finish
            yield from self._step(choice.get("delta") or {})

    def end(self) -> Iterator[bytes]:
        # Clients expect at least one output item, even for an empty answer.
        if not self._items:
            yield from self._open_part("output_text")
        status = "incomplete" if _incomplete_reason(self._finish) else "completed"
        for item in self._items:
            output_item = item.item(status)
            if isinstance(item, _Message):
                yield from self._close_parts(item)
            else:
                rest = {name: output_item[name] for name in ("name", "arguments")}
                yield self._event("response.function_call_arguments.done", **_at(item), **rest)
            yield self._event(
                "response.output_item.done", output_index=item.index, item=output_item
            )
        output = self._output(status)
        reply = self._template.ended(self._model, self._finish, output, self._usage)
        self.final = orjson.dumps(reply)
        yield self._event(f"response.{reply['status']}", response=reply)

    def fail(self, error: Mapping[str, object]) -> Iterator[bytes]:
        """Yield the failed response, then an error event, which makes clients raise an
        exception."""
        if not self._count:
            yield from self._begin()
        code = error.get("code")
        api_error = {
            "code": code if code in FAILURE_CODES else "server_error",
            "message": error.get("message") or "the model failed",
        }
        output = self._output("incomplete")
        reply = self._template.reply(self._model, "failed", output, error=api_error)
        yield self._event("response.failed", response=reply)
        fields = {name: error.get(name) for name in ("code", "message", "param")}
        yield self._event("error", **fields, error=error)

    def _begin(self) -> Iterator[bytes]:
        for step in ("created", "in_progress"):
            reply = self._template.reply(self._model, "in_progress", [])
            yield self._event(f"response.{step}", response=reply)

    def _step(self, delta: Mapping[str, Any]) -> Iterator[bytes]:
        if text := joined_text(delta.get("content"), "text"):
            yield from self._say("output_text", text)
        if refused := joined_text(delta.get("refusal"), "refusal"):
            yield from self._say("refusal", refused)
        for call in calls_of(delta):
            yield from self._call(call)

    def _say(self, kind: str, piece: str) -> Iterator[bytes]:
        if self._message is None or kind not in self._message.parts:
            yield from self._open_part(kind)
        assert self._message is not None
        self._message.parts[kind] += piece
        more: OutputItem = {"logprobs": []} if kind == "output_text" else {}
        yield self._event(f"response.{kind}.delta", **self._in(kind), delta=piece, **more)

    def _open_part(self, kind: str) -> Iterator[bytes]:
        if self._message is None:
            self._message = _Message(self._template.key, len(self._items))
            yield self._added(self._message)
        self._message.parts[kind] = ""
        yield self._event("response.content_part.added", **self._in(kind), part=_part(kind, ""))

    def _call(self, piece: OutputItem) -> Iterator[bytes]:
        position = add_call(self._joined_calls, piece)
        joined = self._joined_calls[position]
        if position == len(self._calls):
            self._calls.append(_Call(self._template.key, len(self._items), joined.get("id")))
        call = self._calls[position]
        call.name = object_field(joined, "function").get("name")
        if call.index == len(self._items):
            yield self._added(call)
        whole = call_arguments(object_field(joined, "function").get("arguments"))
        if more := whole[len(call.arguments) :]:
            call.arguments = whole
            at = _at(call)
            yield self._event("response.function_call_arguments.delta", **at, delta=more)

    def _close_parts(self, message: _Message) -> Iterator[bytes]:
        for kind, text in message.parts.items():
            at, part = self._in(kind), _part(kind, text)
            content = {name: part[name] for name in DONE_FIELDS[kind]}
            yield self._event(f"response.{kind}.done", **at, **content)
            yield self._event("response.content_part.done", **at, part=part)

    def _added(self, item: _Message | _Call) -> bytes:
        self._items.append(item)
        output_item = item.item("in_progress")
        return self._event("response.output_item.added", output_index=item.index, item=output_item)

    def _in(self, kind: str) -> OutputItem:
        """Return the position of a part of the message in the output."""
        assert self._message is not None
        index = list(self._message.parts).index(kind)
        return _at(self._message) | {"content_index": index}

    def _output(self, status: str) -> list[OutputItem]:
        return [item.item(status) for item in self._items]

    def _event(self, kind: str, **fields: object) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._count, **fields})
        self._count += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _at(item: _Message | _Call) -> OutputItem:
    return {"item_id": item.id, "output_index": item.index}


def _part(kind: str, text: str) -> OutputItem:
    if kind == "refusal":
        return {"type": "refusal", "refusal": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def responses_endpoint(
    chat: AnswerHandler,
    store: ResponseStore | None = None,
    *,
    warn: Callable[[str, BottegaError], None] = lambda problem, error: None,
) -> TranslatedEndpoint[ChatTranslation]:
    """Return the handler of the Responses API on top of `chat`, that of chat completions. A
    conversation in the `store` continues for at most `MAX_TURNS` responses. `warn` is called with
    the error if a response cannot be stored."""

    async def translated(given: Body, record: RequestRecord) -> ChatTranslation:
        is_stored = store is not None and optional_field(given, "store", bool) is not False
        previous = optional_field(given, "previous_response_id", str)
        earlier: Sequence[Body] = ()
        if previous is not None:
            if store is None:
                raise not_stored("previous_response_id", 400)
            earlier = await store.conversation(record.account.id, previous, MAX_TURNS)
        translation = translate(given, earlier, is_stored=is_stored)
        if is_stored:  # before the call of a model: fields that are not sent are stored, too
            encode_body(translation.items)
        return translation

    async def keep(payload: bytes, record: RequestRecord, request: ChatTranslation) -> None:
        if store is None or not request.is_stored:
            return
        previous = optional_field(request.given, "previous_response_id", str)
        try:
            await store.add(record.account.id, previous, request.items, payload)
        except BottegaError as error:  # the client gets its answer nevertheless
            warn("response not stored", error)

    return TranslatedEndpoint(
        chat,
        translated,
        lambda payload, record, request: _response_body(
            payload, _template(record, request), record.model
        ),
        lambda record, request: ResponseEvents(_template(record, request), record.model),
        FieldNames(NAMES, "input", "Responses reference"),
        None if store is None else keep,
    )


def _template(record: RequestRecord, request: ChatTranslation) -> ResponseTemplate:
    return ResponseTemplate(record.request_id.removeprefix("req_"), request)
