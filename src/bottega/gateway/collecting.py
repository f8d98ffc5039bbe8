"""A stream as the whole reply that it would have been."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from bottega.gateway.ports import Completed
from bottega.generation.wire import parse_usage
from bottega.types import Completion

HEAD = ("id", "created", "model", "system_fingerprint", "service_tier")
# Pieces of these are joined; of anything else in a delta the last counts.
JOINED = ("content", "refusal", "reasoning_content", "reasoning")


class Collected:
    """Takes the events of a stream as they pass by. What a delta may hold beside texts (tool calls,
    audio) is not put together: such replies are neither kept nor repeated."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None
        self._messages: dict[int, dict[str, Any]] = {}
        self._finished: dict[int, str] = {}

    def take(self, payload: bytes) -> bool:
        """False for the chunk that only tells the usage, which not every client asked for."""
        chunk = orjson.loads(payload)
        for name in HEAD:
            if name in chunk and name not in self._head:
                self._head[name] = chunk[name]
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        choices = chunk.get("choices") or []
        for choice in choices:
            self._take(choice)
        return bool(choices) or self._usage is None

    def completed(self) -> Completed:
        completions = tuple(self._completions())
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", **self._messages[index]},
                "logprobs": None,
                "finish_reason": self._finished.get(index),
            }
            for index in sorted(self._messages)
        ]
        reply = {**self._head, "object": "chat.completion", "choices": choices}
        if self._usage is not None:
            reply["usage"] = self._usage
        usage = None if self._usage is None else parse_usage(reply)
        model = str(self._head.get("model", ""))
        return Completed(orjson.dumps(reply), model, completions, usage)

    def _take(self, choice: dict[str, Any]) -> None:
        index = choice.get("index") or 0
        message = self._messages.setdefault(index, {"content": ""})
        for name, piece in (choice.get("delta") or {}).items():
            if name in JOINED and isinstance(piece, str):
                message[name] = message.get(name, "") + piece
            elif name != "role" and piece is not None and name not in JOINED:
                message[name] = piece
        if isinstance(finish := choice.get("finish_reason"), str):
            self._finished[index] = finish

    def _completions(self) -> Iterator[Completion]:
        for index in sorted(self._messages):
            message = self._messages[index]
            finish = self._finished.get(index, "cut")
            if message.get("refusal"):
                yield Completion(message["refusal"], "refusal")
            elif set(message) - {*JOINED}:
                yield Completion(message["content"], "other")
            else:
                yield Completion(message["content"], finish)
