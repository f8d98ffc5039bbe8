"""Retries of endpoint errors, with exponential back-off."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TypeVar

from bottega.errors import EndpointError, SettingError

Result = TypeVar("Result")


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential back-off with full jitter; a wait that the server requests takes precedence.

    Times are in seconds. Gives up after `attempts`, if the server requests a wait above
    `longest_wait`, or if all waits together would exceed `longest_total`.
    """

    attempts: int = 5
    first_wait: float = 0.5
    longest_wait: float = 60.0
    longest_total: float = 300.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = field(default_factory=lambda: random.Random().random)

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise SettingError(
                f"attempts must be at least 1, got {self.attempts}", hint="set retries=0 or more"
            )

    async def __call__(self, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of the first attempt that succeeds. Raises the last error."""
        waited = 0.0
        for number in range(self.attempts):
            try:
                return await attempt()
            except EndpointError as error:
                wait = self.wait(number, error.retry_after)
                spent = number + 1 == self.attempts or waited + wait > self.longest_total
                if spent or not error.retryable or (error.retry_after or 0) > self.longest_wait:
                    raise
            waited += wait
            await self.sleep(wait)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def wait(self, number: int, requested: float | None) -> float:
        """Return the wait after the failure of attempt `number` (from 0). A wait that the server
        requested is extended by up to a tenth, since it requests the same of all clients."""
        if requested is not None:
            return requested * (1 + self.random() / 10)
        ceiling = min(self.longest_wait, self.first_wait * 2.0**number)
        return ceiling * self.random()


def requested_wait(
    headers: Mapping[str, str], now: Callable[[], float] = time.time
) -> float | None:
    """Return the seconds in `retry-after-ms` or `retry-after` (seconds or an HTTP date)."""
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    text = headers.get("retry-after")
    seconds = _number(text)
    if seconds is not None or text is None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now())
    except (ValueError, OverflowError):  # years and offsets beyond the range of a date
        return None


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None
