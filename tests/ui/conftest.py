from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

from bottega.gateway.accounting.accounts import Account
from bottega.gateway.running.build import build
from bottega.gateway.running.server import GatewayServer
from bottega.ui.app import gateway_routes
from tests.browser import PROGRAM, chromium
from tests.gateway.gateways import ENVIRONMENT, gateway_config, run_gateway
from tests.server import Server, ok

TOKEN = "token-of-the-link"
# Findings of axe-core that fail a test.
SERIOUS = ("serious", "critical")


@dataclass
class Console:
    """Running gateway with a console. `keys` are the keys by the name of their account."""

    url: str
    server: GatewayServer
    keys: dict[str, str]

    @property
    def api(self) -> str:
        return self.url.removesuffix("/ui") + "/v1"


@contextmanager
def console(
    folder: Path, endpoint: Server, *accounts: Account, more: str = ""
) -> Iterator[Console]:
    """Run a gateway whose models answer "seven". With accounts it requires keys; without, the link
    with `TOKEN` opens the console."""
    endpoint.answers = [ok("seven")]
    config = gateway_config(folder, endpoint.url, '\n[traces]\nstore = "images"\n' + more)
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
    server = build(config, ENVIRONMENT, more_routes=partial(gateway_routes, token=TOKEN))
    with run_gateway(server) as url:
        yield Console(url.removesuffix("/v1") + "/ui", server, keys)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Chromium that runs for all tests."""
    if PROGRAM is None:
        pytest.skip("no Chromium on the PATH")
    with chromium(tmp_path_factory.mktemp("browser") / "profile") as address:
        yield address


@pytest.fixture
def page_errors() -> list[str]:
    """Console errors and exceptions of the page. A test that expects some clears the list."""
    return []


@pytest.fixture
def page(browser: str, page_errors: list[str]) -> Iterator[Page]:
    """A page whose console errors and exceptions fail the test. Playwright runs for this test
    alone: while it runs, its thread cannot run asynchronous tests."""
    with sync_playwright() as playwright:
        context = playwright.chromium.connect_over_cdp(browser).new_context()
        yield from _watched(context.new_page(), page_errors)
        context.close()
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


def log_in(page: Page, url: str, key: str | None = None, *, read_only: bool = False) -> None:
    if key is None:
        page.goto(f"{url}/login?token={TOKEN}")
        return
    page.goto(f"{url}/login")
    page.get_by_label("Key").fill(key)
    if read_only:
        page.get_by_label("Read-only session").check()
    page.get_by_role("button", name="Log in").click()
