"""The built site in a browser: nothing from other hosts, no errors, readable at every width."""

from __future__ import annotations

import asyncio
import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.site.__main__ import main
from tests.browser import NEEDS_CHROMIUM, browsing, chromium

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), NEEDS_CHROMIUM]
PAGES = (
    *("index.html", "start.html", "methods.html", "tutorials/notebook.html"),
    *("reference/cli.html", "reference/configuration.html", "reference/python/knowledge.html"),
)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the site that BOTTEGA_SITE names, as in `.ci/run`, else one that is built now."""
    folder = os.environ.get("BOTTEGA_SITE")
    if folder is None:
        folder = str(tmp_path_factory.mktemp("site") / "site")
        assert main(Path(folder)) == 0
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


async def test_pages_load_nothing_from_other_hosts(site: str, tmp_path: Path) -> None:
    with chromium(tmp_path) as address:
        async with browsing(address) as page:
            for scheme, width in (("light", 1400), ("dark", 400)):
                wanted = [{"name": "prefers-color-scheme", "value": scheme}]
                await page.call("Emulation.setEmulatedMedia", features=wanted)
                size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
                await page.call("Emulation.setDeviceMetricsOverride", **size)
                for name in PAGES:
                    await page.open(
                        f"{site}/{name}",
                        f"location.pathname == '/{name}' && document.readyState == 'complete'",
                    )
                    slate = "document.body.dataset.mdColorScheme == 'slate'"
                    assert await page.evaluate(slate) == (scheme == "dark"), name
                    wide = "document.documentElement.scrollWidth > innerWidth"
                    assert not await page.evaluate(wide), f"{name} scrolls at {width}"
                    broken = (
                        "[...document.images].filter(i => i.complete && !i.naturalWidth).length"
                    )
                    assert await page.evaluate(broken) == 0, name
    assert page.page_errors == []
    hosts = {url.split("/")[2] for url in page.requests if url.startswith("http")}
    assert hosts == {site.removeprefix("http://")}


async def test_the_search_finds_pages(site: str, tmp_path: Path) -> None:
    with chromium(tmp_path) as address:
        async with browsing(address) as page:
            await page.open(f"{site}/index.html", "document.querySelector('.md-search__button')")
            await asyncio.sleep(1)  # scripts of the page attach themselves to the button
            await page.evaluate("document.querySelector('.md-search__button').click()")
            await asyncio.sleep(0.5)
            await page.call("Input.insertText", text="coverage router")
            roots = "[...document.querySelectorAll('body > div')].map(e => e.shadowRoot)"
            found = f"{roots}.some(root => root?.textContent.includes('Choosing a router'))"
            for _ in range(200):
                if await page.evaluate(found):
                    break
                await asyncio.sleep(0.05)
            assert await page.evaluate(found)
    assert page.page_errors == []
