"""An exact repeat is answered from memory: which replies are kept, how long, and who waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bottega._util.lru import LRUCache
from bottega.gateway.response_cache.keys import exact_key, image_digest
from bottega.types import Completion

__all__ = [
    "Asked",
    "Bodies",
    "Flights",
    "Remembered",
    "Repeats",
    "exact_key",
    "image_digest",
    "may_be_repeated",
]

# What Python needs for an entry beside its bytes, about.
OVERHEAD = 600
SHORT = 4096
STRIDE = 997
Probe = tuple[tuple[str, ...], int, bytes]


@dataclass(frozen=True, slots=True)
class Remembered:
    """A whole reply as its first client got it: plain JSON, and who gave it."""

    payload: bytes
    route: str = ""
    model: str = ""

    @property
    def size(self) -> int:
        return len(self.payload) + len(self.route) + len(self.model) + OVERHEAD


def may_be_repeated(completions: Sequence[Completion]) -> bool:
    """One text that came to its own end. What was cut off, filtered, refused or left empty would
    be cut off for everybody who asks again."""
    return len(completions) == 1 and all(
        completion.finish_reason == "stop" and completion.text.strip() for completion in completions
    )


class Repeats(LRUCache[str, Remembered]):
    """Replies by `exact_key` within `max_bytes`, each for `seconds` (None: no limit)."""

    def __init__(
        self,
        max_bytes: int,
        seconds: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(max_bytes, lambda reply: reply.size, seconds=seconds, clock=clock)

    def replace(self, key: str, reply: Remembered) -> None:
        """Replace the reply of a request; do nothing if there is none."""
        if self.get(key) is not None:
            self.put(key, reply)


@dataclass(frozen=True, slots=True)
class Asked:
    """What must be known of a body to answer it from memory. `namespace` is what it asks for."""

    key: str
    stream: bool = False
    include_usage: bool = False
    namespace: str = ""


class Bodies:
    """Raw bodies that were understood before: an identical one need not be parsed, nor its images
    decoded and hashed. `scope` as for `exact_key`.

    Found by a few of its bytes and then compared whole: hashing 700 KB takes four times as long as
    comparing them, and Python remembers a hash with its object only. Two bodies with the same few
    bytes take turns. The least recently used are dropped beyond `max_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        self._bodies: LRUCache[Probe, tuple[bytes, Asked]] = LRUCache(
            max_bytes, lambda body: len(body[0]) + OVERHEAD
        )

    def __len__(self) -> int:
        return len(self._bodies)

    @property
    def size(self) -> int:
        return self._bodies.size

    def get(self, raw: bytes, scope: tuple[str, ...]) -> Asked | None:
        found = self._bodies.get(_probe(raw, scope))
        return found[1] if found is not None and found[0] == raw else None

    def put(self, raw: bytes, scope: tuple[str, ...], asked: Asked, urls: Iterable[str]) -> None:
        """`urls` are the images of the body. A body with an image that must be fetched is not
        stored: the next fetch may return another image."""
        if all(map(_is_inline, urls)):
            self._bodies.put(_probe(raw, scope), (raw, asked))


class Flights:
    """Identical requests at the same time: the first one asks the model, the others wait for it.

    Whatever ends the first one without a reply that may be repeated (a failure, a cut, a client
    that left) sends those who waited on their own way; they neither fail with it nor queue again.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Future[Remembered | None]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    async def wait(self, key: str) -> Remembered | None:
        """None, at once if nobody leads: ask the model yourself, within `lead`."""
        under_way = self._under_way.get(key)
        # One of several that wait may be cancelled; the future is everybody's.
        return None if under_way is None else await asyncio.shield(under_way)

    @contextmanager
    def lead(self, key: str) -> Generator[Callable[[Remembered], None]]:
        """The block may call what it gets with its reply; otherwise there is none at its end.
        Where somebody leads already, nobody waits for this one."""
        landing: asyncio.Future[Remembered | None] = asyncio.get_running_loop().create_future()
        leads = self._under_way.setdefault(key, landing) is landing

        def land(reply: Remembered | None) -> None:
            if leads and self._under_way.get(key) is landing:
                del self._under_way[key]
            if not landing.done():
                landing.set_result(reply)

        try:
            yield land
        finally:
            land(None)


def _is_inline(url: str) -> bool:
    return url[:5].lower() == "data:"


def _probe(raw: bytes, scope: tuple[str, ...]) -> Probe:
    if len(raw) <= SHORT:
        return scope, len(raw), raw
    return scope, len(raw), raw[: SHORT // 4] + raw[::STRIDE] + raw[-SHORT // 4 :]
