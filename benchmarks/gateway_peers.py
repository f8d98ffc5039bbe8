"""Peers of benchmarks/gateway.py, each a process with one worker in an environment of its own.

LiteLLM: PATH/TO/python -m pip install 'litellm[proxy]' httptools
TensorZero: PATH/TO/python -m pip install tensorzero
Portkey (needs Node.js): npm install --prefix FOLDER @portkey-ai/gateway
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.gateway_cases import CHAT, KEY, Case, running
from benchmarks.processes import ROOT, Server, await_port, free_port, start, stopping

FLOOR, BARE, LITELLM = "floor", "bare proxy", "LiteLLM"
TENSORZERO, PORTKEY = "TensorZero", "Portkey"
STARTS = 120
"""Seconds that a peer may take to start."""


@dataclass(frozen=True)
class Skipped:
    name: str
    reason: str


@dataclass(frozen=True)
class Environments:
    """Where the peers are installed, None for one that is left out."""

    litellm: Path | None = None
    tensorzero: Path | None = None
    portkey: Path | None = None


@contextlib.contextmanager
def peers(
    folder: Path, installed: Environments
) -> Iterator[tuple[Server, list[Case], list[Skipped]]]:
    """Start the mock upstream and the servers before it, all but Bottega."""
    with contextlib.ExitStack() as stack:
        mock = stack.enter_context(running("mock_upstream", folder))
        upstream = {"UPSTREAM": f"{mock.url}/v1"}
        floor = stack.enter_context(running("floor", folder))
        bare = stack.enter_context(running("bare_proxy", folder, upstream))
        cases, skipped = [Case(FLOOR, floor), Case(BARE, bare)], list[Skipped]()
        for name, option, path, program, run in (
            (LITELLM, "--litellm-python PATH", installed.litellm, "litellm", litellm),
            (TENSORZERO, "--tensorzero-python PATH", installed.tensorzero, "python", tensorzero),
            (PORTKEY, "--portkey FOLDER", installed.portkey, PORTKEY_SCRIPT, portkey),
        ):
            if path is None:
                skipped.append(Skipped(name, f"no {option} was given"))
            elif not (found := program_of(path, program)).exists():
                skipped.append(Skipped(name, f"there is no {found}"))
            else:
                started: Callable[[Path, Path, Server], AbstractContextManager[Case]] = run
                cases.append(stack.enter_context(started(found, folder, mock)))
        yield mock, cases, skipped


PORTKEY_SCRIPT = "node_modules/@portkey-ai/gateway/build/start-server.js"


def program_of(path: Path, program: str) -> Path:
    """Return the program next to an environment's Python, or in a folder."""
    return (path if path.is_dir() else path.parent) / program


@contextlib.contextmanager
def litellm(program: Path, folder: Path, mock: Server) -> Iterator[Case]:
    port, config = free_port(), folder / "litellm.json"  # JSON is YAML
    parameters = {"model": "openai/mock", "api_base": f"{mock.url}/v1", "api_key": "none"}
    held = {
        "model_list": [{"model_name": "mock", "litellm_params": parameters}],
        "litellm_settings": {"telemetry": False},
        "general_settings": {"master_key": KEY},
    }
    config.write_text(json.dumps(held))
    command = f"--config {config} --host 127.0.0.1 --port {port} --num_workers 1".split()
    alone = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "PYTHONPATH": ""}
    with stopping(start([str(program), *command], port, folder / "litellm.log", alone)) as server:
        yield Case(LITELLM, await_port(server, STARTS), settles=0.6)


TENSORZERO_CONFIG = """
[gateway]
observability.enabled = false

[object_storage]
type = "disabled"

[models.mock]
routing = ["bench"]

[models.mock.providers.bench]
type = "openai"
model_name = "mock"
api_base = "{upstream}/"
api_key_location = "none"
"""


@contextlib.contextmanager
def tensorzero(python: Path, folder: Path, mock: Server) -> Iterator[Case]:
    """Run TensorZero without keys, database and metrics, which its embedded gateway lacks."""
    config, log = folder / "tensorzero.toml", folder / "tensorzero.log"
    config.write_text(TENSORZERO_CONFIG.format(upstream=f"{mock.url}/v1"))
    command = [str(python), str(ROOT / "benchmarks/peers/tensorzero_gateway.py"), str(config)]
    with stopping(start(command, 0, log, {"PYTHONPATH": ""})) as server:
        address = urlsplit(printed_address(log))
        server = replace(server, port=address.port or 0)
        yield Case(
            TENSORZERO,
            await_port(server, STARTS),
            "tensorzero::model_name::mock",
            path=f"{address.path}/chat/completions",
        )


def printed_address(log: Path) -> str:
    until = time.monotonic() + STARTS
    while time.monotonic() < until:
        if found := re.search(r"^http://\S+$", log.read_text(), re.MULTILINE):
            return found[0]
        time.sleep(0.05)
    raise SystemExit(f"TensorZero did not start:\n{log.read_text()[-2000:]}")


@contextlib.contextmanager
def portkey(script: Path, folder: Path, mock: Server) -> Iterator[Case]:
    """Run Portkey without keys, whose free gateway has none."""
    node = shutil.which("node")
    if node is None:
        raise SystemExit("Portkey needs the program node")
    port = free_port()
    command = [node, str(script), f"--port={port}", "--headless"]
    provider = {"x-portkey-provider": "openai", "x-portkey-custom-host": f"{mock.url}/v1"}
    with stopping(start(command, port, folder / "portkey.log")) as server:
        yield Case(PORTKEY, await_port(server, STARTS), headers=provider, path=CHAT)
