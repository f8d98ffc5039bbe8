"""Circuit breaker: calls to an endpoint that keeps failing are paused."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from bottega.errors import EndpointError, GenerationError, RejectedError, SettingError

State = Literal["closed", "open", "half-open"]
MAX_RECORDED = 1000


class PausedError(GenerationError):
    """Error of a call that was not sent because the breaker is open. `retry_after` is in seconds.

    Not an `EndpointError`, so retries do not wait for it: another tier can answer now.
    """

    retryable = True

    def __init__(self, retry_after: float, last: str = "") -> None:
        detail = f"; its last failure: {last}" if last else ""
        super().__init__(
            f"the upstream keeps failing and is paused for {retry_after:.1f} s{detail}",
            hint="look at the upstream's log; meanwhile another tier answers, if there is one",
        )
        self.retry_after = retry_after


@dataclass(frozen=True)
class Tolerance:
    """Limits of a breaker. It opens after `failures` in a row, or when the share `rate` of at least
    `at_least` calls within `window` seconds failed. The first pause lasts `pause` seconds, each
    further one twice as long, at most `longest_pause`."""

    failures: int = 5
    rate: float = 0.5
    at_least: int = 20
    window: float = 30.0
    pause: float = 1.0
    longest_pause: float = 60.0

    def __post_init__(self) -> None:
        counts = min(self.failures, self.at_least) >= 1 and self.at_least <= MAX_RECORDED
        times = self.window > 0 and 0 < self.pause <= self.longest_pause
        if not (counts and times and 0 < self.rate <= 1):
            raise SettingError(
                f"breaker limits are invalid, got {self}",
                hint="set failures and at_least to 1 or more, rate within (0, 1], window and pauses"
                " above 0, and longest_pause to pause or more",
            )


class Breaker:
    """Circuit breaker for one event loop. Closed: calls pass and are counted. Open: calls raise
    `PausedError` at once. Half-open, after the pause: one call passes, and its outcome closes or
    opens the breaker.

    Failures are those of the upstream: no connection, time-outs, 5xx, invalid replies. A 4xx counts
    as success, a cancelled call as neither.
    """

    def __init__(
        self, tolerance: Tolerance | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tolerance, self._clock = tolerance or Tolerance(), clock
        self._recent: deque[tuple[float, bool]] = deque(maxlen=MAX_RECORDED)
        self._in_a_row = 0
        self._pauses = 0
        self._until: float | None = None
        self._probe: Attempt | None = None
        # Calls that began before the last change of state must not count in the new one.
        self._epoch = 0
        self._last = ""

    @property
    def state(self) -> State:
        if self._until is None:
            return "closed"
        return "half-open" if self._probe or self._clock() >= self._until else "open"

    def attempt(self) -> Attempt:
        """Return a context manager that records the outcome of its block. Raises `PausedError`."""
        self.check()
        attempt = Attempt(self, self._epoch)
        if self._until is not None:
            # If this probe does not end within that time, another call may probe.
            self._until = self._clock() + self._tolerance.longest_pause
            self._probe = attempt
        return attempt

    def check(self) -> None:
        """Raise what `attempt` would raise."""
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
        # From 2 ** 60 on every pause is the longest; the cap keeps the power from overflowing.
        self._pauses = min(self._pauses + 1, 60)
        self._until, self._probe = self._clock() + pause, None
        self._epoch += 1

    def _close(self) -> None:
        self._until, self._probe, self._pauses, self._in_a_row = None, None, 0, 0
        self._recent.clear()
        self._epoch += 1


class Attempt:
    """Context manager of one call to the upstream."""

    def __init__(self, breaker: Breaker, epoch: int) -> None:
        self._breaker = breaker
        self.epoch = epoch

    def answered(self) -> None:
        """Close a half-open breaker at the first event of a stream, before its end."""
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
            if _is_alive(error):
                self._breaker._succeeded(self)
            else:
                self._breaker._failed(self, error)
        self._breaker._ended(self)


def _is_alive(error: EndpointError) -> bool:
    is_client_error = error.status is not None and 400 <= error.status < 500
    return is_client_error or isinstance(error, RejectedError)
