"""Background computations, so pages respond without waiting for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

WAIT_SECONDS = 0.5  # for a result, before a page answers without it
KEPT_SECONDS = 10.0  # for results that no page has fetched
RELOAD_SECONDS = 1  # of pages that wait for a result
T = TypeVar("T")


@dataclass
class _Computation:
    future: Future[Any]
    ended: float | None = None

    def has_expired(self) -> bool:
        return self.ended is not None and time.monotonic() - self.ended > KEPT_SECONDS


@dataclass
class BackgroundComputations:
    """Computations in one thread, one at a time.

    A result is returned once and kept for `KEPT_SECONDS`, until the page that started it is loaded
    again: a state that changes all the time would otherwise be computed for ever.
    """

    wait_seconds: float = WAIT_SECONDS
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "bottega-console")
    )
    _computations: dict[Hashable, _Computation] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def result(self, key: Hashable, compute: Callable[[], T]) -> T | None:
        """Return the result of `compute`, or None if it takes longer than `wait_seconds`: the next
        call with this key returns it. Raises the errors of `compute`."""
        with self._lock:
            for old in [key for key, one in self._computations.items() if one.has_expired()]:
                del self._computations[old]
            found = self._computations.get(key)
            if found is None:
                found = self._computations[key] = self._started(compute)
        done, _ = wait_for([found.future], self.wait_seconds)
        if not done:
            return None
        with self._lock:
            if self._computations.get(key) is found:
                del self._computations[key]
        return cast(T, found.future.result())

    def _started(self, compute: Callable[[], object]) -> _Computation:
        found = _Computation(self._pool.submit(compute))

        def end(_: object) -> None:
            found.ended = time.monotonic()

        found.future.add_done_callback(end)
        return found
