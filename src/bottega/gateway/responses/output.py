"""A chat completion as a reply of the Responses API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from bottega.gateway.ports import Body
from bottega.gateway.responses.fields import functions_of, told_format, told_tool_choice
from bottega.generation.wire import joined, parse_usage

Item = dict[str, object]
CUT = {"length": "max_output_tokens", "content_filter": "content_filter"}
# Sent back as they came, null where they were left out.
ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p", "user")
KNOWN_FAILURES = ("server_error", "rate_limit_exceeded")


@dataclass(frozen=True)
class Frame:
    """All of a reply but for what the model said. `given` is the request, checked before."""

    key: str  # of the request: all ids are made of it
    given: Body
    created: int = field(default_factory=lambda: int(time.time()))

    def reply(self, model: str, status: str, output: list[Item], **more: object) -> Item:
        given = self.given
        text, reasoning = _object(given, "text"), _object(given, "reasoning")
        kept: Item = {name: given.get(name) for name in ECHOED}
        return {
            "id": f"resp_{self.key}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            **kept,
            "max_tool_calls": None,
            "metadata": given.get("metadata") or {},
            "model": model,
            "output": output,
            "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "store": False,
            "text": {"format": told_format(text.get("format"))}
            | ({"verbosity": text["verbosity"]} if text.get("verbosity") else {}),
            "tool_choice": told_tool_choice(given.get("tool_choice")),
            "tools": [
                {"description": None, "parameters": None, "strict": None, **tool}
                for tool in functions_of(given.get("tools"))
            ],
            "truncation": "disabled",
            "usage": None,
            **more,
        }

    def ended(self, model: str, finish: object, output: list[Item], usage: object) -> Item:
        reason = cut(finish)
        told = {"usage": usage_of(usage)}
        if reason is None:
            more = told | {"completed_at": int(time.time())}
            return self.reply(model, "completed", output, **more)
        details = {"reason": reason}
        return self.reply(model, "incomplete", output, incomplete_details=details, **told)

    def failed(self, model: str, error: Mapping[str, object], output: list[Item]) -> Item:
        code = error.get("code")
        told = {
            "code": code if code in KNOWN_FAILURES else "server_error",
            "message": error.get("message") or "the model failed",
        }
        return self.reply(model, "failed", output, error=told)

    def message(self, place: int, content: list[Item], status: str) -> Item:
        return {
            "id": f"msg_{self.key}{place:02d}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def call(self, place: int, id: object, name: object, arguments: object, status: str) -> Item:
        return {
            "id": f"fc_{self.key}{place:02d}",
            "type": "function_call",
            "status": status,
            "call_id": id if isinstance(id, str) and id else f"call_{self.key}{place:02d}",
            "name": name if isinstance(name, str) else "",
            "arguments": arguments_of(arguments),
        }


def whole(payload: bytes, frame: Frame) -> bytes:
    completion: dict[str, Any] = orjson.loads(payload)
    choice = completion["choices"][0]
    said, finish = choice["message"], choice.get("finish_reason")
    status = "incomplete" if cut(finish) else "completed"
    calls = [one for one in said.get("tool_calls") or () if isinstance(one, dict)]
    output: list[Item] = []
    if (content := _content(said)) or not calls:
        output.append(frame.message(0, content or [text_part("")], status))
    for call in calls:
        function = _object(call, "function")
        told = call.get("id"), function.get("name"), function.get("arguments")
        output.append(frame.call(len(output), *told, status))
    model, usage = completion.get("model"), completion.get("usage")
    return orjson.dumps(frame.ended(str(model), finish, output, usage))


def cut(finish: object) -> str | None:
    """Why an answer is not whole."""
    return CUT.get(finish) if isinstance(finish, str) else None


def text_part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def refusal_part(text: str) -> Item:
    return {"type": "refusal", "refusal": text}


def arguments_of(value: object) -> str:
    """Some servers send the object itself."""
    if isinstance(value, str):
        return value
    return "" if value is None else orjson.dumps(value).decode()


def usage_of(usage: object) -> Item | None:
    if not isinstance(usage, dict):
        return None
    known = parse_usage({"usage": usage})
    thought = _object(usage, "completion_tokens_details").get("reasoning_tokens")
    return {
        "input_tokens": known.prompt_tokens,
        "input_tokens_details": {"cached_tokens": known.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": known.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": thought if type(thought) is int and thought > 0 else 0
        },
        "total_tokens": known.prompt_tokens + known.completion_tokens,
    }


def _content(said: dict[str, Any]) -> list[Item]:
    text = joined(said.get("content"), "text")
    refused = said.get("refusal") or joined(said.get("content"), "refusal")
    parts = [text_part(text)] if text else []
    if isinstance(refused, str) and refused and refused != text:
        parts.append(refusal_part(refused))
    return parts


def _object(found: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = found.get(name)
    return value if isinstance(value, dict) else {}
