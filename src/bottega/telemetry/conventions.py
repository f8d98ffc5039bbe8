"""Attributes of model calls by OpenTelemetry's semantic conventions for generative AI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import orjson

from bottega._util.tracing import Attributes, AttributeValue, ModelCall
from bottega.types import Completion, Message

# Fields of a chat body that are numbers, and their attributes.
NUMBER_ATTRIBUTES = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
}
INTEGERS = range(-(2**63), 2**63)  # of OTLP; clients may send larger ones, such as a seed
MAX_CONTENT = 65_536  # characters; thousands of spans may wait in memory for a collector
ERROR_TYPE = "error.type"
STATUS_CODE = "http.response.status_code"
TOKEN_TYPE = "gen_ai.token.type"


def base_attributes(call: ModelCall) -> dict[str, AttributeValue]:
    """Return the attributes that spans and metrics of a call share. The configuration bounds the
    number of their values, which metrics require."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": call.operation,
        "gen_ai.provider.name": call.provider,
        "gen_ai.request.model": call.model,
    }
    if call.address is not None:
        attributes["server.address"] = call.address
        if call.port is not None:
            attributes["server.port"] = call.port
    return attributes


def request_attributes(call: ModelCall) -> Iterator[tuple[str, AttributeValue]]:
    """Yield the attributes of a call's request: sampling parameters, choices and streaming."""
    for name, attribute in NUMBER_ATTRIBUTES.items():
        value = call.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if isinstance(value, float) or value in INTEGERS:
            yield attribute, value
    if isinstance(count := call.fields.get("n"), int) and count > 1:
        yield "gen_ai.request.choice.count", count
    if call.stream:
        yield "gen_ai.request.stream", True


def response_attributes(call: ModelCall) -> Attributes:
    """Return the attributes of a call's reply: model, finish reasons, tokens, and the seconds to
    the first chunk of a stream."""
    attributes: dict[str, AttributeValue | None] = {
        "gen_ai.response.model": call.response_model,
        "gen_ai.response.finish_reasons": [one.finish_reason for one in call.completions] or None,
        "gen_ai.response.time_to_first_chunk": call.first_seconds,
    }
    if (usage := call.usage) is not None:
        attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens or None
    return attributes


def content_attributes(call: ModelCall) -> Attributes:
    """Return the texts of the prompt and of the reply as JSON, of each up to `MAX_CONTENT`
    characters. Images appear as parts without content."""
    given = call.prompt.messages if call.prompt is not None else call.fields.get("messages")
    messages = given if isinstance(given, Sequence) else ()
    prompt, reply = _Content(), _Content()
    # The last messages first: they have the question.
    inputs = [prompt.message(message) for message in reversed(messages)][::-1]
    outputs = [reply.completion(one) for one in call.completions]
    return {
        "gen_ai.input.messages": orjson.dumps(inputs).decode(),
        "gen_ai.output.messages": orjson.dumps(outputs).decode(),
    }


@dataclass
class _Content:
    """Texts of one span, which have `left` characters until they are cut."""

    left: int = MAX_CONTENT

    def message(self, message: Message | Mapping[str, object]) -> dict[str, object]:
        if isinstance(message, Message):
            parts = [
                self.text(one) if isinstance(one, str) else {"type": "image"}
                for one in message.parts
            ]
            return {"role": message.role, "parts": parts}
        content = message.get("content")
        given = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        return {"role": message.get("role"), "parts": [self._part(one) for one in given]}

    def completion(self, completion: Completion) -> dict[str, object]:
        parts, finish = [self.text(completion.text)], completion.finish_reason
        return {"role": "assistant", "parts": parts, "finish_reason": finish}

    def text(self, text: str) -> dict[str, object]:
        shown = text[: self.left]
        self.left -= len(shown)
        return {"type": "text", "content": shown}

    def _part(self, part: Mapping[str, object]) -> dict[str, object]:
        if part.get("type") == "text":
            return self.text(str(part.get("text", "")))
        return {"type": str(part.get("type")).removesuffix("_url")}
