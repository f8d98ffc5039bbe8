"""Replies that a client could stumble over, put right."""

from __future__ import annotations

import orjson

from bottega.generation.wire import JSONObject, joined


def mended(reply: JSONObject) -> bytes | None:
    """The reply written anew if it lacks its usage or if a content is no string, else None.

    A usage that nobody told counts nothing: clients read its fields without asking.
    """
    choices = reply["choices"]
    silent = [
        message
        for choice in (choices if isinstance(choices, list) else ())
        if _wants_text(message := choice["message"])
    ]
    told = isinstance(reply.get("usage"), dict)
    if told and not silent:
        return None
    for message in silent:
        message["content"] = joined(message.get("content"), "text") or ""
    usage = {} if told else {"usage": no_usage()}
    return orjson.dumps({**reply, **usage})


def no_usage() -> dict[str, object]:
    return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def _wants_text(message: JSONObject) -> bool:
    """Null is what the protocol says beside a call."""
    calls = message.get("tool_calls") or message.get("function_call") or message.get("audio")
    return not isinstance(message.get("content"), str) and not calls
