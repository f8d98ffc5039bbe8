"""Chat completions as JSON: parsing, normalization, writing."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import cast

import orjson

from bottega.errors import GarbledError
from bottega.openai_api.errors import WRONG_PROTOCOL, JSONObject
from bottega.types import Completion, Reply, Usage

# More than any context holds; sums of a few such claims still fit into 64 bits.
MAX_TOKENS = 2**53
# OpenAI reports -9999.0 for a log-probability of minus infinity. Other constants become null.
CONSTANTS = {"-Infinity": -9999.0}
# Reasons of other protocols for the end of an answer.
FINISH_REASONS = {
    **dict.fromkeys(("eos", "eos_token", "end_turn", "stop_sequence", "STOP", "COMPLETE"), "stop"),
    **dict.fromkeys(("max_tokens", "MAX_TOKENS", "model_length"), "length"),
    "tool_use": "tool_calls",
    "SAFETY": "content_filter",
}
BOM = b"\xef\xbb\xbf"
# Beginnings of an event stream; content types are unreliable.
EVENT_STARTS = (b"data:", b"event:", b"id:", b"retry:", b":")


@dataclass(slots=True)
class ChatCompletion:
    """A complete reply. `payload` is its JSON; `usage` is None if the server reported none."""

    payload: bytes
    model: str
    completions: tuple[Completion, ...]
    usage: Usage | None = None

    @property
    def reply(self) -> Reply:
        return Reply(self.model, self.completions, self.usage or Usage())


def are_events(payload: bytes) -> bool:
    return payload[:16].removeprefix(BOM).lstrip().startswith(EVENT_STARTS)


def parse_reply(payload: bytes, where: str) -> tuple[JSONObject, bytes]:
    """Return the JSON object of a reply, and the reply as valid JSON. Raises `GarbledError`."""
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        if (repaired := repaired_json(payload)) is not None:
            return repaired
        is_page = payload.lstrip()[:1] == b"<"
        garbled = GarbledError(
            f"{where} sent a {'web page, not JSON' if is_page else 'reply that is not JSON'}",
            hint="check that OPENAI_BASE_URL is the API's address; it usually ends in /v1"
            if is_page
            else "try again; look at the server's log",
        )
        garbled.retryable = not is_page  # the same address shows the same page next time
        raise garbled from error
    if not isinstance(body, dict):
        raise GarbledError(f"{where} sent JSON that is not an object", hint=WRONG_PROTOCOL)
    return body, payload


def repaired_json(payload: bytes) -> tuple[JSONObject, bytes] | None:
    """Return the JSON object of a lenient server, and it as valid JSON; None if it cannot be read.
    Python writes NaN and infinities, and half of a surrogate pair where a text was cut; clients
    read both."""
    try:
        found = json.loads(payload, parse_constant=CONSTANTS.get)
        repaired = valid_json(found)
        body = orjson.loads(repaired)
    except (ValueError, RecursionError):
        return None
    return (body, repaired) if isinstance(body, dict) else None


def valid_json(found: object) -> bytes:
    """Return the JSON of a value that `json` has parsed: halves of surrogate pairs are joined or
    replaced."""
    text = json.dumps(found, ensure_ascii=False).encode("utf-16", "surrogatepass")
    return text.decode("utf-16", "replace").encode()


def parse_completion(payload: bytes, body: JSONObject, where: str, model: str) -> ChatCompletion:
    """Parse a reply that reports no failure; `body` is the JSON of `payload`, and `model` is used
    if it names none. Raises `GarbledError`."""
    named = body.get("model")
    model = named if isinstance(named, str) else model
    if (simple := simple_completion(body)) is not None:
        return ChatCompletion(payload, model, (simple,), parse_usage(body))
    completions = parse_completions(body, where)
    usage = parse_usage(body) if isinstance(body.get("usage"), dict) else None
    return ChatCompletion(normalized(body) or payload, model, completions, usage)


def simple_completion(body: JSONObject) -> Completion | None:
    """Return the completion of the usual reply: one choice with a text that ends with `stop`, and a
    usage. Return None for all others, valid or not."""
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
    """Return the completion of each choice. Raises `GarbledError`."""
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        raise GarbledError(f"{where} sent a reply without choices", hint=WRONG_PROTOCOL)
    return tuple(_completion(choice, where) for choice in choices)


def _completion(choice: object, where: str) -> Completion:
    message = get(choice, "message")
    if not isinstance(message, dict):
        raise GarbledError(f"{where} sent a choice without a message", hint=WRONG_PROTOCOL)
    content, finish = message.get("content"), finish_reason(get(choice, "finish_reason"))
    text = joined_text(content, "text")
    if text is None:
        refusal = message.get("refusal")
        refused = refusal if isinstance(refusal, str) else joined_text(content, "refusal")
        if refused is not None:
            return Completion(refused, "refusal")
        # Tool calls, and reasoning that reaches the token limit, have no text.
        is_reasoning = isinstance(content, list) and bool(content) and finish == "length"
        if content is not None and not is_reasoning and not message.get("tool_calls"):
            raise GarbledError(f"{where} sent a message without text", hint=WRONG_PROTOCOL)
    tokens = get(get(choice, "logprobs"), "content")
    values = [get(one, "logprob") for one in tokens] if isinstance(tokens, list) else []
    logprob = sum(float(value) for value in values if isinstance(value, int | float))
    return Completion(text or "", finish, logprob if values else None)


def finish_reason(given: object) -> str:
    """Return OpenAI's name for a reason why an answer ended; a missing one counts as `stop`."""
    return FINISH_REASONS.get(given, given) if isinstance(given, str) and given else "stop"


