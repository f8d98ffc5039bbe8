"""Token estimates of calls that report no usage."""

from __future__ import annotations

import pytest

from bottega.gateway.request.bill import TokenEstimates
from bottega.types import Usage


def test_estimates_follow_what_an_upstream_reports() -> None:
    estimates = TokenEstimates()
    assert estimates.prompt("m", 100) == 100
    assert estimates.max_prompt("m", 100, 0) == 8192
    assert estimates.max_prompt("m", 10_000, 0) == 40_000
    assert estimates.generated("m", 2.0) == 100
    estimates.update("m", 100, Usage(150, 30), 0.5)
    assert estimates.prompt("m", 1000) == 1500
    assert estimates.max_prompt("m", 10, 0) == 60  # 50 more than expected
    assert estimates.max_prompt("m", 1000, 0) == 1500
    assert estimates.generated("m", 2.0) == 120
    assert estimates.longest("m") == 30
    assert estimates.prompt("other", 100) == 100
    for _ in range(200):
        estimates.update("m", 100, Usage(80, 10))
    assert estimates.prompt("m", 1000) == pytest.approx(800, abs=2)
    assert estimates.max_prompt("m", 1000, 0) == 1000


def test_texts_and_images_are_corrected_apart() -> None:
    estimates = TokenEstimates()
    for _ in range(20):
        estimates.update("m", 1110, Usage(14, 1), image_tokens=1100)
    assert estimates.prompt("m", 257) == 257
    assert estimates.prompt("m", 1357, 1100) == pytest.approx(261, abs=2)
    assert estimates.max_prompt("m", 257, 0) == 8192  # no text was seen
    assert estimates.max_prompt("m", 1357, 0, 1100) == 1357
    for _ in range(20):
        estimates.update("m", 100, Usage(200, 1))
        estimates.update("m", 1110, Usage(24, 1), image_tokens=1100)
    assert estimates.prompt("m", 1000) == 2000
    assert estimates.max_prompt("m", 1000, 0) == 2000
    assert estimates.prompt("m", 2100, 1100) == pytest.approx(2004, abs=2)
    assert estimates.max_prompt("m", 2100, 0, 1100) == 3100


def test_choices_share_the_completion_tokens() -> None:
    estimates = TokenEstimates()
    estimates.update("m", 100, Usage(100, 90), choices=3)
    assert estimates.longest("m") == 30


def test_recent_calls_count_more_than_earlier_ones() -> None:
    estimates = TokenEstimates()
    for _ in range(100):
        estimates.update("m", 100, Usage(200, 10), 1.0)
    for _ in range(14):  # 0.95 ** 14 is one half
        estimates.update("m", 100, Usage(100, 30), 1.0)
    assert estimates.prompt("m", 100) == pytest.approx(150, abs=3)
    assert estimates.generated("m", 10.0) == pytest.approx(200, abs=6)


def test_the_largest_shortfall_and_the_longest_choice_decay() -> None:
    estimates = TokenEstimates()
    estimates.update("m", 100, Usage(1100, 1000))
    for _ in range(14):
        estimates.update("m", 100, Usage(100, 10))
    assert estimates.max_prompt("m", 100, 0) == pytest.approx(100 + 1000 * 0.95**14, abs=1)
    assert estimates.longest("m") == pytest.approx(1000 * 0.95**14, abs=1)


def test_streams_do_not_change_the_tokens_per_second() -> None:
    estimates = TokenEstimates()
    estimates.update("m", 100, Usage(100, 1000))
    assert estimates.generated("m", 1.0) == 50
    estimates.update("m", 100, Usage(100, 30), 0.5)
    estimates.update("m", 100, Usage(100, 1000))
    assert estimates.generated("m", 1.0) == 60
