"""An exact repeat is answered from memory: which replies are kept, how long, and who waits."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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


class Repeats:
    """Replies by `exact_key`, for `seconds` (None: without end), the least recently used dropped
    beyond `max_bytes`. For one event loop."""

    def __init__(
        self,
        max_bytes: int,
        seconds: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep, self._seconds, self._clock = max_bytes, seconds, clock
        self._held = 0
        self._replies: OrderedDict[str, tuple[Remembered, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replies)

    @property
    def held_bytes(self) -> int:
        return self._held

    def get(self, key: str) -> Remembered | None:
        found = self._replies.get(key)
        if found is None:
            return None
        reply, stored = found
        if self._seconds is not None and self._clock() - stored >= self._seconds:
            self._drop(key)
            return None
        self._replies.move_to_end(key)
        return reply

    def put(self, key: str, reply: Remembered, age: float = 0.0) -> None:
        """Keep the reply, given `age` seconds ago, in place of an older one. A reply larger than
        the whole cache is not kept."""
        self._drop(key)
        if reply.size > self._keep:
            return
        self._replies[key] = reply, self._clock() - age
        self._held += reply.size
        while self._held > self._keep:
            self._drop(next(iter(self._replies)))

    def replace(self, key: str, reply: Remembered) -> None:
        """Replace the reply of a request; do nothing if there is none."""
        if self.get(key) is not None:
            self.put(key, reply)

    def clear(self) -> None:
        self._replies.clear()
        self._held = 0

    def _drop(self, key: str) -> None:
        if found := self._replies.pop(key, None):
            self._held -= found[0].size


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
        self._keep = max_bytes
        self._held = 0
        self._bodies: OrderedDict[tuple[tuple[str, ...], int, bytes], tuple[bytes, Asked]] = (
            OrderedDict()
        )

    def __len__(self) -> int:
        return len(self._bodies)

    @property
    def held_bytes(self) -> int:
        return self._held

    def get(self, raw: bytes, scope: tuple[str, ...]) -> Asked | None:
        probe = _probe(raw, scope)
        found = self._bodies.get(probe)
        if found is None or found[0] != raw:
            return None
        self._bodies.move_to_end(probe)
        return found[1]

    def put(self, raw: bytes, scope: tuple[str, ...], asked: Asked, urls: Iterable[str]) -> None:
        """`urls` are the images of the body. One that has to be fetched may show something else
        the next time: such a body is read anew."""
        if len(raw) + OVERHEAD > self._keep or not all(map(_is_inline, urls)):
            return
        probe = _probe(raw, scope)
        self._drop(probe)
        self._bodies[probe] = raw, asked
        self._held += len(raw) + OVERHEAD
        while self._held > self._keep:
            self._drop(next(iter(self._bodies)))

    def _drop(self, probe: tuple[tuple[str, ...], int, bytes]) -> None:
        if found := self._bodies.pop(probe, None):
            self._held -= len(found[0]) + OVERHEAD


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


def _probe(raw: bytes, scope: tuple[str, ...]) -> tuple[tuple[str, ...], int, bytes]:
    if len(raw) <= SHORT:
        return scope, len(raw), raw
    return scope, len(raw), raw[: SHORT // 4] + raw[::STRIDE] + raw[-SHORT // 4 :]
