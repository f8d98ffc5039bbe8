"""Each page of the console in both themes, at two widths, with the keyboard alone, and with markup
in all texts of clients, models, files and runs. `.ci/run` runs these tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Dialog, Page
from starlette.routing import Match, Route

from tests.server import Server
from tests.ui.conftest import MISSING, SERIOUS
from tests.ui.filled_console import RAN, FilledConsole, filled_console

NO_PAGES = {
    *("/ui", "/ui/", "/ui/static/{name}", "/ui/cache/export", "/ui/evaluations/image"),
    *("/ui/requests/{id}/images/{sha256}", "/ui/cache/{id}/images/{number}"),
}
# Theme, width in pixels, and rules of axe-core, none for all: only colours depend on the theme.
View = tuple[str, int, list[str]]
COLOURS = ["color-contrast"]
MATRIX: Sequence[View] = (
    *(("light", 1400, []), ("light", 400, [])),
    *(("dark", 400, COLOURS), ("dark", 1400, COLOURS)),
)
CHECK = """async ([rules, serious, excluded]) => {
    for (const one of document.querySelectorAll("details")) one.open = true;
    const only = rules.length ? {runOnly: rules} : {};
    const options = {resultTypes: ["violations"], selectors: false, iframes: false, ...only};
    const {violations} = await axe.run({exclude: excluded}, options);
    const found = violations.filter((one) => serious.includes(one.impact));
    const problems = found.map((one) => `${one.id}: ${one.nodes[0].html.slice(0, 200)}`);
    const wide = document.documentElement.scrollWidth - innerWidth;
    return wide > 0 ? [...problems, `is ${wide} pixels too wide`] : problems;
}"""
# Collects the visible controls, and removes those that get the focus and show it.
WATCH_FOCUS = """() => {
    const controls = "a[href], button, input, select, textarea, summary, [tabindex='0']";
    window.unreached = new Set([...document.querySelectorAll(controls)].filter((one) =>
        !one.disabled && !one.matches("[tabindex='-1'], [type=hidden]")
        && one.checkVisibility({visibilityProperty: true})));
    document.addEventListener("focusin", ({target}) => {
        const style = getComputedStyle(target), box = target.getBoundingClientRect();
        const isOutlined = style.outlineStyle !== "none" && style.outlineWidth !== "0px";
        if (box.width && box.height && isOutlined) unreached.delete(target);
    });
    return unreached.size;
}"""
FOCUS_ALL = """() => {
    for (const one of unreached) if (one.tabIndex >= 0) one.focus({focusVisible: true});
}"""
UNREACHED = "[...unreached].map((one) => one.outerHTML.slice(0, 100))"
ROUNDS = 4  # fields of dates have several stops
pytestmark = pytest.mark.slow


@pytest.fixture
def filled(endpoint: Server, tmp_path: Path) -> Iterator[FilledConsole]:
    with filled_console(tmp_path, endpoint) as opened:
        yield opened


# The console comes first: Playwright has the event loop of this thread.
def test_every_page_is_accessible_in_both_themes_fits_a_phone_and_runs_no_markup(
    filled: FilledConsole, page: Page, page_errors: list[str]
) -> None:
    page.emulate_media(reduced_motion="reduce")  # colours change at once
    # A refresh would replace controls meanwhile.
    page.add_init_script(f"{AXE_SCRIPT}; window.setInterval = () => 0")
    happened = list[str]()

    def dismiss(dialog: Dialog) -> None:
        happened.append(dialog.message)
        dialog.dismiss()

    page.on("console", lambda message: happened.append(message.text))
    page.on("dialog", dismiss)
    page.on("request", lambda sent: happened.append(sent.url) if _is_extra(sent.url) else None)
    problems, checked = list[str](), list[str]()
    for name in filled.open_pages(page):
        found = [*_problems(page, MATRIX, checked), *_unreached(page, tab=False)]
        found += [one for one in happened if (name, one) != ("error", MISSING)]
        problems += [f"{name}: {one}" for one in found]
        happened.clear()
        checked = ["header"]  # the same everywhere
    assert not problems, "\n".join(problems)
    assert _page_routes(filled) == {*_opened_routes(filled)}
    page_errors.clear()  # part of `happened`


def test_tab_reaches_every_control_of_every_page(
    filled: FilledConsole, page: Page, page_errors: list[str]
) -> None:
    page.set_viewport_size({"width": 400, "height": 900})
    page.add_init_script("window.setInterval = () => 0")
    found = {}
    for name in filled.open_pages(page):
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        if unreached := _unreached(page, tab=True):
            found[name] = unreached
    assert found == {}
    page_errors.clear()  # the 404 of the error page


def _problems(page: Page, views: Sequence[View], checked: Sequence[str]) -> Iterator[str]:
    """Yield the problems of the page in these views, except those of `checked` elements."""
    for theme, width, rules in views:
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": width, "height": 900})
        for one in page.evaluate(CHECK, [rules, SERIOUS, checked]):
            yield f"{theme}, {width} pixels: {one}"


def _unreached(page: Page, *, tab: bool) -> list[str]:
    """Return the controls that cannot have the focus visibly, or do not get it by `tab`."""
    count = page.evaluate(WATCH_FOCUS)
    for _ in range(ROUNDS if tab else 0):
        for _ in range(count + 2):
            page.keyboard.down("Tab")
        if not page.evaluate("unreached.size"):
            break
    if not tab:
        page.evaluate(FOCUS_ALL)
    return [f"no focus: {one}" for one in page.evaluate(UNREACHED)]


def _is_extra(url: str) -> bool:
    """Return whether only markup in texts requests this address."""
    parts = urlsplit(url)
    is_own = parts.hostname == "127.0.0.1" and not parts.path.endswith(f"/{RAN}")
    return parts.scheme not in ("data", "blob") and not is_own


def _page_routes(filled: FilledConsole) -> set[str]:
    return {one.path for one in filled.console.routes if "GET" in (one.methods or ())} - NO_PAGES


def _opened_routes(filled: FilledConsole) -> Iterator[str]:
    for path in filled.paths.values():
        scope = {"type": "http", "method": "GET", "path": f"/ui/{path.partition('?')[0]}"}
        found: Route = next(
            one for one in filled.console.routes if one.matches(scope)[0] is Match.FULL
        )
        yield found.path
