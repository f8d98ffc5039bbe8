"""Ray clusters of two CPUs for a test session: a private one, and one that is already running."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from bottega._util.ray_executor import ENVIRONMENT, LOOPBACK, RayExecutor
from tests.postgres import free_port

WORKERS = 2
START_SECONDS, STOP_SECONDS = 120, 30
# The cluster forks a process for each client, which gRPC's handlers can break, and waits 30 s for
# it, too short on a busy machine.
RELIABLE = {
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}


@dataclass(frozen=True)
class RayHead:
    """Addresses of a running cluster: RAY_ADDRESS for drivers, and the URL of its client port."""

    driver: str
    client: str


@contextmanager
def running_ray(address: str = "ray") -> Iterator[RayExecutor]:
    """Connect to a cluster, or start one; skip the test without Ray."""
    skip_without_ray()
    ray = sys.modules.get("ray")
    assert ray is None or not ray.is_initialized(), "this executor would not connect"
    executor = RayExecutor(address, WORKERS)
    try:
        yield executor
    finally:
        executor.close()


@contextmanager
def running_head() -> Iterator[RayHead]:
    """Start a cluster with `ray start` on loopback, with files and ports of its own."""
    skip_without_ray()
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray reads both once
    port, client = free_port(), free_port()
    options = [
        *("--head", "--block", f"--num-cpus={WORKERS}", "--node-ip-address=127.0.0.1"),
        *(f"--port={port}", f"--ray-client-server-port={client}", "--include-dashboard=false"),
    ]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
    with tempfile.TemporaryDirectory(prefix="bottega-ray-") as folder:
        log = Path(folder, "log")
        environment = os.environ | ENVIRONMENT | LOOPBACK | {"RAY_TMPDIR": folder, **RELIABLE}
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            end = time.monotonic() + START_SECONDS
            while not (accepts(port) and accepts(client)):
                assert process.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.1)
            yield RayHead(f"127.0.0.1:{port}", f"ray://127.0.0.1:{client}")
        finally:
            process.terminate()  # ends the processes of the cluster too
            process.wait(STOP_SECONDS)


def skip_without_ray() -> None:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed")


def accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
