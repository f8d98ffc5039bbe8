"""CPU time of shared state: python benchmarks/gateway_state.py [--rounds N] [--seconds S]
[--json FILE]

Compares a gateway with state in PostgreSQL and Redis with an embedded one. Both run at the same
time in front of an upstream that answers immediately; requests alternate between them, and each
ratio compares one round. CPU time is that of the gateway.

A single client pauses for 10 ms between its requests. Without a pause, the embedded gateway would
get six times as many requests per second, because the other one waits for the disk, and a process
that sleeps and wakes for each request uses up to twice the CPU time for it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from benchmarks.gateway import Bench, Size
from benchmarks.gateway_bodies import text_body
from benchmarks.gateway_cases import CONFIG, SETTLES, STATE, TEAM, Case, running
from benchmarks.gateway_figures import Figures
from benchmarks.processes import Server, free_port, serve, stopping
from benchmarks.replica_servers import running_redis
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger_schema import FILE
from tests.postgres import running_postgres

LIMIT = 1.5
PAUSE = 0.01
"""Seconds."""
MODEL = "bottega/master"
NEW = {"x-bottega-cache": "no-store,no-retrieve"}
UNREPEATED = {"x-bottega-cache": "no-store,no-retrieve,no-replay"}
KINDS = {
    "pass-through": ("free", UNREPEATED),
    "new question": ("free", NEW),
    "key with limits": ("limited", UNREPEATED),
    "key with limits, new question": ("limited", NEW),
}
EMBEDDED, SHARED = "embedded", "PostgreSQL and Redis"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    size = Size(arguments.rounds, tuple(arguments.at_once), arguments.seconds, PAUSE)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        cases = stack.enter_context(gateways(Path(name), arguments.kinds))
        bench = stack.enter_context(Bench.ready(Path(name), cases, [text_body()]))
        runs = list(bench.rounds(size, arguments.rounds))
    figures = Figures(runs)
    print(*figures.rows(), sep="\n")
    bars = [
        bar
        for kind in arguments.kinds
        for bar in figures.ratio(
            f"{kind}: shared / embedded", f"{kind}, {SHARED}", f"{kind}, {EMBEDDED}", LIMIT
        )
    ]
    print(*bars, sep="\n")
    if arguments.json:
        document = {
            "cores": os.cpu_count(),
            "runs": [asdict(run) for run in runs],
            "bars": [bar.document() for bar in bars],
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


@contextlib.contextmanager
def gateways(folder: Path, kinds: list[str]) -> Iterator[list[Case]]:
    """Start both gateways and their servers."""
    with contextlib.ExitStack() as stack:
        mock = stack.enter_context(running("mock_upstream", folder))
        postgres = stack.enter_context(running_postgres(fsync="on"))
        redis = stack.enter_context(running_redis(folder))
        if redis is None:
            raise SystemExit("this benchmark needs redis-server or valkey-server")
        found: dict[str, tuple[Server, dict[str, str]]] = {}
        for name in (EMBEDDED, SHARED):
            own, port, environment = folder / name, free_port(), {"BENCH_KEY": "none"}
            (own / "data").mkdir(parents=True)
            text = CONFIG.format(port=port, folder=own, upstream=f"{mock.url}/v1")
            location: str | Path = own / "data" / FILE
            if name == SHARED:
                location = postgres.create_database()
                text += STATE + 'redis_env = "BENCH_REDIS"\n'
                environment |= {"BENCH_DATABASE": location, "BENCH_REDIS": redis}
            (own / "bottega.toml").write_text(text)
            with contextlib.closing(Accounts(location)) as accounts:
                keys = {
                    "free": accounts.add("free", namespace=TEAM, tiers=["*"], max_concurrent=256),
                    "limited": accounts.add(
                        "limited",
                        namespace=TEAM,
                        tiers=["*"],
                        max_concurrent=256,
                        requests_per_minute=2**30,
                        usd_per_month=1e9,
                    ),
                }
            server = serve(own / "bottega.toml", port, own / "log", environment)
            found[name] = (
                stack.enter_context(stopping(server)),
                {one: key for one, (_, key) in keys.items()},
            )
        yield [
            Case(
                f"{kind}, {name}",
                server,
                MODEL,
                headers,
                key=keys[key],
                settles=SETTLES,
                bodies=("text",),
            )
            for kind, (name, (server, keys)) in itertools.product(kinds, found.items())
            for key, headers in [KINDS[kind]]
        ]


if __name__ == "__main__":
    main()
