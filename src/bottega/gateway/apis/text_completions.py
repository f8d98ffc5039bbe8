"""Legacy completions of the OpenAI API on top of chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from bottega.gateway.apis.translation import FieldNames, TranslatedEndpoint, stateless, unsupported
from bottega.gateway.ports import AnswerHandler, RequestRecord
from bottega.openai_api.errors import wrong_type
from bottega.openai_api.request import Body, require
from bottega.openai_api.response import joined_text, parse_usage
from bottega.openai_api.streams import DONE_EVENT, to_event

COMPLETIONS = ("/v1/completions", "/completions")

CHAT = "use POST /v1/chat/completions"
# Fields that the gateway does not support, with a hint.
UNSUPPORTED_FIELDS: Mapping[str, str] = {
    "best_of": f"use n, or {CHAT.removeprefix('use ')}",
    "echo": "remove it and add the prompt to the text yourself",
    "logprobs": f"{CHAT}, which supports them",
    "messages": CHAT,
    "suffix": CHAT,
}
NAMES = {"max_completion_tokens": "max_tokens"}


@dataclass(frozen=True)
class CompletionTranslation:
    """Chat body whose only message is the prompt."""

    body: Body
    origins: Sequence[str] = ("prompt",)


def completions_endpoint(chat: AnswerHandler) -> TranslatedEndpoint[CompletionTranslation]:
    """Return the handler of legacy completions on top of `chat`, that of chat completions."""
    return TranslatedEndpoint(
        chat,
        stateless(_translate),
        lambda payload, record, request: _completion_body(payload, record),
        lambda record, request: _CompletionEvents(record),
        FieldNames(NAMES, "prompt", "completions reference"),
    )


def _translate(given: Body) -> CompletionTranslation:
    for name, hint in UNSUPPORTED_FIELDS.items():
        if given.get(name) and (name, given[name]) != ("best_of", 1):  # the default
            raise unsupported(f"'{name}' is not supported", name, hint)
    require(given, "prompt", "")
    body = {
        name: value for name, value in given.items() if name not in {*UNSUPPORTED_FIELDS, "prompt"}
    }
    body["messages"] = [{"role": "user", "content": _text(given["prompt"])}]
    return CompletionTranslation(body)


def _text(prompt: object) -> str:
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if isinstance(prompt, list) and all(isinstance(one, str) for one in prompt):
        hint = "send a request per prompt"
        raise unsupported("several prompts are not supported", "prompt", hint)
    if not isinstance(prompt, str):
        wrong_type("prompt", "a string", prompt)
    return prompt


def _completion_body(payload: bytes, record: RequestRecord) -> bytes:
    completion: dict[str, Any] = orjson.loads(payload)
    choices = [(choice, choice["message"]) for choice in completion["choices"]]
    return orjson.dumps(_completion(completion, choices, record))


def _completion(
    chat: Mapping[str, Any], choices: Sequence[tuple[Mapping[str, Any], Any]], record: RequestRecord
) -> dict[str, object]:
    """Return a completion, or a chunk of its stream, with the texts of these messages."""
    return {
        "id": f"cmpl-{record.request_id.removeprefix('req_')}",
        "object": "text_completion",
        "created": chat.get("created") or int(record.begun),
        "model": chat.get("model") or record.model,
        "choices": [
            {
                "index": choice.get("index", 0),
                "text": joined_text(message.get("content"), "text") or "",
                "logprobs": None,
                "finish_reason": choice.get("finish_reason"),
            }
            for choice, message in choices
        ],
        "usage": _usage(chat),
    }


def _usage(chat: Mapping[str, Any]) -> dict[str, int] | None:
    if not isinstance(chat.get("usage"), dict):
        return None
    counts = parse_usage(chat)
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }


@dataclass
class _CompletionEvents:
    record: RequestRecord
    final: bytes | None = None

    def take(self, chunk: Mapping[str, Any]) -> Iterator[bytes]:
        choices = [(choice, choice.get("delta") or {}) for choice in chunk.get("choices") or ()]
        yield to_event(orjson.dumps(_completion(chunk, choices, self.record)))

    def end(self) -> Iterator[bytes]:
        yield DONE_EVENT

    def fail(self, error: Mapping[str, object]) -> Iterator[bytes]:
        yield to_event(orjson.dumps({"error": error}))
