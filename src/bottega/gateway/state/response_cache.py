"""Cache of replies for equal requests (decision 12), in memory and from stored examples."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import orjson
from PIL import Image as Pillow

from bottega import pixels
from bottega._util.caching import LRUCache
from bottega._util.identity import json_digest
from bottega.image import FORMATS, Image
from bottega.openai_api.request import Body, ChatMessage, ChatRequest, ImagePart, OtherPart, Part
from bottega.openai_api.response import no_usage
from bottega.types import Completion, Example

# Fields of transport and identity, which do not change the answer.
TRANSPORT_FIELDS = {
    "messages",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "stream",
    "stream_options",
    "user",
}

Identity = Literal["bytes", "pixels"]
# Fields that need more than one text, change with the day, or must run at every call.
MORE_THAN_TEXT = {"functions", "logprobs", "store", "tools", "top_logprobs"}
EVEN_IF_EMPTY = {"audio", "web_search_options"}
# The protocol's defaults, which servers do not change. A server's own configuration may set
# temperature and top_p: absent is not the same as 1 there.
DEFAULTS: Mapping[str, object] = {
    "frequency_penalty": 0,
    "modalities": ["text"],
    "n": 1,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "stop": [],
}
NULL_IS_ABSENT = {
    *DEFAULTS,
    *EVEN_IF_EMPTY,
    "logit_bias",
    "max_completion_tokens",
    "max_tokens",
    "parallel_tool_calls",
    "reasoning_effort",
    "seed",
    "service_tier",
    "temperature",
    "tool_choice",
    "top_p",
    "verbosity",
}
# Clients may return these fields as they received them.
NULL_IN_MESSAGES = {"audio", "function_call", "name", "refusal", "tool_call_id", "tool_calls"}
EXACT_INTEGERS = 2**53
_ABSENT = object()
# Approximate memory of an entry beside its bytes.
OVERHEAD = 600
SHORT = 4096
STRIDE = 997
Probe = tuple[tuple[str, ...], int, bytes]


def exact_key(
    request: ChatRequest,
    images: Mapping[str, str],
    *,
    scope: tuple[str, ...],
    sampled: bool = False,
) -> str | None:
    """Return a key that is equal for requests that must get the same answer, streamed or not; None
    for requests whose answers are never repeated.

    `images` gives the `image_digest` for each URL in the body; a request with any other URL has no
    key, since its content is unknown. `scope` is everything outside of the body that decides the
    answer: namespace and overrides. An explicit temperature above 0 requests a new answer each
    time, unless `sampled`.
    """
    try:
        messages = [_message(message, images) for message in request.messages]
        return json_digest((scope, _fields(request.body, sampled), messages))
    except (_NotRepeatableError, TypeError):  # orjson: nested too deeply, or not JSON
        return None


def image_digest(image: Image, identity: Identity) -> str:
    """Return a digest that is equal for images with the same content.

    With `pixels`, an image that was re-encoded without loss is the same image. Bytes still decide
    if decoding loses something that a model might see: transparency, further frames, 16 bits, CMYK,
    or a rotation that not every server applies. Decoding blocks: call it in a thread. Raises
    `ImageError`.
    """
    if identity == "bytes" or not _is_defined_by_pixels(image):
        return f"bytes:{image.sha256}"
    digest = hashlib.sha256(f"{image.width}x{image.height}:".encode())
    for strip in image.rgb_strips():
        digest.update(strip.tobytes())
    return f"pixels:{digest.hexdigest()}"


class _NotRepeatableError(Exception):
    pass


def _fields(body: Body, sampled: bool) -> list[tuple[str, object]]:
    """Return the fields sorted by name. Nested objects keep their order: answers have the order of
    a schema's properties."""
    fields = {
        name: plain
        for name, value in body.items()
        if name not in TRANSPORT_FIELDS and (plain := _field(name, value)) is not _ABSENT
    }
    if fields.get("n", 1) != 1 or "modalities" in fields:
        raise _NotRepeatableError
    if not sampled and fields.get("temperature", 0) != 0:
        raise _NotRepeatableError
    # Old and new name of the same field; servers prefer the new one.
    if "max_completion_tokens" not in fields and "max_tokens" in fields:
        fields["max_completion_tokens"] = fields.pop("max_tokens")
    return sorted(fields.items())


