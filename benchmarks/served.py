"""`bottega serve` and `bottega keys add` as an operator runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.processes import ROOT, Server, await_port, start

STARTS = 90.0
"""Seconds."""
BOTTEGA = [sys.executable, "-m", "bottega"]


def serve(
    config: Path, port: int, log: Path, environment: Mapping[str, str] | None = None
) -> Server:
    """Start the gateway and return once it accepts connections."""
    server = start([*BOTTEGA, "serve", "--config", str(config)], port, log, environment)
    return await_port(server, STARTS)


UNLIMITED = ("--tiers", "*", "--max-concurrent", "256")


def new_key(data: Path, name: str, namespace: str, *options: str) -> str:
    command = [*BOTTEGA, "keys", "add", name, "--data", str(data), "--namespace", namespace]
    command += options
    surroundings = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    made = subprocess.run(
        [*command, "--json"], env=surroundings, capture_output=True, text=True, check=True
    )
    return str(json.loads(made.stdout)["key"])
