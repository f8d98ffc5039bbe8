"""A circuit breaker: an upstream that keeps failing is left alone for a while."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from bottega.errors import EndpointError, GenerationError, RejectedError, SettingError

State = Literal["closed", "open", "half-open"]
MOST_REMEMBERED = 1000


class PausedError(GenerationError):
    """Nothing was sent: the upstream has failed too often. `retry_after` is in seconds.

    No `EndpointError`, so that no retry waits for it: another tier can answer now.
    """

    retryable = True

    def __init__(self, retry_after: float, last: str = "") -> None:
        told = f"; its last failure: {last}" if last else ""
        super().__init__(
            f"the upstream keeps failing and is left alone for {retry_after:.1f} s{told}",
            hint="look at the upstream's log; another tier answers meanwhile, if there is one",
        )
        self.retry_after = retry_after


@dataclass(frozen=True)
class Tolerance:
    """Opens after `failures` in a row, or when `rate` of at least `at_least` calls within
    `window` seconds failed. The first pause lasts `pause` seconds, each further one twice as
    long, at most `longest_pause`."""

    failures: int = 5
    rate: float = 0.5
    at_least: int = 20
    window: float = 30.0
    pause: float = 1.0
    longest_pause: float = 60.0

    def __post_init__(self) -> None:
        counts = min(self.failures, self.at_least) >= 1 and self.at_least <= MOST_REMEMBERED
        times = self.window > 0 and 0 < self.pause <= self.longest_pause
        if not (counts and times and 0 < self.rate <= 1):
            raise SettingError(
                f"{self} cannot work",
                hint="failures and at_least are 1 or more, rate lies in (0, 1], window and "
                "pauses are positive, the longest pause not below the first",
            )


class Breaker:
    """Closed: calls pass and are counted. Open: they fail at once with `PausedError`. After the
    pause half-open: one call passes, and its outcome closes or opens the breaker.

    Only what is the upstream's own counts as failure: no connection, time-outs, 5xx, garbage. A
    4xx shows that it answers; a call that was cancelled shows nothing. For one event loop.
    """

    def __init__(
        self, tolerance: Tolerance | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tolerance, self._clock = tolerance or Tolerance(), clock
        self._recent: deque[tuple[float, bool]] = deque(maxlen=MOST_REMEMBERED)
        self._in_a_row = 0
        self._pauses = 0
        self._until: float | None = None
        self._probe: Attempt | None = None
        # Calls that began before the last change of state say nothing about the new one.
        self._epoch = 0
        self._last = ""

    @property
    def state(self) -> State:
        if self._until is None:
            return "closed"
        return "half-open" if self._probe or self._clock() >= self._until else "open"

    def attempt(self) -> Attempt:
        """For `with`: what leaves the block tells the outcome. Raises `PausedError`."""
        self.check()
        attempt = Attempt(self, self._epoch)
        if self._until is not None:
            # Another one may try if nothing is heard of this one for as long.
            self._until = self._clock() + self._tolerance.longest_pause
            self._probe = attempt
        return attempt

    def check(self) -> None:
        """Raises what `attempt` would raise."""
        if self._until is None or (left := self._until - self._clock()) <= 0:
            return
        raise PausedError(min(left, self._tolerance.pause) if self._probe else left, self._last)

    def _succeeded(self, attempt: Attempt) -> None:
        if attempt is self._probe:
            self._close()
        elif attempt.epoch == self._epoch and self._until is None:
            self._in_a_row = 0
            self._recent.append((self._clock(), False))

    def _failed(self, attempt: Attempt, error: EndpointError) -> None:
        self._last = str(error)
        if attempt is self._probe:
            self._open()
        elif attempt.epoch == self._epoch and self._until is None:
            self._in_a_row += 1
            self._recent.append((self._clock(), True))
            if self._in_a_row >= self._tolerance.failures or self._too_many():
                self._open()

    def _ended(self, attempt: Attempt) -> None:
        if attempt is self._probe:
            self._until, self._probe = self._clock(), None

    def _too_many(self) -> bool:
        since = self._clock() - self._tolerance.window
        while self._recent and self._recent[0][0] <= since:
            self._recent.popleft()
        failures = sum(failed for _, failed in self._recent)
        enough = len(self._recent) >= self._tolerance.at_least
        return enough and failures >= self._tolerance.rate * len(self._recent)

    def _open(self) -> None:
        pause = min(self._tolerance.longest_pause, self._tolerance.pause * 2.0**self._pauses)
        # Beyond 2 ** 60 every pause is the longest one, and the power would overflow some day.
        self._pauses = min(self._pauses + 1, 60)
        self._until, self._probe = self._clock() + pause, None
        self._epoch += 1

    def _close(self) -> None:
        self._until, self._probe, self._pauses, self._in_a_row = None, None, 0, 0
        self._recent.clear()
        self._epoch += 1


class Attempt:
    """One call to the upstream."""

    def __init__(self, breaker: Breaker, epoch: int) -> None:
        self._breaker = breaker
        self.epoch = epoch

    def answered(self) -> None:
        """The upstream has begun to answer: a half-open breaker need not wait for the end."""
        if self is self._breaker._probe:
            self._breaker._close()
            self.epoch = self._breaker._epoch

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._breaker._succeeded(self)
        elif isinstance(error, EndpointError):
            if _shows_life(error):
                self._breaker._succeeded(self)
            else:
                self._breaker._failed(self, error)
        self._breaker._ended(self)


def _shows_life(error: EndpointError) -> bool:
    refused = error.status is not None and 400 <= error.status < 500
    return refused or isinstance(error, RejectedError)
