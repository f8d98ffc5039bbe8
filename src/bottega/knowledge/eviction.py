"""Eviction policies of a full knowledge base.

Each policy is an ORDER BY expression over the columns of `examples` and of `uses` (count,
last_used, saved_usd; NULL for unused examples). The first rows in that order are evicted.
"""

from __future__ import annotations

import random
import sqlite3
import time
from dataclasses import dataclass
from typing import Protocol

from bottega.errors import SettingError, StoreFullError
from bottega.knowledge.database import remove_rows

PRIME = 2_147_483_647
HOUR = 3600.0


class Eviction(Protocol):
    """Order of eviction. `protect` spares that many newest entries while older ones can go. Pinned
    entries never go."""

    @property
    def protect(self) -> int: ...

    def order(self) -> str: ...


class RandomEviction:
    """Uniformly random eviction that spares the newest entry."""

    protect = 1

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def order(self) -> str:
        # New random order each time: with fixed priorities some entries would never go.
        scale, shift = self._random.randrange(1, PRIME), self._random.randrange(PRIME)
        return f"(examples.key % {PRIME} * {scale} + {shift}) % {PRIME}"


class LeastRecentlyUsedEviction:
    """Eviction of the entry used longest ago; adding an entry counts as a use."""

    protect = 0

    def order(self) -> str:
        return "max(coalesce(uses.last_used, 0), examples.created)"


class LeastFrequentlyUsedEviction:
    """Eviction of the least used entry; ties go to the entry used longest ago."""

    def __init__(self, protect: int = 10) -> None:
        self.protect = _check_protect(protect)

    def order(self) -> str:
        return "coalesce(uses.count, 0), max(coalesce(uses.last_used, 0), examples.created)"


class LeastSavingsEviction:
    """Eviction of the entry with the least US dollars saved / max(age, one hour); ties go to the
    least used entry."""

    def __init__(self, protect: int = 10) -> None:
        self.protect = _check_protect(protect)

    def order(self) -> str:
        age = f"max({time.time()!r} - examples.created, {HOUR})"
        return f"coalesce(uses.saved_usd, 0) / {age}, coalesce(uses.count, 0)"


def _check_protect(protect: int) -> int:
    if protect < 0:
        raise SettingError(f"protect must be at least 0, got {protect}", hint="use protect=10")
    return protect


@dataclass(frozen=True)
class Capacity:
    """Maximum number of rows in a namespace, and the policy that evicts the excess."""

    rows: int
    evict: Eviction


def evict_excess(connection: sqlite3.Connection, namespace: str, capacity: Capacity) -> None:
    """Delete the rows above the capacity. It runs before the commit, so no reader sees more."""
    total, pinned = connection.execute(
        "SELECT count(*), coalesce(sum(pinned), 0) FROM examples LEFT JOIN uses USING (key)"
        " WHERE namespace = ?",
        [namespace],
    ).fetchone()
    excess = total - capacity.rows
    if excess <= 0:
        return
    if pinned >= capacity.rows:
        raise StoreFullError(
            f"the capacity of {capacity.rows} is full of pinned examples, got {pinned}",
            hint="unpin examples (bottega unpin), or open with a larger capacity",
        )
    newest = (
        "(SELECT key FROM examples WHERE namespace = ?1"
        f" ORDER BY key DESC LIMIT 1 OFFSET {capacity.evict.protect})"
    )
    found = connection.execute(
        "SELECT examples.key FROM examples LEFT JOIN uses USING (key)"
        " WHERE namespace = ?1 AND coalesce(pinned, 0) = 0"
        f" ORDER BY examples.key > {newest}, {capacity.evict.order()}, examples.key LIMIT ?2",
        (namespace, excess),
    )
    remove_rows(connection, [row[0] for row in found])
