"""Throughput of one and two workers: python benchmarks/gateway_workers.py [--rounds N]
[--seconds S] [--share CORES] [--json FILE]

Sends the same pass-through request over 64 connections to gateways with one and with two workers
and shared state in PostgreSQL. The load (wrk) and the upstream (nginx) are written in C, since they
run on the same cores as the workers.

On two cores this is not enough: load generator, upstream and database use time that a second worker
then lacks. The table therefore has the CPU time per request of each process, and "bound" is the
ratio that no gateway could exceed here: all cores divided by the CPU time of a request in all
processes, over the rate of one worker. The second pair of runs limits each worker to a share of a
core (--share; needs write access to cgroups version 1), which leaves the rest of the machine to the
others, as on a machine with more cores. The requirement is judged by this pair; the first one is
reported with its bound, which can be below the requirement.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from benchmarks.gateway_bodies import QUESTION, SYSTEM
from benchmarks.gateway_cases import CONFIG, NOTHING, PEERS_START, STATE, TEAM
from benchmarks.gateway_figures import Bar, Spread, figure
from benchmarks.peers.mock_upstream import REPLY
from benchmarks.processes import (
    STARTS,
    Server,
    await_port,
    cpu_of,
    free_port,
    serve,
    start,
    stopping,
    tree,
)
from benchmarks.replica_servers import nginx_paths, nginx_program
from bottega.gateway.accounting.accounts import Accounts
from tests.postgres import PostgresServer, running_postgres

CONNECTIONS = 64
REQUIRED_RATIO = 1.7
WARM_SECONDS, IDLE_SECONDS = 4.0, 0.5
PERIOD = 10_000
"""Microseconds in which a worker may use its share."""
CGROUPS = Path("/sys/fs/cgroup/cpu")
BODY = {
    "model": "bottega/master",
    "messages": [SYSTEM, {"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 64,
}
NGINX = """
worker_processes 1; pid {folder}/nginx.pid; {user}
events {{ worker_connections 1024; }}
http {{
    access_log off; keepalive_requests 1000000000;
    {paths}
    server {{
        listen 127.0.0.1:{port};
        location / {{ default_type application/json; return 200 '{reply}'; }}
    }}
}}
"""
WRK = """
wrk.method = "POST"
wrk.body = {body}
wrk.headers["content-type"] = "application/json"
wrk.headers["authorization"] = "Bearer {key}"
wrk.headers["x-bottega-cache"] = "{cache}"
"""


@dataclass(frozen=True)
class Run:
    """Requests per second, and milliseconds of CPU per request of each part."""

    workers: int
    share: float | None
    rate: float
    gateway: float
    database: float
    upstream: float
    load: float

    @property
    def cpu(self) -> float:
        return self.gateway + self.database + self.upstream + self.load


@dataclass
class Gateway:
    workers: int
    server: Server
    script: Path

    def processes(self) -> list[int]:
        """Return the workers: the processes that have used most CPU time."""
        return sorted(tree(self.server.process.pid), key=cpu_of, reverse=True)[: self.workers]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shares = [None, arguments.share] if os.access(CGROUPS, os.W_OK) else [None]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        upstream = stack.enter_context(running_upstream(folder))
        postgres = stack.enter_context(running_postgres(fsync="on"))
        gateways = [
            stack.enter_context(running_gateway(folder, postgres, upstream, workers))
            for workers in (1, 2)
        ]
        for gateway in gateways:
            driven(gateway, WARM_SECONDS)
        runs = [
            measured(gateway, share, arguments.seconds, upstream, postgres)
            for _ in range(arguments.rounds)
            for share in shares
            for gateway in gateways
        ]
    print(*rows(runs, shares), sep="\n")
    bars = list(judged(runs, shares))
    print(*bars, sep="\n")
    if arguments.json:
        document = {
            "cores": os.cpu_count(),
            "runs": [asdict(run) for run in runs],
            "bars": [bar.document() for bar in bars],
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


def measured(
    gateway: Gateway,
    share: float | None,
    seconds: float,
    upstream: Server,
    postgres: PostgresServer,
) -> Run:
    assert postgres.process is not None
    database = Server(postgres.process, postgres.port, Path())
    with limited(gateway.processes(), share):
        before = [one.cpu() for one in (gateway.server, database, upstream)]
        load = resource.getrusage(resource.RUSAGE_CHILDREN)
        requests, rate = driven(gateway, seconds)
        after = [one.cpu() for one in (gateway.server, database, upstream)]
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = own.ru_utime + own.ru_stime - load.ru_utime - load.ru_stime
    times = [b - a for a, b in zip(before, after, strict=True)]
    return Run(gateway.workers, share, rate, *(one * 1000 / requests for one in (*times, used)))


def driven(gateway: Gateway, seconds: float) -> tuple[int, float]:
    """Return the number of requests and their rate. Raises `SystemExit` after an error."""
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds:g}s", "-s", str(gateway.script)]
    done = subprocess.run(
        [*command, f"{gateway.server.url}/v1/chat/completions"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if "Non-2xx" in done or "Socket errors" in done:
        raise SystemExit(done)
    requests = re.search(r"(\d+) requests in", done)
    rate = re.search(r"Requests/sec: *([\d.]+)", done)
    assert requests is not None and rate is not None, done
    return int(requests[1]), float(rate[1])


@contextlib.contextmanager
def limited(processes: Sequence[int], share: float | None) -> Iterator[None]:
    """Let each process use this share of a core; None changes nothing."""
    if share is None:
        yield
        return
    groups = [CGROUPS / f"bottega-benchmark-{pid}" for pid in processes]
    try:
        for group, pid in zip(groups, processes, strict=True):
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(f"{PERIOD}")
            (group / "cpu.cfs_quota_us").write_text(f"{int(PERIOD * share)}")
            (group / "cgroup.procs").write_text(f"{pid}")
        yield
    finally:
        for group, pid in zip(groups, processes, strict=True):
            (CGROUPS / "cgroup.procs").write_text(f"{pid}")
            group.rmdir()


@contextlib.contextmanager
def running_upstream(folder: Path) -> Iterator[Server]:
    if shutil.which("wrk") is None:
        raise SystemExit("this benchmark needs wrk: apt-get install wrk")
    port, config = free_port(), folder / "upstream.conf"
    text = NGINX.format(
        folder=folder,
        port=port,
        user="user root;" if os.geteuid() == 0 else "",
        paths=nginx_paths(folder),
        reply=REPLY.decode(),
    )
    config.write_text(text)
    command = [
        nginx_program(),
        "-e",
        "stderr",
        "-c",
        str(config),
        "-p",
        str(folder),
        "-g",
        "daemon off;",
    ]
    with stopping(start(command, port, folder / "upstream.log")) as server:
        yield await_port(server, PEERS_START)


@contextlib.contextmanager
def running_gateway(
    folder: Path, postgres: PostgresServer, upstream: Server, workers: int
) -> Iterator[Gateway]:
    own, port, url = folder / f"workers-{workers}", free_port(), postgres.create_database()
    own.mkdir()
    config, script = own / "bottega.toml", own / "load.lua"
    config.write_text(CONFIG.format(port=port, folder=own, upstream=f"{upstream.url}/v1") + STATE)
    with contextlib.closing(Accounts(url)) as accounts:
        _, key = accounts.add("bench", namespace=TEAM, tiers=["*"], max_concurrent=256)
    body = json.dumps(json.dumps(BODY))
    script.write_text(WRK.format(body=body, key=key, cache=NOTHING["x-bottega-cache"]))
    environment = {"BENCH_KEY": "none", "BENCH_DATABASE": url}
    with stopping(
        serve(config, port, own / "log", environment, "--workers", f"{workers}")
    ) as server:
        await_idle(server, workers)
        yield Gateway(workers, server, script)


def await_idle(server: Server, workers: int) -> None:
    """Wait until all workers have started: the port is open after the first one."""
    until, used = time.monotonic() + STARTS, math.inf
    while used > IDLE_SECONDS / 10 or len(tree(server.process.pid)) < workers:
        if time.monotonic() > until:
            raise SystemExit(f"the workers do not come to rest: {server.log}")
        before = server.cpu()
        time.sleep(IDLE_SECONDS)
        used = server.cpu() - before


def rows(runs: Sequence[Run], shares: Sequence[float | None]) -> Iterator[str]:
    yield "| workers | cores per worker | requests/s | gateway | PostgreSQL | upstream | load |"
    yield "|---" * 7 + "|"
    for share in shares:
        for workers in (1, 2):
            found = [run for run in runs if (run.workers, run.share) == (workers, share)]
            cells = [str(Spread.over([run.rate for run in found]))]
            for part in ("gateway", "database", "upstream", "load"):
                cells.append(figure(Spread.over([getattr(run, part) for run in found]).median))
            yield f"| {workers} | {share or 'all'} | {' | '.join(cells)} |"


def judged(runs: Sequence[Run], shares: Sequence[float | None]) -> Iterator[Bar]:
    for share in shares:
        one, two = ([r for r in runs if (r.workers, r.share) == (n, share)] for n in (1, 2))
        where = "same cores for all" if share is None else f"{share:g} cores per worker"
        ratios = [b.rate / a.rate for a, b in zip(one, two, strict=True)]
        yield Bar(
            "requests/s, 2 workers / 1",
            where,
            CONNECTIONS,
            Spread.over(ratios),
            REQUIRED_RATIO,
            True,
        )
        if share is None:
            most = (os.cpu_count() or 1) * 1000  # CPU ms per second
            bounds = [most / run.cpu / run.rate for run in one]
            yield Bar(
                "requests/s, 2 workers / 1, bound", where, CONNECTIONS, Spread.over(bounds), None
            )
        costs = [b.gateway / a.gateway for a, b in zip(one, two, strict=True)]
        yield Bar("CPU per request, 2 workers / 1", where, CONNECTIONS, Spread.over(costs), None)


if __name__ == "__main__":
    main()
