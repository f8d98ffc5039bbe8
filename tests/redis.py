"""Redis for tests: one server per session on loopback, emptied for each test."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import pytest

from tests.postgres import free_port

START_SECONDS = 10


@dataclass
class RedisServer:
    """Running server without persistence: a restart loses everything."""

    binary: str
    folder: str
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(self.binary, "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--save", "", "--appendonly", "no", "--dir", self.folder),
            ],
            stdout=subprocess.DEVNULL,
        )
        end = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self.process.poll() is None and time.monotonic() < end
            time.sleep(0.02)

    def stop(self) -> None:
        """Kill the server, which loses its data."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_SECONDS)
            self.process = None

    def run(self, *command: str) -> object:
        """Run one command in a connection of its own."""
        from valkey import Valkey

        with Valkey(port=self.port) as client:
            return client.execute_command(*command)

    def _answers(self) -> bool:
        from valkey.exceptions import ConnectionError

        try:
            return bool(self.run("PING"))
        except ConnectionError:
            return False


@contextmanager
def running_redis() -> Iterator[RedisServer]:
    """Start a server of the installed redis-server or valkey-server; skip the test without it."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None or find_spec("valkey") is None:
        pytest.skip("needs redis-server or valkey-server and the package valkey")
    with tempfile.TemporaryDirectory(prefix="bottega-redis-") as folder:
        server = RedisServer(binary, folder, free_port())
        try:
            server.start()
            yield server
        finally:
            server.stop()
