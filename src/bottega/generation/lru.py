"""What was used last, within a limit of memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Values by key, the least recently used dropped beyond `keep` bytes. Threads may share it."""

    def __init__(self, keep: int, size: Callable[[Value], int]) -> None:
        self._keep, self._size = keep, size
        self._held = 0
        self._values: OrderedDict[str, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Value | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: str, value: Value) -> None:
        """A value that is larger than everything else together may be is not kept."""
        size = self._size(value)
        with self._lock:
            if key in self._values or size > self._keep:
                return
            self._values[key] = value
            self._held += size
            while self._held > self._keep:
                self._held -= self._size(self._values.popitem(last=False)[1])
