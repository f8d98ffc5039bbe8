"""Peers of benchmarks/gateway.py, each a process with one worker in an environment of its own.

LiteLLM: PATH/TO/python -m pip install 'litellm[proxy]' httptools prometheus-client
TensorZero: PATH/TO/python -m pip install tensorzero
Portkey (needs Node.js): npm install --prefix FOLDER @portkey-ai/gateway

LiteLLM checks a key and counts requests for Prometheus, as Bottega does. TensorZero's embedded
gateway and Portkey's free gateway have neither keys nor Prometheus metrics.
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
from benchmarks.processes import (
    ROOT,
    DidNotStartError,
    Server,
    await_port,
    free_port,
    start,
    stopping,
)

FLOOR, BARE, LITELLM = "floor", "bare proxy", "LiteLLM"
TENSORZERO, PORTKEY = "TensorZero", "Portkey"
STARTS = 120
"""Seconds that a peer may take to start."""
NODE = "node"
PORTKEY_SCRIPT = "node_modules/@portkey-ai/gateway/build/start-server.js"


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

    @property
    def litellm_program(self) -> Path | None:
        return self.litellm and self.litellm.with_name("litellm")

    @property
    def portkey_script(self) -> Path | None:
        return self.portkey and self.portkey / PORTKEY_SCRIPT


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
        for name, option, program, run in (
            (LITELLM, "--litellm-python PATH", installed.litellm_program, litellm),
            (TENSORZERO, "--tensorzero-python PATH", installed.tensorzero, tensorzero),
            (PORTKEY, "--portkey FOLDER", installed.portkey_script, portkey),
        ):
            missing = unusable(option, program)
            if program is None or missing:
                skipped.append(Skipped(name, missing))
            else:
                started: Callable[[Path, Path, Server], AbstractContextManager[Case]] = run
                cases.append(stack.enter_context(started(program, folder, mock)))
        yield mock, cases, skipped


def unusable(option: str, program: Path | None) -> str:
    """Return the reason why the peer cannot be started, or ""."""
    if program is None:
        return f"no {option} was given"
    how = "install it as the docstring of benchmarks/gateway_peers.py shows"
    if not program.exists():
        return f"there is no {program}: {how}"
    if program.suffix == ".js" and shutil.which(NODE) is None:
        return f"there is no program {NODE}: {how}"
    return ""


@contextlib.contextmanager
def litellm(program: Path, folder: Path, mock: Server) -> Iterator[Case]:
    port, config = free_port(), folder / "litellm.json"  # JSON is YAML
    parameters = {"model": "openai/mock", "api_base": f"{mock.url}/v1", "api_key": "none"}
    held = {
        "model_list": [{"model_name": "mock", "litellm_params": parameters}],
        "litellm_settings": {"telemetry": False, "callbacks": ["prometheus"]},
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
    """Run TensorZero without a database, and with one thread for requests instead of one a core."""
    config, log = folder / "tensorzero.toml", folder / "tensorzero.log"
    config.write_text(TENSORZERO_CONFIG.format(upstream=f"{mock.url}/v1"))
    command = [str(python), str(ROOT / "benchmarks/peers/tensorzero_gateway.py"), str(config)]
    alone = {"PYTHONPATH": "", "TOKIO_WORKER_THREADS": "1"}
    with stopping(start(command, 0, log, alone)) as server:
        address = urlsplit(printed_address(server))
        server = replace(server, port=address.port or 0)
        yield Case(
            TENSORZERO,
            await_port(server, STARTS),
            "tensorzero::model_name::mock",
            path=f"{address.path}/chat/completions",
        )


def printed_address(server: Server) -> str:
    """Wait for a line with an address in the log. Raises `DidNotStartError`."""
    until = time.monotonic() + STARTS
    while time.monotonic() < until and server.process.poll() is None:
        if found := re.search(r"^http://\S+$", server.log.read_text(), re.MULTILINE):
            return found[0]
        time.sleep(0.05)
    raise DidNotStartError(server.log.read_text(errors="replace")[-2000:])


@contextlib.contextmanager
def portkey(script: Path, folder: Path, mock: Server) -> Iterator[Case]:
    port = free_port()
    command = [NODE, str(script), f"--port={port}", "--headless"]
    provider = {"x-portkey-provider": "openai", "x-portkey-custom-host": f"{mock.url}/v1"}
    with stopping(start(command, port, folder / "portkey.log")) as server:
        yield Case(PORTKEY, await_port(server, STARTS), headers=provider, path=CHAT)
