"""Requests as the gateway reads them: overrides, the query for examples, reasons to bypass it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson

from bottega.image import Image
from bottega.openai_api.errors import ApiError
from bottega.openai_api.request import ChatMessage, ChatRequest
from bottega.types import Query

PREFIX = "x-bottega-"
MODEL = "bottega"
MAX_SHOTS = 64
MAX_MODEL = 1000
SWITCHES = ("no-store", "no-retrieve", "no-replay")
FORMS = {
    "shots": f"a whole number from 0 to {MAX_SHOTS}",
    "master-rate": "a number from 0 to 1",
    "namespace": "a name",
}
EXAMPLE = "bottega:shots=2,no-store"


@dataclass(frozen=True)
class Overrides:
    """Options of one request; None and True keep the configured behaviour. `tier` replaces the
    router's choice."""

    tier: str | None = None
    shots: int | None = None
    master_rate: float | None = None
    namespace: str | None = None
    store: bool = True
    retrieve: bool = True
    replay: bool = True


NONE = Overrides()


def read_overrides(model: str, headers: Mapping[str, str], tiers: Mapping[str, str]) -> Overrides:
    """Return the overrides. `tiers` maps every model id that clients may use to its tier, "" for
    the router's choice. A header takes precedence over the model's suffix. Raises `ApiError`."""
    name, _, suffix = model.partition(":") if model not in tiers else (model, "", "")
    if name not in tiers or len(model) > MAX_MODEL:
        raise ApiError(
            f"the model {model[:200]!r} does not exist",
            status=404,
            code="model_not_found",
            param="model",
            hint=f"use one of {', '.join(tiers)}",
        )
    settings = [(word, "model") for word in filter(None, suffix.split(","))]
    for header, value in headers.items():
        word = header.removeprefix(PREFIX)
        words = value.split(",") if word == "cache" else [f"{word}={value}"]
        settings += [(word, header) for word in filter(None, words)]
    found: dict[str, Any] = {"tier": tiers[name] or None}
    for setting, param in settings:
        found |= _read(setting.strip(), param, tiers)
    return Overrides(**found)


def _read(setting: str, param: str, tiers: Mapping[str, str]) -> dict[str, object]:
    word, _, value = setting.partition("=")
    try:
        match word:
            case "shots" if 0 <= (shots := int(value)) <= MAX_SHOTS:
                return {"shots": shots}
            case "master-rate" if 0 <= (rate := float(value)) <= 1:
                return {"master_rate": rate}
            case "namespace" if value:
                return {"namespace": value}
            case "route" if tiers.get(f"{MODEL}/{value}"):
                return {"tier": value}
            case _ if word in SWITCHES and not value:
                return {word.removeprefix("no-"): False}
    except ValueError:
        pass
    raise _error(setting[:200], param, tiers)


def _error(setting: str, param: str, tiers: Mapping[str, str]) -> ApiError:
    word, _, value = setting.partition("=")
    names = [tier for tier in tiers.values() if tier]
    forms = {**FORMS, **({"route": _joined(names)} if names else {})}
    message, hint = f"{word} is invalid, got {value!r}", f"use {forms.get(word)}"
    if word in SWITCHES:
        hint = f"write {word} without a value"
    elif word not in forms:
        message, hint = (
            f"{setting!r} is not an override",
            f"use {_joined([*forms, *SWITCHES])}: {EXAMPLE}",
        )
    return ApiError(message, code="invalid_override", param=param, hint=hint)


def _joined(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


# Titles, tags and follow-ups that chat front ends request on their own.
BACKGROUND = r"\A\s*#{1,3} Task:\s"
# Fields of transport and identity, and those that change a reply no more than chance does.
TUNING = {
    "frequency_penalty",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "metadata",
    "model",
    "n",
    "parallel_tool_calls",
    "presence_penalty",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "response_format",
    "safety_identifier",
    "seed",
    "service_tier",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "top_logprobs",
    "top_p",
    "user",
}
MAX_MILD_TEMPERATURE = 1.0  # above it, replies may differ in meaning


def to_query(request: ChatRequest, images: Sequence[Image], choices: tuple[str, ...] = ()) -> Query:
    """Return the query of the last user turn, with all images of the conversation."""
    return Query(request.question, tuple(images), choices, context=context_of(request))


def context_of(request: ChatRequest) -> str:
    """Return a digest of everything besides the conversation that the answer depends on; empty if
    there is nothing. Unknown fields count: on some servers they can determine the answer."""
    body = request.body
    instructions, output_format = request.instructions, body.get("response_format")
    control = {
        name: value
        for name in body.keys() - TUNING
        if (value := body[name]) not in (None, [], {}, "", 0)
    }
    if cast(float, body.get("temperature") or 0) > MAX_MILD_TEMPERATURE:
        control["temperature"] = "hot"
    if not instructions and output_format is None and not control:
        return ""
    parts: list[object] = [[_instruction(message) for message in instructions], output_format]
    parts += [control] if control else []
    return hashlib.sha256(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def _instruction(message: ChatMessage) -> object:
    images = [hashlib.sha256(image.url.encode()).hexdigest() for image in message.images]
    return [message.text, *images] if images else message.text


def bypass_reason(request: ChatRequest, background: re.Pattern[str]) -> str | None:
    """Return why a request cannot get demonstrations, None if it can."""
    if request.has_tools:
        return "tools"
    if request.has_audio:
        return "audio"
    last = request.last_user_turn
    if last is None:
        return "no question"
    if request.has_other_parts:
        return "parts"
    if background.search(request.question):
        return "background"
    return None if request.question.strip() or last.images else "nothing asked"
