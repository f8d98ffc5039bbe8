from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from bottega.evaluation.report.charts import BARS_HEIGHT, BARS_WIDTH, round_up, stacked_bars
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import Entry
from bottega.ui.overview import PERIODS, statistics
from bottega.ui.pages import format_percent, format_usd
from tests.gateway.gateways import ask
from tests.server import Server
from tests.ui.conftest import console, log_in


@pytest.fixture(params=["file", "database"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    is_file = request.param == "file"
    location = tmp_path / "gateway.db" if is_file else request.getfixturevalue("database")
    with closing(Ledger(location)) as opened:
        yield opened


def test_statistics_are_those_of_the_ledger(ledger: Ledger) -> None:
    now = time.time()
    rows = [
        Entry(now - 60, "a", "k", "x", "small", "m", "answered", cost_usd=0.25, seconds=1.0,
              similarity=0.95),
        Entry(now - 120, "b", "k", "x", "large", "m", "answered", cost_usd=1.0, seconds=3.0),
        Entry(now - 180, "c", "k", "x", "large", "m", "replayed", seconds=0.0),
        Entry(now - 200, "d", "k", "x", "", "", "failed", status=429),
        Entry(now - 210, "i", "k", "x", "", "", "counted"),
        Entry(now - 240, "e", "k", "x", "large", "m", "failed", status=502),
        Entry(now - 240, "f", "k", "x", "large", "m", "shadow", cost_usd=0.5),
        Entry(now - 300, "g", "k", "other", "small", "m", "answered", cost_usd=2.0, seconds=9.0),
        Entry(now - 8 * 86_400, "h", "k", "x", "small", "m", "answered", cost_usd=4.0),
    ]  # fmt: skip
    for row in rows:
        ledger.record(row)
    ledger.flush()
    found = statistics(ledger, "1h", "x")
    assert (found.requests, found.rejected) == (4, 1)
    assert found.cost_usd == pytest.approx(1.75)  # shadow calls cost, but are not requests
    assert found.shares == {"small": 1, "large": 1, "replayed": 1, "failed": 1}
    assert (found.median_seconds, found.sampled) == (2.0, 2)
    assert dict(found.statuses) == {429: 1, 502: 1}
    assert found.similarities is not None
    assert [one.text for one in found.similarities.bars] == ["answers: 1"]
    assert statistics(ledger, "1h", None).requests == 5
    assert statistics(ledger, "30d", "x").requests == 5
    for period in PERIODS:
        chart = statistics(ledger, period, None).requests_chart
        assert sum(total for *_, total in chart.legend) == (6 if period == "30d" else 5)


@pytest.mark.parametrize(
    ("usd", "text"),
    [(None, "unknown"), (0.0, "$0.0000"), (-0.0501, "-$0.0501"), (-1234.5, "-$1,234.50")],
)
def test_amounts_have_their_sign_in_front(usd: float | None, text: str) -> None:
    assert format_usd(usd) == text


def test_an_empty_ledger_has_statistics(ledger: Ledger) -> None:
    found = statistics(ledger, "24h", None)
    assert (found.requests, found.cost_usd, found.median_seconds) == (0, 0.0, None)
    assert found.requests_chart.bars == [] and found.similarities is None


def test_bars_are_stacked_to_their_sum() -> None:
    values = {(0.0, "a"): 3.0, (0.0, "b"): 1.0, (0.0, "failed"): 1.0, (10.0, "a"): 2.0}
    chart = stacked_bars([0.0, 10.0], {**values, (99.0, "a"): 50.0})
    first = [bar for bar in chart.bars if bar.x == chart.bars[0].x]
    assert [bar.text for bar in first] == ["a: 3", "b: 1", "failed: 1"]
    assert first[-1].style == "failed"
    for lower, upper in pairwise(first):
        assert upper.y + upper.height == pytest.approx(lower.y, abs=0.02)
    assert min(bar.y for bar in chart.bars) >= 0
    assert max(bar.y + bar.height for bar in chart.bars) <= BARS_HEIGHT
    assert max(bar.x + bar.width for bar in chart.bars) <= BARS_WIDTH
    assert [total for _, _, total in chart.legend] == [5.0, 1.0, 1.0]
    other = stacked_bars([0.0], {(0.0, "b"): 9.0, (0.0, "c"): 10.0}, order=["a", "b"])
    assert [(style, name) for style, name, _ in other.legend] == [("s1", "b"), ("s2", "c")]


@pytest.mark.parametrize(
    ("value", "limit"), [(0, 1), (1, 1), (1.5, 2), (4, 5), (7, 10), (99, 100), (101, 200)]
)
def test_axes_end_at_round_numbers(value: float, limit: float) -> None:
    assert stacked_bars([0.0], {(0.0, "a"): value}).ticks[-1][0] == limit
    assert round_up(value / 1000, (1, 2, 5)) >= value / 1000


def test_shares_of_tiers_have_percentages() -> None:
    shares = (0.0, 0.0004, 0.004, 0.25, 0.6666, 1.0)
    expected = ["0 %", "< 0.1 %", "0.4 %", "25 %", "67 %", "100 %"]
    assert [format_percent(share) for share in shares] == expected


def test_the_overview_refreshes_itself(
    page: Page, endpoint: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.ui.overview.REFRESH_SECONDS", 0.2)
    with console(tmp_path, endpoint) as served:
        log_in(page, served.url)
        page.evaluate("window.same = true")
        expect(page.locator("#live")).to_contain_text("No requests in this period")
        for number in range(3):
            ask(served.api, f"What is 3 + {number}?")
        ask(served.api, "What is 3 + 9?", model="bottega/large")
        legend = page.locator(".legend").first
        expect(legend).to_contain_text("large: 2 (50 %)", timeout=15_000)
        expect(legend).to_contain_text("small: 2 (50 %)")
        assert page.evaluate("window.same")  # the page was not loaded again
        page.set_viewport_size({"width": 400, "height": 800})
        ends = page.evaluate(  # at once: the page refreshes itself
            """() => [...document.querySelectorAll(".chart > svg, .chart span")]
                .map((part) => part.getBoundingClientRect())
                .flatMap((box) => [box.left, box.right])"""
        )
        assert len(ends) >= 2 * 2 * 6  # two charts with an image, three values and two times
        assert min(ends) >= 0 and max(ends) <= 400
