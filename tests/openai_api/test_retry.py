from __future__ import annotations

import logging
from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bottega.errors import EndpointError, RejectedError, ServerFailedError, SettingError
from bottega.openai_api.client import RetryPolicy
from bottega.openai_api.endpoint import requested_wait

chances = st.floats(0, 1, exclude_max=True)


@given(st.integers(0, 60), chances, st.floats(0.01, 5), st.floats(1, 100))
def test_back_off_stays_under_its_ceiling(
    number: int, chance: float, first: float, longest: float
) -> None:
    policy = RetryPolicy(first_wait=first, longest_wait=longest, random=lambda: chance)
    assert 0 <= policy.wait(number, None) <= min(longest, first * 2.0**number)


@given(st.integers(0, 60), chances, st.floats(0, 1e6))
def test_requested_wait_is_kept_and_hardly_exceeded(
    number: int, chance: float, requested: float
) -> None:
    wait = RetryPolicy(random=lambda: chance).wait(number, requested)
    assert requested <= wait <= requested * 1.1


numbers = st.integers(-(10**20), 10**20) | st.integers(0, 99)
dates = st.builds(
    "Tue, {} {} {} {}:{}:{} {}".format,
    numbers,
    st.sampled_from(["Jan", "Feb", "Dec", "jan", "x"]),
    numbers | st.integers(1, 9999),
    *[st.integers(0, 60) | numbers] * 3,
    st.sampled_from(["GMT", "-0000", "", "EST", "+9999", "-2400"]) | numbers.map("{:+}".format),
)
headers = dates | st.text(max_size=30) | st.floats().map(str) | numbers.map(str)


@example("Tue, 01 Jan 9999 00:00:00 -2359", "")
@example("Tue, 01 Jan 2030 00:00:00 +99999999999999", "")
@given(headers, headers)
def test_invalid_headers_request_no_wait(seconds: str, milliseconds: str) -> None:
    requested = requested_wait({"retry-after": seconds, "retry-after-ms": milliseconds})
    assert requested is None or 0 <= requested < float("inf")


@pytest.mark.parametrize(("ahead", "expected"), [(90, 90.0), (-90, 0.0)])
def test_http_date_is_parsed(ahead: int, expected: float) -> None:
    now = 1_800_000_000
    date = format_datetime(datetime.fromtimestamp(now + ahead, UTC), usegmt=True)
    assert requested_wait({"retry-after": date}, now=lambda: now) == expected


@pytest.mark.parametrize("attempts", [0, -1])
def test_attempts_must_be_positive(attempts: int) -> None:
    with pytest.raises(SettingError) as caught:
        RetryPolicy(attempts)
    assert "retries=0 or more" in caught.value.hint


async def test_total_wait_is_limited() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def fail() -> None:
        raise ServerFailedError("down", retry_after=40.0)

    policy = RetryPolicy(attempts=99, longest_total=100.0, sleep=sleep, random=lambda: 0.0)
    with pytest.raises(ServerFailedError):
        await policy(fail)
    assert waits == [40.0, 40.0]


@pytest.mark.parametrize(
    ("error", "calls"), [(RejectedError("no"), 1), (ServerFailedError("x"), 3)]
)
async def test_only_retryable_errors_are_retried(error: EndpointError, calls: int) -> None:
    seen = []

    async def sleep(seconds: float) -> None:
        pass

    async def fail() -> None:
        seen.append(1)
        raise error

    with pytest.raises(type(error)):
        await RetryPolicy(attempts=3, sleep=sleep)(fail)
    assert len(seen) == calls


async def test_retries_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    failures = [ServerFailedError("status 503", retry_after=2.0)]

    async def sleep(seconds: float) -> None:
        pass

    async def succeed_at_last() -> str:
        if failures:
            raise failures.pop()
        return "answer"

    with caplog.at_level(logging.INFO, "bottega"):
        assert await RetryPolicy(sleep=sleep, random=lambda: 0.0)(succeed_at_last) == "answer"
    assert caplog.messages == ["attempt 1 failed, next in 2.0 s: status 503"]
