"""A gateway that drains behind nginx: clients notice nothing."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.replica_servers import running_nginx
from tests.cli.test_serve import served, status_with_key, wait_for, write_config
from tests.server import Server


class PortOnly:
    """Gateway as `running_nginx` takes it."""

    def __init__(self, url: str) -> None:
        self.port = int(url.split(":")[2].removesuffix("/v1"))


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("nginx", path="/usr/sbin:/usr/bin:/bin") is None, reason="needs the program nginx"
)
def test_no_request_is_lost_behind_nginx(endpoint: Server, tmp_path: Path) -> None:
    statuses: list[int] = []
    done = threading.Event()
    with ExitStack() as stack:
        gateways = []
        for name in ("a", "b"):
            folder = tmp_path / name
            folder.mkdir()
            file = write_config(folder, endpoint.url)
            url, process = stack.enter_context(served("--config", str(file), folder=folder))
            wait_for(url.removesuffix("/v1") + "/readyz", 200)
            gateways.append((url, process))
        proxy = stack.enter_context(
            running_nginx(tmp_path, [PortOnly(url) for url, _ in gateways])  # type: ignore[misc]
        )

        def ask() -> None:
            while not done.is_set():
                statuses.append(status_with_key(f"{proxy.url}/v1", "any", "bottega"))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(1)
        gateways[0][1].send_signal(signal.SIGTERM)
        gateways[0][1].wait(30)
        before = len(statuses)
        time.sleep(1)
        done.set()
        for thread in threads:
            thread.join()
    assert before > 10 and len(statuses) > before
    assert {*statuses} == {200}