def joined_text(content: object, kind: str) -> str | None:
    """Return a string unchanged, or the joined texts of one kind of parts; None without text."""
    if isinstance(content, list):
        texts = [text for part in content if isinstance(text := get(part, kind), str)]
        return "".join(texts) if texts else None
    return content if isinstance(content, str) else None


def parse_usage(body: JSONObject) -> Usage:
    """Return the usage of a reply; missing or invalid counts become zeros."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return Usage()
    prompt = _count(usage.get("prompt_tokens"))
    cached = _count(get(usage.get("prompt_tokens_details"), "cached_tokens"))
    completion = _count(usage.get("completion_tokens"))
    return Usage(prompt, completion, min(cached, prompt))


def _count(value: object) -> int:
    if type(value) is int and 0 <= value <= MAX_TOKENS:
        return value
    is_number = isinstance(value, float) or type(value) is int
    return int(min(max(cast(float, value), 0), MAX_TOKENS)) if is_number else 0


def normalized(body: JSONObject) -> bytes | None:
    """Return the reply's JSON with zero usage if it has none and with contents as strings, or None
    if nothing changes. Clients read the fields of the usage without a check."""
    choices = body["choices"]
    usage = {} if isinstance(body.get("usage"), dict) else {"usage": no_usage()}
    changed = bool(usage)
    for choice in choices if isinstance(choices, list) else ():
        message = choice["message"]
        # With a call, the protocol allows null.
        calls = message.get("tool_calls") or message.get("function_call") or message.get("audio")
        if not isinstance(message.get("content"), str) and not calls:
            message["content"] = joined_text(message.get("content"), "text") or ""
            changed = True
    return orjson.dumps({**body, **usage}) if changed else None


def no_usage() -> dict[str, object]:
    return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def completion_json(reply: Reply) -> dict[str, object]:
    """Return the chat completion of a generator's reply."""
    choices = []
    for index, one in enumerate(reply.completions):
        content, refusal, finish = one.text, None, one.finish_reason
        if finish == "refusal":
            content, refusal, finish = "", one.text, "stop"
        message = {"role": "assistant", "content": content, "refusal": refusal}
        choice = {"index": index, "message": message, "logprobs": None, "finish_reason": finish}
        choices.append(choice)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": reply.model,
        "choices": choices,
        "usage": usage_json(reply.usage),
    }


def usage_json(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def error_body(payload: bytes) -> JSONObject:
    """Return the JSON object of an error reply, or its text; empty for the web pages that proxies
    often send."""
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError:
        if (repaired := repaired_json(payload)) is not None:
            return repaired[0]
        text = payload.decode(errors="replace").strip()
        body = {} if text.startswith("<") else text
    if isinstance(body, list):  # Gemini sends errors in a list
        body = next((one for one in body if isinstance(one, dict)), {})
    if isinstance(body, str):
        return {"message": body}
    return body if isinstance(body, dict) else {}


def error_message(body: object) -> str:
    """Return the server's message in the JSON of an error, empty if there is none."""
    return _message(get(body, "error")) or _message(body)


def reported_failure(body: JSONObject) -> tuple[int, JSONObject] | None:
    """Return the status and the JSON of an error inside a reply with HTTP status 200, else None.
    Some gateways report errors like this, for the whole reply or for one choice."""
    choices = body.get("choices")
    for part in (body, *(choices if isinstance(choices, list) else ())):
        error = get(part, "error")
        if error or get(part, "finish_reason") == "error":
            code = str(get(error, "code"))
            is_status = code.isdecimal() and len(code) == 3 and code[0] in "45"
            found = body if body.get("error") else {"error": {"message": _message(error)}}
            return (int(code) if is_status else 502), found
    return None


def _message(error: object) -> str:
    found = error if isinstance(error, str) else get(error, "message") or get(error, "detail")
    if found is None or isinstance(found, str):
        return found or ""
    try:
        return orjson.dumps(found).decode()
    except orjson.JSONEncodeError:  # deeper brackets than orjson encodes
        return ""


def get(value: object, name: str) -> object:
    """Return a field of a JSON value, None if the value is no object."""
    return cast(object, value.get(name)) if isinstance(value, dict) else None