def _field(name: str, value: object) -> object:
    if value is None and name in NULL_IS_ABSENT:
        return _ABSENT
    if name in EVEN_IF_EMPTY or (name in MORE_THAN_TEXT and value):
        raise _NotRepeatableError
    if name in MORE_THAN_TEXT:
        return _ABSENT
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT_INTEGERS:
        value = int(value)
    if name == "stop" and isinstance(value, str):
        value = [value]
    same = name in DEFAULTS and value == DEFAULTS[name] and not isinstance(value, bool)
    return _ABSENT if same else value


def _message(message: ChatMessage, images: Mapping[str, str]) -> object:
    if message.raw.get("audio") is not None:
        raise _NotRepeatableError
    rest = sorted(
        (name, value)
        for name, value in message.raw.items()
        if name != "content" and not (value is None and name in NULL_IN_MESSAGES)
    )
    parts = message.parts
    return rest, None if parts is None else [_part(part, images) for part in parts]


def _part(part: Part, images: Mapping[str, str]) -> list[tuple[str, object]]:
    if isinstance(part, OtherPart) and part.kind != "refusal":
        raise _NotRepeatableError  # the content of a file or a video by name may change
    fields = dict(part.raw)
    if isinstance(part, ImagePart):
        fields["image_url"] = _image(part, images)
    return sorted(fields.items())


def _image(part: ImagePart, images: Mapping[str, str]) -> object:
    if part.url not in images:
        raise _NotRepeatableError
    reference = part.raw["image_url"]
    fields = reference if isinstance(reference, dict) else {}
    rest = sorted(item for item in fields.items() if item[0] not in ("url", "detail"))
    return images[part.url], part.detail or "auto", rest


def _is_defined_by_pixels(image: Image) -> bool:
    readers = [name for name in FORMATS if name in Pillow.OPEN]
    with Pillow.open(io.BytesIO(image.data), formats=readers) as opened:
        return (
            opened.mode in ("1", "L", "P", "RGB")
            and getattr(opened, "n_frames", 1) == 1
            and "transparency" not in opened.info
            and pixels.upright_transpose(opened) is None
        )


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
        self, max_bytes: int, seconds: float | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(max_bytes, lambda reply: reply.size, seconds=seconds, clock=clock)
        # Set if other gateways may invalidate or replace replies.
        self.is_current: Callable[[], bool] = lambda: True
        self.on_replace: Callable[[str, CachedReply], None] = lambda key, reply: None
        self.generation = 0  # counts invalidations

    def get(self, key: str) -> CachedReply | None:
        return super().get(key) if self.is_current() else None

    def put(
        self, key: str, value: CachedReply, age: float = 0.0, *, generation: int | None = None
    ) -> None:
        """Add a reply, unless replies were invalidated since the request began in `generation`."""
        if self.is_current() and generation in (None, self.generation):
            super().put(key, value, age)

    def clear(self) -> None:
        self.generation += 1
        super().clear()

    def pop(self, key: str) -> CachedReply | None:
        self.generation += 1
        return super().pop(key)

    def replace(self, key: str, reply: CachedReply) -> None:
        """Replace the reply of a request; do nothing if there is none."""
        if self.get(key) is not None:
            self.put(key, reply)
        self.on_replace(key, reply)


@dataclass(frozen=True, slots=True)
class RepeatedRequest:
    """Facts about a parsed body that suffice to answer it from the cache."""

    key: str
    stream: bool = False
    include_usage: bool = False
    namespace: str = ""
    variant: str = ""


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
        if all(url[:5].lower() == "data:" for url in urls):
            self._bodies.put(_probe(raw, scope), (raw, request))


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
        # Repeating the answer costs no tokens, so its usage is zero.
        message = {"role": "assistant", "content": stored.answer}
        reply = {
            "id": f"chatcmpl-{stored.id}",
            "object": "chat.completion",
            "created": int(answered),
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": no_usage(),
        }
        return CachedReply(orjson.dumps(reply), route, model), time.time() - answered
