"""Milvus for tests: one server per session. It has no setting for its network interface, so it
requires a password."""

from __future__ import annotations

import gc
import signal
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.postgres import free_port

if TYPE_CHECKING:
    from milvus import MilvusServer

# Short intervals: a search of the latest writes waits for the next tick.
SETTINGS = {"proxy.timeTickInterval": 20, "authorization_enabled": True}


@dataclass
class RunningMilvus:
    """Running server with the user `root`, whose password is `Milvus`."""

    server: MilvusServer

    def url(self, database: str = "default") -> str:
        return f"milvus://root:Milvus@127.0.0.1:{self.server.listen_port}/{database}"

    def suspend(self) -> None:
        """Stop the server without ending it. (Its restart takes a minute: old leases expire.)"""
        self.server.server_proc.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.server.server_proc.send_signal(signal.SIGCONT)


@contextmanager
def running_milvus() -> Iterator[RunningMilvus]:
    """Start the server of the package `milvus`; skip the test without it."""
    if find_spec("milvus") is None or find_spec("pymilvus") is None:
        pytest.skip("needs the packages milvus and pymilvus")
    from milvus import MilvusServer, MilvusServerConfig

    with tempfile.TemporaryDirectory(prefix="bottega-milvus-") as folder:
        port = free_port()
        server = MilvusServer(MilvusServerConfig(), data_dir=folder, etcd_port=port)
        etcd = Path(folder) / "etcd.yaml"  # two servers cannot share the default port for peers
        etcd.write_text(
            f"listen-client-urls: http://127.0.0.1:{port}\n"
            f"advertise-client-urls: http://127.0.0.1:{port}\n"
            f"listen-peer-urls: http://127.0.0.1:{free_port()}\n"
        )
        for name, value in SETTINGS.items():
            server.config.set(name, value)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("ETCD_CONFIG_PATH", str(etcd))
                with warnings.catch_warnings(action="ignore"):
                    server.start()
                    gc.collect()  # the package leaves sockets open
            yield RunningMilvus(server)
        finally:
            server.stop()
