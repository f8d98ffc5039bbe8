"""Eviction policies, and the use counts that they read.

Each policy is an ORDER BY expression over the columns of `examples` and of `uses` (count,
last_used, saved_usd; NULL for unused examples). The first rows in that order are evicted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from bottega.errors import SettingError, StoreFullError, StoreReadOnlyError
from bottega.knowledge.records import UsageRecord, is_text

PRIME = 2_147_483_647
HOUR = 3600.0
# Both databases know CASE; only SQLite has max() of two values.
LAST_USE = (
    "CASE WHEN uses.last_used > examples.created THEN uses.last_used ELSE examples.created END"
)
FLUSH_COUNT = 256
FLUSH_SECONDS = 30.0
MAX_USD = 1e15  # keeps sums finite


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


class FirstInFirstOutEviction:
    """Eviction of the entry that was added first."""

    protect = 0

    def order(self) -> str:
        return "examples.key"


class LeastRecentlyUsedEviction:
    """Eviction of the entry used longest ago; adding an entry counts as a use."""

    protect = 0

    def order(self) -> str:
        return LAST_USE


class LeastFrequentlyUsedEviction:
    """Eviction of the least used entry; ties go to the entry used longest ago."""

    def __init__(self, protect: int = 10) -> None:
        self.protect = _check_protect(protect)

    def order(self) -> str:
        return f"coalesce(uses.count, 0), {LAST_USE}"


class LeastSavingsEviction:
    """Eviction of the entry with the least US dollars saved / max(age, one hour); ties go to the
    least used entry."""

    def __init__(self, protect: int = 10) -> None:
        self.protect = _check_protect(protect)

    def order(self) -> str:
        since = f"{time.time()!r} - examples.created"
        age = f"CASE WHEN {since} > {HOUR} THEN {since} ELSE {HOUR} END"
        return f"coalesce(uses.saved_usd, 0) / ({age}), coalesce(uses.count, 0)"


# `lru` and `least-recent`, `lfu` and `least-frequent` are the same.
EVICTIONS: Mapping[str, Callable[[], Eviction]] = {
    "lru": LeastRecentlyUsedEviction,
    "lfu": LeastFrequentlyUsedEviction,
    "least-saving": LeastSavingsEviction,
    "fifo": FirstInFirstOutEviction,
    "random": RandomEviction,
    "least-recent": LeastRecentlyUsedEviction,
    "least-frequent": LeastFrequentlyUsedEviction,
}


def _check_protect(protect: int) -> int:
    if protect < 0:
        raise SettingError(f"protect must be at least 0, got {protect}", hint="use protect=10")
    return protect


@dataclass(frozen=True)
class Capacity:
    """Maximum number of rows in a namespace, and the policy that evicts the excess."""

    rows: int
    evict: Eviction

    def excess(self, total: int, pinned: int) -> int:
        """Return the number of rows to delete. Raises `StoreFullError` if pinned rows fill the
        capacity."""
        if total > self.rows and pinned >= self.rows:
            raise StoreFullError(
                f"the capacity of {self.rows} is full of pinned examples, got {pinned}",
                hint="unpin examples (bottega unpin), or open with a larger capacity",
            )
        return max(0, total - self.rows)


def capacity_of(rows: int | None, evict: Eviction | None) -> Capacity | None:
    """Return the capacity, None without a limit. Raises `SettingError` for invalid settings."""
    if rows is None and evict is not None:
        raise SettingError("evict requires a capacity", hint="pass capacity=10_000 to open")
    if rows is not None and rows < 1:
        raise SettingError(f"capacity must be at least 1, got {rows}", hint="use capacity=10_000")
    return None if rows is None else Capacity(rows, evict or LeastRecentlyUsedEviction())


class UsageBuffer:
    """Buffer of use counts, written when it is large, old, or closed.

    A killed process loses the counts of the last half minute, but no example.
    """

    def __init__(self, write: Callable[[Mapping[str, UsageRecord]], None]) -> None:
        self._write = write
        self._uses: dict[str, UsageRecord] = {}
        self._since = time.monotonic()
        self._lock = Lock()

    def record(self, ids: Collection[str], saved_usd: float) -> None:
        """Count one use of each example and share the savings among them."""
        # Rejected here: one unwritable entry would block all others of its batch.
        if not all(map(is_text, ids)) or not is_amount(saved_usd):
            raise SettingError(
                f"used requires ids and a finite amount, got {list(ids)!a} and {saved_usd!a}",
                hint="give ids as texts, and US dollars as a number",
            )
        now = time.time()
        share = saved_usd / max(1, len(ids))
        with self._lock:
            if not self._uses:
                self._since = time.monotonic()
            for id in ids:
                before = self._uses.get(id, UsageRecord(0, now, 0.0))
                self._uses[id] = UsageRecord(before.count + 1, now, before.saved_usd + share)
            old = time.monotonic() - self._since > FLUSH_SECONDS
            due = len(self._uses) >= FLUSH_COUNT or old
        if due:
            self.flush()

    def flush(self) -> None:
        """Write the counts. A read-only store discards them; it evicts nothing either."""
        # Written without the lock: `record` must not wait for the disk.
        with self._lock:
            uses, self._uses = self._uses, {}
        if not uses:
            return
        try:
            self._write(uses)
        except StoreReadOnlyError:
            return
        except BaseException:
            with self._lock:  # put them back, beside the uses recorded meanwhile
                for id, use in uses.items():
                    later = self._uses.get(id, UsageRecord(0, use.last_used, 0.0))
                    self._uses[id] = UsageRecord(
                        use.count + later.count, later.last_used, use.saved_usd + later.saved_usd
                    )
            raise


def is_amount(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= MAX_USD
