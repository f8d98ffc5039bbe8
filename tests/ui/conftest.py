from __future__ import annotations

import asyncio
import base64
from asyncio import AbstractEventLoop
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright
from starlette.routing import BaseRoute, Route

from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.request.cached_examples import Forget
from bottega.gateway.running.build import build
from bottega.gateway.running.server import GatewayServer
from bottega.ui.application import gateway_routes
from bottega.ui.bases import BaseOpener
from tests.gateway.gateways import ENVIRONMENT, gateway_config, run_gateway
from tests.server import Server, ok

TOKEN = "token-of-the-link"
# Findings of axe-core that fail a test.
SERIOUS = ("serious", "critical")
# Message of the browser's console.
MISSING = "Failed to load resource: the server responded with a status of 404 (Not Found)"


@dataclass
class Console:
    """Running gateway with a console. `keys` are the keys by the name of their account, `routes`
    those of the console; `open_base` returns the knowledge base of a namespace."""

    url: str
    server: GatewayServer = field(repr=False)
    keys: dict[str, str]
    routes: Sequence[Route] = field(repr=False)
    open_base: BaseOpener = field(repr=False)

    @property
    def api(self) -> str:
        return self.url.removesuffix("/ui") + "/v1"


@contextmanager
def console(
    folder: Path,
    endpoint: Server,
    *accounts: Account,
    more: str = "",
    embed: str = "words",
    port: int = 0,
) -> Iterator[Console]:
    """Run a gateway whose models answer "seven". With accounts, also of an earlier gateway in this
    folder, it requires keys; without, the link with `TOKEN` opens the console."""
    endpoint.answers = [ok("seven")]
    config = gateway_config(
        folder, endpoint.url, '\n[traces]\nstore = "images"\n' + more, embed=embed
    )
    keys = {}
    if accounts:
        first = build(config, ENVIRONMENT)
        for one in accounts:
            settings: dict[str, Any] = {
                "namespace": one.namespace,
                "admin": one.admin,
                "can_store": one.can_store,
                "viewer": one.viewer,
            }
            _, keys[one.name] = first.accounts.add(one.name, **settings)
        first.ledger.close()
        first.accounts.close()
    routes: list[BaseRoute] = []
    bases: list[BaseOpener] = []

    def console_routes(
        server: GatewayServer, open_base: BaseOpener | None, forget: Forget
    ) -> Sequence[BaseRoute]:
        assert open_base is not None
        bases.append(open_base)
        routes.extend(gateway_routes(server, open_base, forget, token=TOKEN))
        return routes

    server = build(config, ENVIRONMENT, more_routes=console_routes)
    own = [one for one in routes if isinstance(one, Route)]
    with run_gateway(server, port=port) as url:
        yield Console(url.removesuffix("/v1") + "/ui", server, keys, own, bases[0])


@pytest.fixture(scope="session")
def window(browser: str) -> Iterator[tuple[Page, AbstractEventLoop]]:
    """A blank page in a window that stays open, for the pages of all tests: each new window takes
    half a second. With it the event loop of Playwright, which never returns. Fixtures mark the loop
    as running only while a page is open, since its thread also runs asynchronous tests."""
    with sync_playwright() as playwright:
        loop = asyncio.get_running_loop()
        blank = playwright.chromium.connect_over_cdp(browser).new_context().new_page()
        asyncio._set_running_loop(None)
        yield blank, loop
        asyncio._set_running_loop(loop)


@pytest.fixture
def page_errors() -> list[str]:
    """Console errors and exceptions of the page. A test that expects some clears the list."""
    return []


@pytest.fixture
def page(window: tuple[Page, AbstractEventLoop], page_errors: list[str]) -> Iterator[Page]:
    """A page without cookies and stored data, whose console errors and exceptions fail the test.
    Meanwhile, its thread cannot run asynchronous tests."""
    blank, loop = window
    asyncio._set_running_loop(loop)
    try:
        yield from _watched(blank.context.new_page(), page_errors)
        for one in blank.context.pages:
            if one != blank:
                one.close()
        devtools = blank.context.new_cdp_session(blank)
        devtools.send("Storage.clearDataForOrigin", {"origin": "*", "storageTypes": "all"})
        devtools.detach()
    finally:
        asyncio._set_running_loop(None)
    assert page_errors == []


def _watched(opened: Page, page_errors: list[str]) -> Iterator[Page]:
    # Images of a page may still be requested when its gateway stops.
    opened.on(
        "console",
        lambda m: (
            page_errors.append(m.text)
            if m.type == "error" and "ERR_CONNECTION_REFUSED" not in m.text
            else None
        ),
    )
    opened.on("pageerror", lambda error: page_errors.append(str(error)))
    yield opened


def serious_findings(page: Page) -> list[str]:
    """Return the serious and critical findings of axe-core on the page."""
    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found if one["impact"] in SERIOUS
    ]


def drop(page: Page, selector: str, files: Mapping[str, bytes]) -> bool:
    """Drop files on an element of the page. Return whether the page accepts or ignores them: else
    the browser opens them in its place."""
    handled: bool = page.evaluate(
        """([selector, files]) => {
            const dropped = new DataTransfer();
            for (const [name, text] of files) {
                const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
                dropped.items.add(new File([bytes], name, {type: "image/png"}));
            }
            return !document.querySelector(selector).dispatchEvent(
                new DragEvent("drop", {dataTransfer: dropped, bubbles: true, cancelable: true}));
        }""",
        [selector, [(name, base64.b64encode(data).decode()) for name, data in files.items()]],
    )
    return handled


def log_in(page: Page, url: str, key: str | None = None, *, read_only: bool = False) -> None:
    if key is None:
        page.goto(f"{url}/login?token={TOKEN}")
        return
    page.goto(f"{url}/login")
    page.get_by_label("Key").fill(key)
    if read_only:
        page.get_by_label("Read-only session").check()
    page.get_by_role("button", name="Log in").click()
