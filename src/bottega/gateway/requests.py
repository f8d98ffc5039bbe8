"""Gateway's view of a request: the query for examples, and reasons to forward it unchanged."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import cast

import orjson

from bottega.image import Image
from bottega.openai_api.request import ChatMessage, ChatRequest
from bottega.types import Query

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
