"""Who leaves when a knowledge base is full: each policy is one ORDER BY, first to go first.

Columns at hand are those of `examples` and of `uses` (count, last, saved_usd), the latter NULL for
what was never used.
"""

from __future__ import annotations

import random
import time
from typing import Protocol

from bottega.errors import SettingError

PRIME = 2_147_483_647
HOUR = 3600.0


class Eviction(Protocol):
    """`protect` spares the newest entries as long as older ones can go. Pinned ones never go."""

    @property
    def protect(self) -> int: ...

    def order(self) -> str: ...


class RandomEviction:
    """Everybody is as likely to go as everybody else, but for the one that just came."""

    protect = 1

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def order(self) -> str:
        # Drawn anew each time: with fixed priorities the lucky would stay for ever.
        scale, shift = self._random.randrange(1, PRIME), self._random.randrange(PRIME)
        return f"(examples.key % {PRIME} * {scale} + {shift}) % {PRIME}"


class LeastRecentlyUsedEviction:
    """Who was used longest ago; being added counts as a use."""

    protect = 0

    def order(self) -> str:
        return "max(coalesce(uses.last, 0), examples.created)"


class LeastFrequentlyUsedEviction:
    """Who was used least often, of those the one used longest ago."""

    def __init__(self, protect: int = 10) -> None:
        self.protect = _not_negative(protect)

    def order(self) -> str:
        return "coalesce(uses.count, 0), max(coalesce(uses.last, 0), examples.created)"


class LeastSavingsEviction:
    """Who saved least for its age: US dollars saved / max(age, one hour). Of those that saved
    nothing, whoever was used least often."""

    def __init__(self, protect: int = 10) -> None:
        self.protect = _not_negative(protect)

    def order(self) -> str:
        age = f"max({time.time()!r} - examples.created, {HOUR})"
        return f"coalesce(uses.saved_usd, 0) / {age}, coalesce(uses.count, 0)"


def _not_negative(protect: int) -> int:
    if protect < 0:
        raise SettingError(f"cannot protect {protect} entries", hint="use protect >= 0")
    return protect
