"""A request of the Responses API as a chat-completions body.

Only what the translation itself reads is checked here; the rest is checked as a chat body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bottega.gateway.fields import required, wrong_type
from bottega.gateway.ports import Body
from bottega.gateway.responses.fields import (
    chat_format,
    chat_tool_choice,
    chat_tools,
    optional,
    unsupported,
)
from bottega.gateway.responses.items import WHOLE, Conversation

CHAT = "POST /v1/chat/completions takes it"
# What the Responses API has and this gateway does not, and what to do instead.
MISSING: Mapping[str, str] = {
    "background": "leave it out and wait for the answer, or read it as a stream",
    "context_management": "leave it out and shorten the input yourself",
    "conversation": WHOLE,
    "moderation": "leave it out",
    "previous_response_id": WHOLE,
    "prompt": "prompts are not kept here: send their text as instructions and input",
    "top_logprobs": CHAT,
}
# Fields of chat completions that would silently say something else here.
CHAT_ONLY: Mapping[str, str] = {
    "audio": CHAT,
    "function_call": "it is called tool_choice here",
    "functions": "they are called tools here",
    "logprobs": CHAT,
    "max_completion_tokens": "it is called max_output_tokens here",
    "max_tokens": "it is called max_output_tokens here",
    "messages": "they are called input here",
    "modalities": CHAT,
    "n": CHAT,
    "reasoning_effort": "it is called reasoning.effort here",
    "response_format": "it is called text.format here",
    "verbosity": "it is called text.verbosity here",
}
# Translated, or without a meaning for what this gateway does: they do not go on as they are.
OWN = {
    *MISSING,
    *CHAT_ONLY,
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "store",
    "stream_options",
    "text",
    "tool_choice",
    "tools",
    "truncation",
}


@dataclass(frozen=True)
class Translated:
    """`origins` tell where the content of each message stood in the request."""

    body: Body
    origins: Sequence[str]


def translated(given: Body) -> Translated:
    """Raises `Refusal` for what chat completions cannot say."""
    for name, hint in (*MISSING.items(), *CHAT_ONLY.items()):
        if given.get(name):
            raise unsupported(f"'{name}' is not supported here", name, hint)
    _check_included(given.get("include"))
    conversation = Conversation()
    if instructions := optional(given, "instructions", str):
        conversation.say("system", instructions, "instructions")
    required(given, "input", "")
    conversation.read(given["input"])
    body: dict[str, object] = {
        name: value for name, value in given.items() if value is not None and name not in OWN
    }
    body |= {"messages": conversation.messages, **_settings(given)}
    choice, parallel = given.get("tool_choice"), optional(given, "parallel_tool_calls", bool)
    asked = {
        "tools": chat_tools(given.get("tools")),
        "tool_choice": chat_tool_choice(choice),
        "parallel_tool_calls": parallel,
    }
    if asked["tools"]:  # servers refuse the others without them
        body |= {name: value for name, value in asked.items() if value is not None}
    if given.get("stream") is True:
        body["stream_options"] = {"include_usage": True}
    return Translated(body, conversation.origins)


def _check_included(include: object) -> None:
    if include is None:
        return
    if not isinstance(include, list) or not all(isinstance(one, str) for one in include):
        wrong_type("include", "an array of strings", include)
    # The others tell about tools that are refused, or need what only OpenAI's servers have.
    if "message.output_text.logprobs" in include:
        raise unsupported("log probabilities are not supported here", "include", CHAT)


def _settings(given: Body) -> dict[str, object]:
    reasoning = optional(given, "reasoning", dict) or {}
    text = optional(given, "text", dict) or {}
    settings = {
        "max_completion_tokens": given.get("max_output_tokens"),
        "reasoning_effort": reasoning.get("effort"),
        "verbosity": text.get("verbosity"),
        "response_format": chat_format(text.get("format")),
    }
    _check_metadata(optional(given, "metadata", dict) or {})
    return {name: value for name, value in settings.items() if value is not None}


def _check_metadata(metadata: Mapping[object, object]) -> None:
    for name, value in metadata.items():
        if not isinstance(value, str):
            wrong_type(f"metadata.{str(name)[:64]}", "a string", value)
