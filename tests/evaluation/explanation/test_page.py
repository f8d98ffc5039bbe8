"""Tests of the explanation page in a real browser."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from bottega.evaluation.report.explanation import render_explanation
from bottega.recording import StoredTrace
from tests.browser import NEEDS_CHROMIUM, Page, browsing
from tests.builders import search_tree
from tests.evaluation.explanation.builders import (
    demonstrations,
    images_of,
    stored_search,
    untrusted_trace,
)

pytestmark = NEEDS_CHROMIUM
READY = 'document.readyState === "complete" && document.querySelector(".tree")'
Look = Callable[[Page], Coroutine[Any, Any, None]]


def check_page(of: StoredTrace, folder: Path, browser: str, check: Look) -> None:
    """Open the trace's page and run the check; fail on console messages or network requests."""
    file = folder / "tree.html"
    file.write_text(render_explanation(of, images_of(of), absent="gone"), "utf-8")

    async def run() -> None:
        async with browsing(browser) as page:
            await page.open(file.as_uri(), READY)
            await check(page)
            await page.evaluate("new Promise(requestAnimationFrame)")
            assert page.page_errors == []
            assert not [url for url in page.requests if not url.startswith(("file:", "data:"))]

    asyncio.run(run())


async def resize(page: Page, width: int) -> None:
    await page.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=800,
        deviceScaleFactor=1,
        mobile=width < 600,
    )


@pytest.mark.slow
def test_chosen_path_is_highlighted_and_images_load(tmp_path: Path, browser: str) -> None:
    of = stored_search(search_tree(demonstrations()))
    assert of.tree is not None
    names = [of.tree.demonstrations[node.demonstration or 0].answer for node in of.tree.chosen]
    trunks = """[...document.querySelectorAll("li li")].map((li) =>
        [li.matches(".chosen, .preceding"), getComputedStyle(li, "::before").borderLeftColor])"""
    borders = """[...document.querySelectorAll(".node")].map((node) =>
        [node.dataset.chosen !== undefined, getComputedStyle(node).borderTopColor])"""

    async def check(page: Page) -> None:
        for theme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": theme}
            await page.call("Emulation.setEmulatedMedia", features=[feature])
            for coloured in (trunks, borders):
                found = await page.evaluate(coloured)
                marked = {colour for chosen, colour in found if chosen}
                assert len(marked) == 1
                assert marked.isdisjoint(colour for chosen, colour in found if not chosen)
        chosen = '[...document.querySelectorAll("[data-chosen] .name b")].map((b) => b.textContent)'
        assert await page.evaluate(chosen) == ["no demonstrations", *names]
        assert (
            await page.evaluate('document.querySelector("#chosen .mark").textContent') == "chosen"
        )
        widths = "new Set([...document.images].map((image) => image.naturalWidth))"
        assert await page.evaluate(f"[...{widths}]") == [8]

    check_page(of, tmp_path, browser, check)


@pytest.mark.parametrize("width", [400, pytest.param(1400, marks=pytest.mark.slow)])
def test_hundred_nodes_fit_without_overflow(tmp_path: Path, browser: str, width: int) -> None:
    of = stored_search(search_tree(demonstrations(), depth=4))
    overlapping = """(() => {
        const boxes = [...document.querySelectorAll(".node")].map((n) => n.getBoundingClientRect());
        return boxes.filter((a, i) => boxes.some((b, j) => i < j && a.left < b.right - 1
            && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)).length;
    })()"""
    squeezed = """[...document.querySelectorAll(".node .face, .reward")].filter(
        (one) => one.scrollWidth > one.clientWidth + 1).length"""

    async def check(page: Page) -> None:
        await resize(page, width)
        assert await page.evaluate('document.querySelectorAll(".node").length') == 121
        for _ in range(2):
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            assert await page.evaluate(overlapping) == 0
            assert await page.evaluate(squeezed) == 0
            opening = 'document.querySelectorAll(".node").forEach((node) => node.open = true)'
            await page.evaluate(opening)

    check_page(of, tmp_path, browser, check)


@pytest.mark.slow
def test_nodes_open_with_the_keyboard(tmp_path: Path, browser: str) -> None:
    async def press(page: Page, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            await page.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text
            )

    async def check(page: Page) -> None:
        for _ in range(3):  # a link, the root, its first child
            await press(page, "Tab", 9)
        await press(page, "Enter", 13, "\r")
        opened = '[...document.querySelectorAll(".node")].findIndex((node) => node.open)'
        assert await page.evaluate(opened) == 1
        detail = 'document.querySelector(".node[open] dl").innerText'
        assert "What is in the image above?" in await page.evaluate(detail)

    check_page(stored_search(search_tree(demonstrations())), tmp_path, browser, check)


def test_untrusted_text_is_not_run_in_the_browser(tmp_path: Path, browser: str) -> None:
    async def check(page: Page) -> None:
        assert (await page.evaluate("document.title")).startswith("Trace </style>")
        assert (
            await page.evaluate('document.querySelectorAll("b b, script, [onerror]").length') == 0
        )

    check_page(untrusted_trace(), tmp_path, browser, check)
