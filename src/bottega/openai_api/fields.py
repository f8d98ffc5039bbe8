"""Fields of a chat-completions body: types, errors, dialects of servers, and prompts as fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, cast

from bottega._util.caching import LRUCache
from bottega.errors import RejectedError
from bottega.image import Image
from bottega.openai_api.errors import ApiError, JSONObject
from bottega.types import Message, Sampling

ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
# A tool call, or the answer to one, may be without content.
ROLES_WITHOUT_CONTENT = {"assistant", "tool", "function"}
MAX_NAME = 200


@dataclass(frozen=True)
class _Kind:
    expected: str
    fits: Callable[[object], bool]
    numbers: tuple[type, ...] = ()
    """Types of which only the value can be wrong."""

    def reject(self, name: str, value: object) -> NoReturn:
        if type(value) not in self.numbers:
            wrong_type(name, self.expected, value)
        raise invalid(
            f"Invalid value for '{name}': expected {self.expected}, but got {value}.",
            name,
            "invalid_value",
        )


def _is_integer(value: object, low: int = 0, high: int = 2**53) -> bool:
    return type(value) is int and low <= value <= high


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(cast(float, value)) <= 1e9


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


STRING = _Kind("a string", lambda value: isinstance(value, str))
BOOLEAN = _Kind("a boolean", lambda value: isinstance(value, bool))
OBJECT = _Kind("an object", lambda value: isinstance(value, dict))
OBJECTS = _Kind("an array of objects", lambda value: _is_list_of(value, dict))
INTEGERS, NUMBERS = (int,), (int, float)
NUMBER = _Kind("a number from -1e9 to 1e9", _is_number, NUMBERS)
COUNT = _Kind("an integer of 1 or more", lambda value: _is_integer(value, 1), INTEGERS)
NATURAL = _Kind("an integer of 0 or more", _is_integer, INTEGERS)
TEMPERATURE = _Kind(
    "a number from 0 to 1e9", lambda v: _is_number(v) and cast(float, v) >= 0, NUMBERS
)
# Null means absent everywhere.
FIELDS: Mapping[str, _Kind] = {
    "frequency_penalty": NUMBER,
    "functions": OBJECTS,
    "logit_bias": OBJECT,
    "logprobs": BOOLEAN,
    "max_completion_tokens": COUNT,
    "max_tokens": COUNT,
    "metadata": OBJECT,
    "min_tokens": NATURAL,
    "model": STRING,
    "n": _Kind("an integer from 1 to 128", lambda value: _is_integer(value, 1, 128), INTEGERS),
    "parallel_tool_calls": BOOLEAN,
    "presence_penalty": NUMBER,
    "reasoning_effort": STRING,
    "response_format": OBJECT,
    "seed": _Kind("an integer", lambda value: _is_integer(value, -(2**63), 2**64), INTEGERS),
    "stop": _Kind(
        "a string or an array of strings",
        lambda value: isinstance(value, str) or _is_list_of(value, str),
    ),
    "store": BOOLEAN,
    "stream": BOOLEAN,
    "stream_options": OBJECT,
    "temperature": TEMPERATURE,
    "tools": OBJECTS,
    "top_logprobs": NATURAL,
    "top_p": NUMBER,
    "user": STRING,
    "verbosity": STRING,
}


def require(found: Mapping[str, object], name: str, where: str) -> None:
    if found.get(name) is None:
        param = f"{where}.{name}" if where else name
        raise invalid(
            f"Missing required parameter: '{param}'.", param, "missing_required_parameter"
        )


def wrong_type(param: str, expected: str, value: object) -> NoReturn:
    named = f"'{param}'" if param else "the request's body"
    got = JSON_NAMES.get(type(value), "something else")
    raise invalid(
        f"Invalid type for {named}: expected {expected}, but got {got}.",
        param or None,
        "invalid_type",
    )


JSON_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a decimal number",
    bool: "a boolean",
    dict: "an object",
    list: "an array",
    type(None): "null",
}


def above_limit(param: str, problem: str, code: str = "limit_exceeded") -> NoReturn:
    param = param[:MAX_NAME]  # a client may send names of any length
    raise ApiError(
        f"Invalid '{param}': {problem}.",
        status=400,
        code=code,
        param=param,
        hint="send less at once, or ask the operator for a higher limit",
    )


def image_error(message: str, param: str, hint: str) -> ApiError:
    return ApiError(message, status=400, code="invalid_image", param=param, hint=hint)


def invalid(message: str, param: str | None, code: str) -> ApiError:
    return ApiError(
        message,
        status=400,
        code=code,
        param=param,
        hint="see the chat-completions reference for the fields of a request",
    )


# Fields of OpenAI's chat completions, without `web_search_options`: each search has a price.
OPENAI = {
    *FIELDS,
    "audio",
    "function_call",
    "messages",
    "modalities",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "tool_choice",
}
# Sampling parameters of vLLM, SGLang and llama.cpp: they only choose among tokens.
SAMPLING = {
    "min_p",
    "repeat_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "top_k",
    "typical_p",
}
# vLLM's output constraints. They mask tokens, as `response_format` does; its other options choose
# the code that runs (`guided_decoding_backend`) or accept a whole grammar.
CONSTRAINTS = {"guided_choice", "guided_json", "guided_regex"}
STRUCTURED = "structured_outputs"
STRUCTURED_OPTIONS = {"choice", "json", "regex"}
ALLOWED = OPENAI | SAMPLING | CONSTRAINTS
# Clients of local servers send these defaults; other values need the operator's permission.
DEFAULTS: Mapping[str, object] = {
    "add_generation_prompt": True,
    "best_of": 1,
    "echo": False,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "priority": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
}
SERVICE_TIER = "service_tier"
# Price lists have one price per model, which is that of these service tiers.
PLAIN_TIERS = (None, "auto", "default")


def allowed_fields(body: JSONObject, more: Collection[str] = ()) -> JSONObject:
    """Return the body without fields at their `DEFAULTS`. Raise `ApiError` for a field that is not
    allowed; `more` are fields that the operator allows. Other fields may change what a server does
    or costs: chat templates, priorities, logits processors. A null field counts as absent."""
    # True == 1 in Python, so compare the types; JavaScript writes 1.0 as 1.
    dropped = {
        name
        for name in body.keys() & DEFAULTS.keys()
        if name not in more
        and body[name] == DEFAULTS[name]
        and isinstance(body[name], bool) is isinstance(DEFAULTS[name], bool)
    }
    if dropped:
        body = {name: value for name, value in body.items() if name not in dropped}
    for name, value in body.items():
        if name == SERVICE_TIER and value not in PLAIN_TIERS:
            problem = f"{name} {str(value)[:MAX_NAME]!r} is not available here"
            raise _refusal(problem, name, 'send "default"')
        allowed = name in ALLOWED or name in more or name == SERVICE_TIER
        if name == STRUCTURED and isinstance(value, dict):
            allowed = allowed or value.keys() <= STRUCTURED_OPTIONS
        if not allowed and value is not None:
            name = name[:MAX_NAME]
            problem = f"{name!r} is not forwarded by this gateway"
            raise _refusal(problem, name, "ask the operator to allow it ([limits] fields)")
    return body


def _refusal(problem: str, name: str, alternative: str) -> ApiError:
    return ApiError(
        f"Unsupported parameter: {problem}.",
        code="unsupported_parameter",
        param=name,
        hint=f"leave it out, or {alternative}",
    )


UNKNOWN_FIELD = re.compile(
    r"(?i)unsupported|not supported|unrecogni|unknown|unexpected|not permitted|not allowed"
    r"|forbidden|deprecated|does not support|instead"
)


LIMITS = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
LIMIT_NAME = re.compile(r"\bmax_(completion_)?tokens\b")


@dataclass(frozen=True)
class Dialect:
    """Fields that a server accepts, learned from its errors. `limit_field` is the only name of the
    token limit that it accepts, None for both; another model behind the same name may change it."""

    limit_field: str | None = None
    stream_options: bool = True

    def spell(self, fields: dict[str, object]) -> dict[str, object]:
        """Return the fields as the server accepts them."""
        if self.limit_field is not None and LIMITS[self.limit_field] in fields:
            fields = dict(fields)
            limit = fields.pop(LIMITS[self.limit_field])
            fields.setdefault(self.limit_field, limit)
        if not self.stream_options and "stream_options" in fields:
            fields = {name: value for name, value in fields.items() if name != "stream_options"}
        return fields

    def after(self, error: RejectedError, fields: dict[str, object]) -> Dialect | None:
        """Return the dialect to try after this error for `fields`, None if none can help."""
        message = f"{error} {getattr(error, 'param', '')}"
        if not rejects_field(error):
            return None
        given = next((name for name in LIMITS if name in fields), None)
        if given is not None and LIMIT_NAME.search(message):
            return replace(self, limit_field=LIMITS[self.limit_field or given])
        if self.stream_options and "stream_options" in message and "stream_options" in fields:
            return replace(self, stream_options=False)
        return None


def rejects_field(error: RejectedError) -> bool:
    """Return whether the error says that the server does not know or support a field."""
    return error.status in (400, 422) and UNKNOWN_FIELD.search(str(error)) is not None


DataUrl = Callable[[Image], str]
KEEP_ENCODED = 64 << 20


def data_url_cache() -> DataUrl:
    """Return a function that encodes images as data URLs and caches the results by content: the
    same examples are shown repeatedly, and a knowledge base returns new objects for each query."""
    encoded: LRUCache[str, str] = LRUCache(KEEP_ENCODED, size=len)

    def data_url(image: Image) -> str:
        url = encoded.get(image.sha256)
        if url is None:
            encoded.put(image.sha256, url := image.data_url)
        return url

    return data_url


def sampling_fields(sampling: Sampling) -> dict[str, object]:
    """Return the sampling parameters as fields of a body, None for those to leave out."""
    return {
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "n": sampling.n if sampling.n > 1 else None,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
    }


def messages_json(messages: Sequence[Message], data_url: DataUrl) -> list[dict[str, object]]:
    """Return the messages of a prompt as JSON, images as data URLs. Blocks: encodes images."""
    rows: list[dict[str, object]] = []
    for message in messages:
        parts = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": data_url(part)}}
            for part in message.parts
        ]
        is_plain = len(parts) == 1 and parts[0]["type"] == "text"
        rows.append({"role": message.role, "content": parts[0]["text"] if is_plain else parts})
    return rows
