"""Cache of complete replies for exact repeats: in memory, and from stored examples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import orjson

from bottega._util.caching import LRUCache
from bottega.openai_api.response import no_usage
from bottega.types import Completion, Example

# Approximate memory of an entry beside its bytes.
OVERHEAD = 600
SHORT = 4096
STRIDE = 997
Probe = tuple[tuple[str, ...], int, bytes]


@dataclass(frozen=True, slots=True)
class CachedReply:
    """A complete reply as its first client got it: its JSON, its tier and its model."""

    payload: bytes
    route: str = ""
    model: str = ""

    @property
    def size(self) -> int:
        return len(self.payload) + len(self.route) + len(self.model) + OVERHEAD


def is_repeatable(completions: Sequence[Completion]) -> bool:
    """Return whether the reply is one text that the model ended itself. A reply that was cut off,
    filtered, refused or empty must not be repeated to other clients."""
    return len(completions) == 1 and all(
        completion.finish_reason == "stop" and completion.text.strip() for completion in completions
    )


class ReplyCache(LRUCache[str, CachedReply]):
    """Replies by `exact_key` within `max_bytes`, each for `seconds` (None: no limit)."""

    def __init__(
        self,
        max_bytes: int,
        seconds: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(max_bytes, lambda reply: reply.size, seconds=seconds, clock=clock)

    def replace(self, key: str, reply: CachedReply) -> None:
        """Replace the reply of a request; do nothing if there is none."""
        if self.get(key) is not None:
            self.put(key, reply)


@dataclass(frozen=True, slots=True)
class RepeatedRequest:
    """Facts about a parsed body that suffice to answer it from the cache."""

    key: str
    stream: bool = False
    include_usage: bool = False
    namespace: str = ""


class BodyCache:
    """Cache of parsed bodies by their bytes: an identical body is not parsed again, and its images
    are neither decoded nor hashed. `scope` as for `exact_key`.

    A body is found by a sample of its bytes and then compared as a whole: hashing 700 KB takes four
    times as long as comparing them, and Python caches the hash of an object only. Two bodies with
    the same sample replace each other. Beyond `max_bytes` the least recently used are dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        self._bodies: LRUCache[Probe, tuple[bytes, RepeatedRequest]] = LRUCache(
            max_bytes, lambda body: len(body[0]) + OVERHEAD
        )

    def __len__(self) -> int:
        return len(self._bodies)

    @property
    def size(self) -> int:
        return self._bodies.size

    def get(self, raw: bytes, scope: tuple[str, ...]) -> RepeatedRequest | None:
        found = self._bodies.get(_probe(raw, scope))
        return found[1] if found is not None and found[0] == raw else None

    def put(
        self, raw: bytes, scope: tuple[str, ...], request: RepeatedRequest, urls: Iterable[str]
    ) -> None:
        """`urls` are the images of the body. A body with an image that must be fetched is not
        stored: the next fetch may return another image."""
        if all(map(_is_inline, urls)):
            self._bodies.put(_probe(raw, scope), (raw, request))


def _is_inline(url: str) -> bool:
    return url[:5].lower() == "data:"


def _probe(raw: bytes, scope: tuple[str, ...]) -> Probe:
    if len(raw) <= SHORT:
        return scope, len(raw), raw
    return scope, len(raw), raw[: SHORT // 4] + raw[::STRIDE] + raw[-SHORT // 4 :]


@dataclass(frozen=True)
class StoredReplies:
    """Finder of stored replies. `lookup` maps an `exact_key` to the time of the answer and the id
    of its example."""

    lookup: Callable[[str], tuple[float, str] | None]

    def find(
        self, key: str, example: Callable[[str], Example | None]
    ) -> tuple[CachedReply, float] | None:
        """Return the reply and its age in seconds, None if the example is gone. Blocks."""
        found = self.lookup(key)
        if found is None or (stored := example(found[1])) is None:
            return None
        answered = found[0]
        route, _, model = (stored.source or "").partition(":")
        payload = orjson.dumps(_reply(stored, model, int(answered)))
        return CachedReply(payload, route, model), time.time() - answered


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
