"""Exact repeats from answers that are stored in the cache; they survive a restart."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from bottega.gateway.response_cache.memory import Remembered
from bottega.openai_api.response import no_usage
from bottega.types import Example


@dataclass(frozen=True)
class StoredRepeats:
    """Finder of stored replies. `lookup` maps an `exact_key` to the time of the answer and the id
    of its example."""

    lookup: Callable[[str], tuple[float, str] | None]

    def find(
        self, key: str, example: Callable[[str], Example | None]
    ) -> tuple[Remembered, float] | None:
        """Return the reply and its age in seconds, None if the example is gone. Blocks."""
        found = self.lookup(key)
        if found is None or (stored := example(found[1])) is None:
            return None
        answered = found[0]
        route, _, model = (stored.source or "").partition(":")
        payload = orjson.dumps(_reply(stored, model, int(answered)))
        return Remembered(payload, route, model), time.time() - answered


def _reply(example: Example, model: str, created: int) -> dict[str, object]:
    """Return a chat completion with zero usage: repeating the answer costs no tokens."""
    message = {"role": "assistant", "content": example.answer}
    return {
        "id": f"chatcmpl-{example.id}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": no_usage(),
    }
