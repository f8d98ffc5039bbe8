"""Servers of benchmarks/replicas.py: three gateways behind nginx, a counting model endpoint,
PostgreSQL and Redis, all on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.counting_upstream import COMPLETION_TOKENS, PROMPT_TOKENS
from benchmarks.processes import (
    BOTTEGA,
    ROOT,
    STARTS,
    Server,
    await_port,
    free_port,
    start,
    stopping,
    uvicorn,
)
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger_schema import FILE

REPLICAS = 3
COLD_START = 20
APPRENTICE_MODEL, MASTER_MODEL = "mock-small", "mock-large"
PRICES = {APPRENTICE_MODEL: (10.0, 40.0), MASTER_MODEL: (40.0, 160.0)}
"""US dollars per million prompt and completion tokens: 0.5 and 2 cents per call."""
CONFIG = """
[gateway]
data = "{data}"

[tiers.apprentice]
model = "openai:mock-small"
base_url = "{upstream}/v1"
api_key_env = "BENCH_KEY"
price = [10.0, 40.0]
concurrency = 256
retries = 0

[tiers.master]
model = "openai:mock-large"
base_url = "{upstream}/v1"
api_key_env = "BENCH_KEY"
price = [40.0, 160.0]
concurrency = 256
retries = 0

[route]
router = "fixed"
tier = "apprentice"
cold_start = {cold_start}

[cache]
embed = "words"
{cache}

[keys]
required = true
"""
DATABASE = 'database_env = "BENCH_DATABASE"\n'
STATE = f"""
[state]
{DATABASE}"""


def cost_of(model: str) -> float:
    """Return the cost of one call in US dollars."""
    prompt, completion = PRICES[model]
    return (PROMPT_TOKENS * prompt + COMPLETION_TOKENS * completion) / 1e6


@dataclass
class Cluster:
    """Three gateways, their model endpoint and nginx. `keys` are the tokens and `accounts` the ids
    of keys, by name."""

    folder: Path
    mock: Server
    location: str | Path
    environment: dict[str, str]
    gateways: list[Server] = field(default_factory=list)
    proxy: Server | None = None
    keys: dict[str, str] = field(default_factory=dict)
    accounts: dict[str, str] = field(default_factory=dict)

    @property
    def urls(self) -> list[str]:
        return [one.url for one in self.gateways]

    @property
    def url(self) -> str:
        assert self.proxy is not None
        return self.proxy.url

    def calls(self) -> dict[str, int]:
        """Return the calls that the model endpoint has received, by model."""
        with urllib.request.urlopen(f"{self.mock.url}/counts", timeout=10) as reply:
            found: dict[str, int] = json.load(reply)["calls"]
        return {model: found.get(model, 0) for model in PRICES}

    def add_key(self, name: str, **limits: Any) -> None:
        accounts = Accounts(self.location)
        try:
            account, self.keys[name] = accounts.add(name, namespace=name, **limits)
            self.accounts[name] = account.id
        finally:
            accounts.close()

    def stop(self, number: int) -> None:
        self.gateways[number].stop()

    def launch(self, number: int, port: int) -> Server:
        """Start a gateway without waiting for its port."""
        config = self.folder / f"gateway-{number}.toml"
        log = self.folder / f"gateway-{number}.log"
        command = [*BOTTEGA, "serve", "--config", str(config), "--port", str(port)]
        return start(command, port, log, self.environment)


@contextlib.contextmanager
def running_cluster(
    folder: Path, database: str | None, redis: str | None, keys: dict[str, dict[str, Any]]
) -> Iterator[Cluster]:
    """Start all servers. Without a database the gateways share one data folder, as embedded
    gateways can; with one, each has its own folder, as on separate machines, and the examples are
    in the database, as in deploy/bottega.toml."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        mock = start(
            uvicorn("benchmarks.peers.counting_upstream:app", port), port, folder / "mock.log"
        )
        stack.enter_context(stopping(mock))
        await_port(mock, STARTS)
        environment = {"BENCH_KEY": "none"}
        if database is not None:
            environment["BENCH_DATABASE"] = database
        if redis is not None:
            environment["BENCH_REDIS"] = redis
        data = folder / "data"
        data.mkdir()
        cluster = Cluster(folder, mock, database or data / FILE, environment)
        for name, limits in keys.items():
            cluster.add_key(name, **limits)
        for number in range(REPLICAS):
            own = data if database is None else folder / f"data-{number}"
            text = CONFIG.format(
                data=own,
                upstream=mock.url,
                cold_start=COLD_START,
                cache="" if database is None else DATABASE,
            )
            if database is not None:
                text += STATE + ('redis_env = "BENCH_REDIS"\n' if redis else "")
            (folder / f"gateway-{number}.toml").write_text(text)
            cluster.gateways.append(cluster.launch(number, free_port()))
            stack.callback(cluster.stop, number)
        for gateway in cluster.gateways:
            await_port(gateway, STARTS)
        cluster.proxy = stack.enter_context(running_nginx(folder, cluster.gateways))
        yield cluster


@contextlib.contextmanager
def running_nginx(folder: Path, gateways: list[Server]) -> Iterator[Server]:
    """Start nginx with deploy/nginx.conf and the addresses of these gateways."""
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(local_nginx_config([one.port for one in gateways], port, folder))
    command = [nginx_program(), "-e", "stderr", "-c", str(config), "-p", str(folder)]
    with stopping(start([*command, "-g", "daemon off;"], port, folder / "nginx.log")) as server:
        yield await_port(server, 10)


def nginx_program() -> str:
    program = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if program is None:
        raise SystemExit("this benchmark needs nginx: apt-get install nginx-light")
    return program


def nginx_paths(folder: Path) -> str:
    """Return directives for temporary files in this folder."""
    paths = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    return "".join(f"{one}_temp_path {folder}/{one};\n" for one in paths)


def local_nginx_config(gateways: list[int], port: int, folder: Path) -> str:
    """Return deploy/nginx.conf with ports of this machine and files in `folder`."""
    text = (ROOT / "deploy/nginx.conf").read_text()
    line = re.search(r"^ *server gateway:8000(.*)$", text, re.MULTILINE)
    assert line is not None
    servers = "\n".join(f"server 127.0.0.1:{one}{line[1]}" for one in gateways)
    text = text.replace(line[0], servers).replace("listen 8080", f"listen 127.0.0.1:{port}")
    text = text.replace("worker_processes auto", "worker_processes 1")
    user = "user root;\n" if os.geteuid() == 0 else ""
    return (
        user
        + f"pid {folder}/nginx.pid;\n"
        + text.replace("http {", "http {\n" + nginx_paths(folder))
    )


@contextlib.contextmanager
def running_redis(folder: Path) -> Iterator[str | None]:
    """Start a Redis or Valkey server and return its URL; None without the program."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        print("without Redis: redis-server is not installed", file=sys.stderr)
        yield None
        return
    port = free_port()
    command = [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)]
    command += ["--save", "", "--appendonly", "no"]
    with stopping(start(command, port, folder / "redis.log")) as server:
        await_port(server, 10)
        yield f"redis://127.0.0.1:{port}/0"


def kill(server: Server) -> None:
    """End a server as a crash would."""
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(10)
