"""Chat-completions bodies: prompts to JSON, JSON to completions, error bodies to the error tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import orjson

from bottega.errors import (
    EndpointError,
    EndpointTimeoutError,
    GarbledError,
    RateLimitedError,
    RejectedError,
    ServerFailedError,
)
from bottega.image import Image
from bottega.types import Completion, Message, Prompt, Sampling, Usage

JSONObject = Mapping[str, object]
DataUrl = Callable[[Image], str]
# More than any context holds; sums of a few such claims still fit into 64 bits.
MOST_TOKENS = 2**53


def request_body(
    model: str,
    prompt: Prompt,
    sampling: Sampling,
    limit_field: str,
    extra: JSONObject,
    data_url: DataUrl,
) -> bytes:
    """`extra` is merged at the top level; a field that it sets to None is left out."""
    fields: dict[str, object] = {
        "model": model,
        "messages": messages_json(prompt.messages, data_url),
        "temperature": sampling.temperature,
        limit_field: sampling.max_tokens,
        "n": sampling.n if sampling.n > 1 else None,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
        **extra,
    }
    return orjson.dumps({name: value for name, value in fields.items() if value is not None})


def messages_json(messages: Sequence[Message], data_url: DataUrl) -> list[dict[str, object]]:
    return [_message(message, data_url) for message in messages]


def _message(message: Message, data_url: DataUrl) -> dict[str, object]:
    parts = [_part(part, data_url) for part in message.parts]
    plain = len(parts) == 1 and parts[0]["type"] == "text"
    return {"role": message.role, "content": parts[0]["text"] if plain else parts}


def _part(part: str | Image, data_url: DataUrl) -> dict[str, object]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": data_url(part)}}


def parse_json(payload: bytes, where: str) -> JSONObject:
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        if not payload.lstrip()[:1] == b"<":
            raise GarbledError(
                f"{where} sent a reply that is not JSON", hint="try again; look at the server's log"
            ) from error
        raise _web_page(where) from error
    if not isinstance(body, dict):
        raise GarbledError(f"{where} sent JSON that is not an object", hint=WRONG_PROTOCOL)
    return body


def _web_page(where: str) -> GarbledError:
    error = GarbledError(
        f"{where} sent a web page, not JSON",
        hint="is OPENAI_BASE_URL the API's address? It usually ends in /v1",
    )
    error.retryable = False  # the same address shows the same page next time
    return error


WRONG_PROTOCOL = "does this server speak the OpenAI chat-completions protocol?"


def reported_failure(body: JSONObject) -> tuple[int, str] | None:
    """The status and the message of what failed though the status is 200: gateways report so of
    the whole reply or of one choice."""
    choices = body.get("choices")
    for part in (body, *(choices if isinstance(choices, list) else ())):
        error = _get(part, "error")
        if error or _get(part, "finish_reason") == "error":
            code = str(_get(error, "code"))
            known = code.isdecimal() and len(code) == 3 and code[0] in "45"
            return int(code) if known else 502, _said(error)
    return None


def plain_completion(body: JSONObject) -> Completion | None:
    """Of the usual reply, read in one look: one choice that came to its end, with a text, and the
    usage. None for any other, which may be right all the same."""
    choices = body.get("choices")
    if body.get("error") or not (isinstance(choices, list) and len(choices) == 1):
        return None
    choice = choices[0]
    if not isinstance(choice, dict) or choice.get("finish_reason") != "stop":
        return None
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else None
    odd = choice.get("error") or choice.get("logprobs") or not isinstance(body.get("usage"), dict)
    return Completion(text) if isinstance(text, str) and not odd else None


def parse_completions(body: JSONObject, where: str) -> tuple[Completion, ...]:
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        raise GarbledError(f"{where} sent a reply without choices", hint=WRONG_PROTOCOL)
    return tuple(_completion(choice, where) for choice in choices)


def _completion(choice: object, where: str) -> Completion:
    message = _get(choice, "message")
    if not isinstance(message, dict):
        raise GarbledError(f"{where} sent a choice without a message", hint=WRONG_PROTOCOL)
    text, finish = joined(message.get("content"), "text"), _get(choice, "finish_reason")
    refusal = _refusal(message) if text is None else None
    if text is None and refusal is not None:
        return Completion(refusal, "refusal")
    if text is None and not _speechless(message, finish):
        raise GarbledError(f"{where} sent a message without text", hint=WRONG_PROTOCOL)
    return Completion(text or "", finish if isinstance(finish, str) else "stop", _logprob(choice))


def _refusal(message: JSONObject) -> str | None:
    refusal = message.get("refusal")
    return refusal if isinstance(refusal, str) else joined(message.get("content"), "refusal")


def joined(content: object, kind: str) -> str | None:
    """A string as it is; of a list of parts those of one kind; None if there are none."""
    if isinstance(content, list):
        texts = [text for part in content if isinstance(text := _get(part, kind), str)]
        return "".join(texts) if texts else None
    return content if isinstance(content, str) else None


def _speechless(message: JSONObject, finish: object) -> bool:
    """No text is an answer too: a tool call, or a model that thought until its limit."""
    content = message.get("content")
    thought = isinstance(content, list) and bool(content) and finish == "length"
    return content is None or thought or bool(message.get("tool_calls"))


def _logprob(choice: object) -> float | None:
    tokens = _get(_get(choice, "logprobs"), "content")
    if not isinstance(tokens, list) or not tokens:
        return None
    values = [_get(token, "logprob") for token in tokens]
    return sum(float(value) for value in values if isinstance(value, int | float))


def parse_usage(body: JSONObject) -> Usage:
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return Usage()
    prompt = _count(usage.get("prompt_tokens"))
    cached = _count(_get(usage.get("prompt_tokens_details"), "cached_tokens"))
    completion = _count(usage.get("completion_tokens"))
    return Usage(prompt, completion, min(cached, prompt))


def add_usage(one: Usage, other: Usage) -> Usage:
    return Usage(
        one.prompt_tokens + other.prompt_tokens,
        one.completion_tokens + other.completion_tokens,
        one.cached_tokens + other.cached_tokens,
    )


def _count(value: object) -> int:
    if type(value) is int:
        return min(max(value, 0), MOST_TOKENS)
    if not isinstance(value, float):
        return 0
    return int(min(max(value, 0), MOST_TOKENS))


def _get(value: object, name: str) -> object:
    return cast(object, value.get(name)) if isinstance(value, dict) else None


def server_message(payload: bytes) -> str:
    """What the server said went wrong, as it stands; empty if it sent no such JSON."""
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return ""
    return said_in(body)


def said_in(body: object) -> str:
    """`server_message` of JSON that is read already."""
    return _said(_get(body, "error")) or _said(body)


def _said(error: object) -> str:
    found = error if isinstance(error, str) else _get(error, "message") or _get(error, "detail")
    return str(found or "")


def status_error(status: int, said: str, where: str, model: str) -> EndpointError:
    """The error that an HTTP status means; `said` is the server's own message."""
    told = f"{where} answered {status}" + (f": {said}" if said else "")
    if status == 429 and "quota" not in said.lower():
        return RateLimitedError(told, status=status, hint="lower `concurrency`, or try again later")
    if status == 408:
        return EndpointTimeoutError(told, status=status, hint="try again, or raise `timeout`")
    if status == 409 or status >= 500:
        return ServerFailedError(
            told, status=status, hint="try again later; look at the server's log"
        )
    return RejectedError(told, status=status, hint=_rejection_hint(status, model))


def _rejection_hint(status: int, model: str) -> str:
    hints = {
        401: "set OPENAI_API_KEY (or api_key=) to a key that this endpoint accepts",
        403: "the key may not use this model: check OPENAI_API_KEY and the account's rights",
        404: f"does it serve the model {model!r}, and does the base URL end in /v1?",
        413: "send fewer demonstrations or smaller images",
        429: "the account's quota is used up: check its billing",
    }
    if 300 <= status < 400:
        return "the base URL redirects: set it to the address that it redirects to"
    return hints.get(
        status, "change the request; extra_body={'field': None} leaves out a field it rejects"
    )
