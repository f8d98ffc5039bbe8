"""States of the circuit breaker under a fake clock."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from bottega.errors import (
    EndpointTimeoutError,
    GarbledError,
    RateLimitedError,
    RejectedError,
    ServerFailedError,
    SettingError,
    UnreachableError,
)
from bottega.openai_api.client import Attempt, Breaker, PausedError, Tolerance

TOLERANCE = Tolerance(failures=3, at_least=6, window=10, pause=1, longest_pause=4)
OWN = [
    ServerFailedError("x", status=500),
    UnreachableError("x"),
    EndpointTimeoutError("x"),
    GarbledError("x"),
]
OTHERS = [
    RejectedError("x", status=400),
    RejectedError("x", status=502),
    RateLimitedError("x", status=429),
    EndpointTimeoutError("x", status=408),
    ServerFailedError("x", status=409),
]


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def end(attempt: Attempt, error: BaseException | None = None) -> None:
    attempt.__exit__(type(error) if error else None, error, None)


def state(breaker: Breaker) -> str:
    """Return the state; prevents type checkers from narrowing the attribute."""
    return breaker.state


def fail(breaker: Breaker, times: int = 1) -> None:
    for _ in range(times):
        end(breaker.attempt(), OWN[0])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(TOLERANCE, clock=clock)


@pytest.mark.parametrize("error", OWN)
def test_upstream_failures_open_the_breaker(breaker: Breaker, error: Exception) -> None:
    for _ in range(3):
        assert state(breaker) == "closed"
        end(breaker.attempt(), error)
    assert state(breaker) == "open"
    with pytest.raises(PausedError) as caught:
        breaker.attempt()
    assert (caught.value.retry_after, caught.value.retryable) == (1.0, True)


@pytest.mark.parametrize("error", OTHERS)
def test_rejections_count_as_success(breaker: Breaker, clock: Clock, error: Exception) -> None:
    for _ in range(20):
        end(breaker.attempt(), error)
    assert state(breaker) == "closed"
    fail(breaker, 3)
    clock.now += 1
    end(breaker.attempt(), error)
    assert state(breaker) == "closed"


def test_only_consecutive_failures_open_it_early(breaker: Breaker) -> None:
    fail(breaker, 2)
    end(breaker.attempt())
    fail(breaker, 2)
    assert breaker.state == "closed"


def test_failure_rate_of_half_opens_the_breaker(breaker: Breaker) -> None:
    for number in range(6):
        assert state(breaker) == "closed"
        end(breaker.attempt(), OWN[0] if number % 2 else None)
    assert state(breaker) == "open"


def test_calls_outside_the_window_do_not_count(breaker: Breaker, clock: Clock) -> None:
    for number in range(40):
        clock.now += 4
        end(breaker.attempt(), OWN[0] if number % 2 else None)
        assert state(breaker) == "closed"


def test_failed_probe_doubles_the_pause(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    for pause in (1, 2, 4, 4):
        clock.now += pause - 0.01
        with pytest.raises(PausedError):
            breaker.attempt()
        clock.now += 0.01
        probe = breaker.attempt()
        with pytest.raises(PausedError):
            breaker.attempt()
        end(probe, OWN[1])
        assert state(breaker) == "open"
    clock.now += 4
    end(breaker.attempt())
    assert state(breaker) == "closed"
    fail(breaker, 3)
    clock.now += 1
    assert state(breaker) == "half-open"


def test_hanging_probe_is_replaced(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 1
    hanging = breaker.attempt()
    clock.now += 3.9
    with pytest.raises(PausedError) as caught:
        breaker.attempt()
    assert 0 < caught.value.retry_after < 0.2
    clock.now += 0.2
    end(breaker.attempt())
    end(hanging, OWN[2])
    assert state(breaker) == "closed"


def test_first_event_of_a_stream_closes_the_breaker(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 1
    probe = breaker.attempt()
    probe.answered()
    assert state(breaker) == "closed"
    fail(breaker, 2)
    end(probe, OWN[0])  # cut in the middle: the third in a row
    assert state(breaker) == "open"


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit(), ValueError("bug")])
def test_cancelled_probe_allows_the_next(
    breaker: Breaker, clock: Clock, error: BaseException
) -> None:
    fail(breaker, 2)
    end(breaker.attempt(), error)
    fail(breaker)
    assert state(breaker) == "open"  # no success in between
    clock.now += 1
    end(breaker.attempt(), error)
    assert state(breaker) == "half-open"
    end(breaker.attempt())
    assert state(breaker) == "closed"


def test_calls_of_an_earlier_state_do_not_count(breaker: Breaker, clock: Clock) -> None:
    late = [breaker.attempt() for _ in range(6)]
    fail(breaker, 3)
    end(late.pop())
    assert state(breaker) == "open"
    clock.now += 1
    probe = breaker.attempt()
    end(late.pop(), OWN[0])
    end(late.pop())
    assert state(breaker) == "half-open"
    end(probe)
    for attempt in late:
        end(attempt, OWN[0])
    assert state(breaker) == "closed"


@pytest.mark.parametrize(
    "bad",
    [{"failures": 0}, {"rate": 0}, {"pause": 0}, {"window": 0}, {"pause": 9, "longest_pause": 1}],
)
def test_invalid_tolerance_is_rejected(bad: dict[str, float]) -> None:
    with pytest.raises(SettingError):
        Tolerance(**bad)  # type: ignore[arg-type]


class Machine(RuleBasedStateMachine):
    """State machine that checks the invariants for any order of events."""

    attempts: Bundle[Attempt] = Bundle("attempts")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = Breaker(TOLERANCE, clock=self.clock)
        self.in_flight: set[Attempt] = set()

    @rule(target=attempts)
    def begin(self) -> Attempt:
        before, many = self.breaker.state, len(self.in_flight)
        try:
            attempt = self.breaker.attempt()
        except PausedError as error:
            assert before != "closed"
            assert 0 < error.retry_after <= TOLERANCE.longest_pause
            # After the pause only a running probe blocks other calls.
            assert before == "open" or many
            return Attempt(Breaker(), 0)
        assert before in ("closed", "half-open")
        self.in_flight.add(attempt)
        return attempt

    @rule(attempt=consumes(attempts), error=st.sampled_from([None, *OWN, *OTHERS]))
    def finish(self, attempt: Attempt, error: Exception | None) -> None:
        before = self.breaker.state
        end(attempt, error)
        self.in_flight.discard(attempt)
        if before == "closed" and error not in OWN:
            assert self.breaker.state == "closed"

    @rule(attempt=consumes(attempts))
    def cancel(self, attempt: Attempt) -> None:
        before = self.breaker.state
        end(attempt, asyncio.CancelledError())
        self.in_flight.discard(attempt)
        assert self.breaker.state == before

    @rule(attempt=attempts)
    def answer(self, attempt: Attempt) -> None:
        before = self.breaker.state
        attempt.answered()
        assert self.breaker.state in (before, "closed")

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        before = self.breaker.state
        self.clock.now += seconds
        if before == "closed":
            assert self.breaker.state == "closed"

    @invariant()
    def idle_breaker_recovers(self) -> None:
        if not self.in_flight:
            now, self.clock.now = self.clock.now, self.clock.now + TOLERANCE.longest_pause
            assert self.breaker.state != "open"
            self.breaker.check()
            self.clock.now = now


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
