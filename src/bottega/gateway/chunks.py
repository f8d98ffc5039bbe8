"""A whole chat completion as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import orjson

from bottega.generation.wire import JSONObject

KEPT = ("id", "created", "model", "system_fingerprint", "service_tier")


def chunks(reply: JSONObject) -> Iterator[bytes]:
    """For each choice its role, its content and its end; then the usage, if the reply has one."""
    head = {"object": "chat.completion.chunk"} | {
        name: reply[name] for name in KEPT if reply.get(name) is not None
    }
    choices = reply.get("choices")
    for index, choice in enumerate(choices if isinstance(choices, list) else ()):
        for part in _parts(choice, index):
            yield orjson.dumps({**head, "choices": [part], "usage": None})
    if isinstance(usage := reply.get("usage"), dict):
        yield orjson.dumps({**head, "choices": [], "usage": usage})


def _parts(choice: JSONObject, index: int) -> Iterator[dict[str, object]]:
    found = choice.get("message")
    message = cast(JSONObject, found) if isinstance(found, dict) else {}
    logprobs, finish = choice.get("logprobs"), choice.get("finish_reason")
    said = {name: value for name, value in message.items() if name != "role" and value is not None}
    if isinstance(calls := said.get("tool_calls"), list):  # a delta says which call it belongs to
        said["tool_calls"] = [{"index": number} | call for number, call in enumerate(calls)]
    yield _part(index, {"role": "assistant", "content": "", "refusal": None})
    if any(said.values()):
        yield _part(index, said, logprobs=logprobs)
    yield _part(index, {}, finish=finish if isinstance(finish, str) else "stop")


def _part(
    index: int, delta: dict[str, object], *, finish: str | None = None, logprobs: object = None
) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
