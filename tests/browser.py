"""A headless Chromium, driven through its DevTools protocol."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
NEEDS_CHROMIUM = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on the PATH")
SECONDS = 60


class Page:
    """Browser page. `page_errors` are uncaught exceptions, console errors and browser errors,
    including rejected requests."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.page_errors: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **params: object) -> Any:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=SECONDS)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    async def evaluate(self, script: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        reply = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    async def open(self, url: str, ready: str) -> None:
        """Open the address and wait until the expression `ready` is true."""
        await self.call("Page.navigate", url=url)
        for _ in range(SECONDS * 20):
            with suppress(AssertionError):  # the old document is unloading
                if await self.evaluate(f"Boolean({ready})"):
                    return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{ready} did not become true; page_errors: {self.page_errors}")

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.page_errors.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.page_errors.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.page_errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"][:60])


@contextmanager
def chromium(profile: Path) -> Iterator[str]:
    """Run Chromium and yield the address of its DevTools."""
    assert PROGRAM is not None
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    process = subprocess.Popen(
        [
            PROGRAM,
            *("--headless", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", *sandbox),
            "--disable-back-forward-cache",  # cached pages would keep their processes
            *(f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"),
        ],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield _address(profile / "DevToolsActivePort")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@asynccontextmanager
async def browsing(address: str) -> AsyncIterator[Page]:
    """Open a page beside those that are open; a window of its own would take half a second."""
    async with aiohttp.ClientSession() as session, session.ws_connect(address) as socket:
        browser = Page(socket)
        tab = await browser.call("Target.createTarget", url="about:blank")
        own = f"{address.partition('/devtools/')[0]}/devtools/page/{tab['targetId']}"
        async with session.ws_connect(own, max_msg_size=0) as talk:
            page = Page(talk)
            for domain in ("Page", "Runtime", "Log", "Network"):
                await page.call(f"{domain}.enable")
            yield page
            await page.call("Storage.clearDataForOrigin", origin="*", storageTypes="all")
        await browser.call("Target.closeTarget", **tab)


def _address(file: Path) -> str:
    for _ in range(SECONDS * 20):
        # The file holds a port and a path; the path is written later.
        if file.exists() and len(lines := file.read_text().split()) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    raise AssertionError("Chromium did not start")
