"""Tests of the report page in a real browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import orjson
import pytest

from bottega.evaluation.metrics.metric import mcnemar, paired_difference
from bottega.evaluation.report.render import write_report
from bottega.evaluation.report.runs import read_run
from tests.browser import NEEDS_CHROMIUM, Page, browsing
from tests.evaluation.report.builders import HOSTILE, benchmark, store_run, three_methods

pytestmark = NEEDS_CHROMIUM
READY = "document.documentElement.dataset.ready"
ITEMS = 1050  # 21 pages, and a thousands separator in the count
RESET = 'document.querySelector("[data-reset]").click()'
COUNT = 'document.querySelector("[data-count]").textContent'
Look = Callable[[Page], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = benchmark(ITEMS, side=40)
    path = asyncio.run(store_run(tmp_path_factory.mktemp("run"), data, three_methods(data)))
    write_report([path], path / "report")
    return path


def check_page(folder: Path, browser: str, check: Look) -> None:
    """Open the folder's report and run the check; fail on console messages or network requests."""

    async def run() -> None:
        async with browsing(browser) as page:
            await page.open((folder / "report" / "index.html").as_uri(), READY)
            await check(page)
            await page.evaluate("new Promise(requestAnimationFrame)")
            assert page.page_errors == []
            assert not [url for url in page.requests if not url.startswith(("file:", "data:"))]

    asyncio.run(run())


async def count_items(page: Page, kind: str, text: str = "", rows: str = "012") -> int:
    """Apply the filters and return the number of matching items."""
    await page.evaluate(
        f"""{RESET};
        document.querySelector("[data-kind]").value = {orjson.dumps(kind).decode()};
        document.querySelector("[data-search]").value = {orjson.dumps(text).decode()};
        document.querySelectorAll("fieldset input").forEach((box) => {{
            box.checked = "{rows}".includes(box.dataset.row);
        }});
        document.querySelector("[data-kind]").dispatchEvent(new Event("change"))"""
    )
    result = re.search(r"([\d,]+) of 1,050 items", await page.evaluate(COUNT))
    assert result is not None
    return int(result[1].replace(",", ""))


def test_filters_match_the_stored_run(folder: Path, browser: str) -> None:
    run = read_run(folder)
    zero, random, top = (run.answers[key] for key in run.methods)
    wrong = {index for index, given in top.items() if not given.scored.correct}
    zero_wrong = [index for index, given in zero.items() if not given.scored.correct]
    both = [index for index in zero if index in random]
    differing = sum(
        len({some[index].scored.answer.labels for some in (zero, random)}) > 1
        for index in both
        if zero[index].scored.answer.valid
    )
    invalid = [index for index, given in zero.items() if not given.scored.answer.valid]
    dogs = {index for index, item in enumerate(run.items) if item.example.answer == "dog"}
    cats = {index for index, given in top.items() if given.scored.answer.labels == ("cat",)}

    async def check(page: Page) -> None:
        assert await count_items(page, "all") == ITEMS
        assert await count_items(page, "wrong", rows="2") == len(wrong) > 0
        assert await count_items(page, "wrong", rows="0") == len(zero_wrong) > len(invalid)
        assert await count_items(page, "right", rows="2") == ITEMS - len(wrong)
        assert await count_items(page, "invalid") == len(invalid) == 2
        assert await count_items(page, "failed") == 1
        assert await count_items(page, "missing") == 0
        # An invalid reply differs from every valid one.
        assert await count_items(page, "disagree", rows="01") == differing + len(invalid)
        assert await count_items(page, "all", "truth: dog") == len(dogs)
        assert (
            await count_items(page, "all", "truth: dog; answer: cat", rows="2")
            == len(dogs & cats)
            > 0
        )
        assert await count_items(page, "all", f"which animal is number {ITEMS - 1}?") == 1
        assert await count_items(page, "all", "nowhere to be found") == 0

    check_page(folder, browser, check)


def test_items_are_paged_and_show_demonstrations(folder: Path, browser: str) -> None:
    opened = 'document.querySelectorAll("details.item")'

    async def check(page: Page) -> None:
        assert await page.evaluate(f"{opened}.length") == 50
        await page.evaluate('document.querySelector("[data-next]").click()')
        assert await page.evaluate(f"{opened}[0].dataset.index") == "50"
        await page.evaluate(f"{opened}[0].open = true; new Promise(requestAnimationFrame)")
        await page.evaluate("new Promise((done) => setTimeout(done, 100))")
        detail = f"{opened}[0].querySelector('.details')"
        assert await page.evaluate(f"{detail}.querySelectorAll('.answer').length") == 3
        assert await page.evaluate(f"{detail}.querySelectorAll('.demonstrations img').length") == 6
        widths = f"[...{detail}.querySelectorAll('img')].map((one) => one.naturalWidth)"
        assert await page.evaluate(widths) == [40] * 7
        assert "I look at it" in await page.evaluate(f"{detail}.textContent")

    check_page(folder, browser, check)


def test_untrusted_text_is_not_run_in_the_browser(folder: Path, browser: str) -> None:
    async def check(page: Page) -> None:
        await page.evaluate(
            'document.querySelectorAll("details").forEach((one) => one.open = true)'
        )
        await page.evaluate("new Promise((done) => setTimeout(done, 200))")
        assert await page.evaluate("document.title") == "Report: animals"
        assert await page.evaluate('document.querySelectorAll("main b b, [onerror]").length') == 0
        question = await page.evaluate('document.querySelector(".item .question").textContent')
        assert question == f"0. Which animal? {HOSTILE}"
        warning = await page.evaluate('document.querySelector(".warning").textContent')
        assert HOSTILE in warning

    check_page(folder, browser, check)


def test_browser_comparison_matches_python(folder: Path, browser: str) -> None:
    cases = [(60, 9, 3, 28), (0, 5, 0, 0), (10, 0, 0, 10), (900, 40, 41, 19), (1, 0, 1, 0)]

    async def check(page: Page) -> None:
        for both, won, lost, neither in cases:
            ours = [True] * (both + won) + [False] * (lost + neither)
            theirs = [True] * both + [False] * won + [True] * lost + [False] * neither
            scores = orjson.dumps([list(map(float, ours)), list(map(float, theirs))]).decode()
            result = await page.evaluate(f"difference(...{scores})")
            expected = paired_difference(ours, theirs)
            assert result["value"] == pytest.approx(expected.value)
            assert result["low"] == pytest.approx(expected.low, abs=1e-9)
            assert result["high"] == pytest.approx(expected.high, abs=1e-9)
            assert result["p"] == pytest.approx(mcnemar(ours, theirs), rel=1e-9)
        line = await page.evaluate('document.querySelector("[data-difference]").textContent')
        assert re.match(r"\+0\.\d{3} on the 1,050 items that both answered, 95 % interval", line)

    check_page(folder, browser, check)


@pytest.mark.slow
def test_phone_layout_scrolls_only_vertically(folder: Path, browser: str) -> None:
    async def check(page: Page) -> None:
        await page.call(
            "Emulation.setDeviceMetricsOverride",
            width=360,
            height=800,
            deviceScaleFactor=1,
            mobile=True,
        )
        await page.evaluate('document.querySelector(".item").open = true')
        wide = "document.documentElement.scrollWidth"
        assert (
            await page.evaluate(f"new Promise((done) => setTimeout(() => done({wide}), 100))")
            <= 360
        )

    check_page(folder, browser, check)
