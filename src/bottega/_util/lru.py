"""Least-recently-used caches with a bound on size and age."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LRUCache(Generic[Key, Value]):
    """Cache that drops the least recently used values beyond `max_size`, and values older than
    `seconds` when they are looked up. For one thread; `SharedLRUCache` has a lock.

    `size` measures a value, e.g. in bytes; by default each value counts 1.
    """

    def __init__(
        self,
        max_size: int,
        size: Callable[[Value], int] = lambda value: 1,
        *,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = 0
        self._max_size, self._measure = max_size, size
        self._seconds, self._clock = seconds, clock
        self._values: OrderedDict[Key, tuple[Value, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """Return the value, None if there is none or it has expired."""
        found = self._values.get(key)
        if found is None:
            return None
        if self._seconds is not None and self._clock() - found[1] >= self._seconds:
            self._drop(key)
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: Key, value: Value, age: float = 0.0) -> None:
        """Store a value that is `age` seconds old in place of an older one. A value larger than
        `max_size` is not stored."""
        self._drop(key)
        size = self._measure(value)
        if size > self._max_size:
            return
        stored = 0.0 if self._seconds is None else self._clock() - age
        self._values[key] = value, stored
        self.size += size
        while self.size > self._max_size:
            self._drop(next(iter(self._values)))

    def pop(self, key: Key) -> Value | None:
        """Remove and return the value, None if there is none."""
        return self._drop(key)

    def values(self) -> list[Value]:
        """Return all values, the least recently used first."""
        return [value for value, _ in self._values.values()]

    def clear(self) -> None:
        self._values.clear()
        self.size = 0

    def _drop(self, key: Key) -> Value | None:
        found = self._values.pop(key, None)
        if found is None:
            return None
        self.size -= self._measure(found[0])
        return found[0]


class SharedLRUCache(LRUCache[Key, Value]):
    """`LRUCache` that threads may share."""

    def __init__(self, max_size: int, size: Callable[[Value], int] = lambda value: 1) -> None:
        super().__init__(max_size, size)
        self._lock = threading.Lock()

    def get(self, key: Key) -> Value | None:
        with self._lock:
            return super().get(key)

    def put(self, key: Key, value: Value, age: float = 0.0) -> None:
        with self._lock:
            super().put(key, value, age)

    def pop(self, key: Key) -> Value | None:
        with self._lock:
            return super().pop(key)

    def clear(self) -> None:
        with self._lock:
            super().clear()
