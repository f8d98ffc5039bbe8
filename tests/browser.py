"""A headless Chromium, driven through its DevTools protocol."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
NEEDS_CHROMIUM = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on the PATH")
SECONDS, SECONDS_TO_END = 60, 5


class Page:
    """`complaints` are uncaught exceptions, console errors and the browser's own, refused requests
    among them."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
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
        """The value of an expression, of a promise if it is one."""
        found = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def open(self, url: str, ready: str) -> None:
        """Returns when the expression `ready` is true."""
        await self.call("Page.navigate", url=url)
        for _ in range(SECONDS * 20):
            with suppress(AssertionError):  # the old document is just going
                if await self.evaluate(f"Boolean({ready})"):
                    return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{ready} did not become true; complaints: {self.complaints}")

    def _note(self, message: dict[str, Any]) -> None:
        told = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(told["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "assert"):
                self.complaints.append(str(told["args"]))
            case "Log.entryAdded" if told["entry"]["level"] == "error":
                self.complaints.append(told["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"][:60])


@asynccontextmanager
async def browsing(profile: Path) -> AsyncIterator[Page]:
    assert PROGRAM is not None
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        *("--headless", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", *sandbox),
        *(f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"),
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with aiohttp.ClientSession() as session:
            address = await _address(session, profile / "DevToolsActivePort")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.call(f"{domain}.enable")
                yield page
                await socket.send_json({"id": 0, "method": "Browser.close"})
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), SECONDS_TO_END)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _address(session: aiohttp.ClientSession, file: Path) -> str:
    for _ in range(SECONDS * 20):
        if port := await asyncio.to_thread(_port, file):
            with suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    for target in await answer.json():
                        if target["type"] == "page":
                            return str(target["webSocketDebuggerUrl"])
        await asyncio.sleep(0.05)
    raise AssertionError("Chromium did not start")


def _port(file: Path) -> str:
    lines = file.read_text().splitlines() if file.exists() else []
    return lines[0] if lines else ""
