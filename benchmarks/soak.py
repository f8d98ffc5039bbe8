"""Gateway stress test of half an hour: python benchmarks/soak.py [--minutes 30] [--concurrency 32]
[--json FILE] [--mixed]

`bottega serve` runs in its own process, before an upstream that is slow, fails, truncates streams
and sends garbage. Clients repeat questions, stream, disconnect and send invalid requests. Every
reply is checked word by word. For three quarters of the time the process runs undisturbed and its
memory is measured; then it is killed (SIGKILL) at random moments and restarted, and the cache file
must hold every entry whose storing was acknowledged. `--mixed` soaks every endpoint instead:
benchmarks/soak_mixed.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from benchmarks.processes import (
    STARTS,
    UNLIMITED,
    Server,
    await_port,
    free_port,
    new_key,
    serve,
    start,
    stopping,
)
from benchmarks.soak_clients import Client, ReplyLog, TenantKey
from benchmarks.soak_mixed import MixedReport, MixedSoak
from bottega.knowledge import KnowledgeBase
from bottega.types import Example
from tests.gateway.marked_replies import digest, parse_reply

NAMESPACES = ("red", "blue")
STEADY = 0.75
"""Fraction of the time without restarts."""
LEAK = 0.10
DRAINS = 40.0
QUESTIONS = 500
"""Per namespace: few enough that the cache holds nearly all of them within two minutes, and replays
expire within their 20 s. Both happen before the second fifth of half an hour, the baseline of the
last fifth."""
CONFIG = """
[gateway]
port = {port}
data = "{folder}/data"
max_concurrent = 30

[tiers.apprentice]
model = "openai:small"
base_url = "{upstream}"
api_key_env = "SOAK_KEY"
shots = 2
timeout = 3
retries = 1

[tiers.master]
model = "openai:large"
base_url = "{upstream}"
api_key_env = "SOAK_KEY"
timeout = 3
retries = 1

[route]
{route}

[cache]
file = "{folder}/cache.db"
embed = "pixels"

[replay]
seconds = 20
memory_mb = 8

[keys]
required = true
"""
ROUTES = {
    "random": 'router = "random"\nmaster_rate = 0.4',
    "coverage": 'router = "coverage"\nmin_similarity = 0.8',
}


@dataclass(frozen=True)
class Sample:
    seconds: float
    resident: int
    sockets: int
    threads: int


@dataclass
class Report:
    seconds: float = 0.0
    log: ReplyLog = field(default_factory=ReplyLog)
    samples: list[Sample] = field(default_factory=list)
    kills: int = 0
    lost: list[str] = field(default_factory=list)
    twice: list[list[str]] = field(default_factory=list)
    """Entries to one question."""
    entries: int = 0
    """In the cache's file at the end, each checked."""
    left_running: int = 0
    """Requests at the upstream after the last client had gone."""
    exit_status: int = 0
    tracebacks: int = 0

    def memory(self) -> float | None:
        """Return the ratio of memory in the last fifth to the second fifth of the undisturbed run;
        None if it was too short.
        """
        fifth = len(self.samples) // 5
        if fifth < 5:
            return None
        early = [one.resident for one in self.samples[fifth : 2 * fifth]]
        late = [one.resident for one in self.samples[-fifth:]]
        return statistics.mean(late) / statistics.mean(early)

    def faults(self) -> list[str]:
        """Return violations of the guarantees."""
        log, memory = self.log, self.memory()
        found = [f"wrong: {one}" for one in log.wrong]
        found += [f"lost: {one}" for one in self.lost]
        found += [f"kept twice: {ids}" for ids in self.twice]
        if memory is not None and abs(memory - 1) > LEAK:
            found.append(f"memory: the last fifth is {memory:.3f} of the second")
        if self.left_running:
            found.append(f"{self.left_running} requests went on at the upstream without a client")
        if self.exit_status not in (0, -signal.SIGTERM):  # uvicorn drains, then takes the signal
            found.append(f"it ended with the status {self.exit_status}")
        if self.tracebacks:
            found.append(f"{self.tracebacks} tracebacks in its log")
        for needed in ("right", "streamed", "replayed", "stored", "shown examples"):
            if not log.counts[needed]:
                found.append(f"nothing was {needed}: the soak says nothing about it")
        return found

    def document(self) -> dict[str, object]:
        return {
            "seconds": self.seconds,
            "counts": dict(self.log.counts),
            "refused": dict(self.log.refused),
            "kills": self.kills,
            "acknowledged": sum(map(len, self.log.kept.values())),
            "lost": len(self.lost),
            "entries": self.entries,
            "memory": self.memory(),
            "samples": [asdict(sample) for sample in self.samples],
            "faults": self.faults(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--concurrency", type=int, help="default: 32, or 16 if mixed")
    parser.add_argument("--mixed", action="store_true", help="use every endpoint; no kills")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--route", choices=sorted(ROUTES), default="random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report: Report | MixedReport
        if chosen.mixed:
            mixed = MixedSoak(Path(folder), chosen.concurrency or 16, chosen.seed)
            report = asyncio.run(mixed.run(chosen.minutes * 60))
        else:
            soak = Soak(Path(folder), chosen.concurrency or 32, chosen.route, chosen.seed)
            report = asyncio.run(soak.run(chosen.minutes * 60, chosen.kills))
    print(report.text() if isinstance(report, MixedReport) else text(report))
    if chosen.json:
        chosen.json.write_text(json.dumps(report.document(), indent=2) + "\n")
    sys.exit(1 if report.faults() else 0)


class Soak:
    def __init__(
        self, folder: Path, concurrency: int, route: str = "random", seed: int = 0
    ) -> None:
        self._folder, self._concurrency, self._route = folder, concurrency, route
        self._seed, self._rng = seed, random.Random(seed)
        self._port, self._log = free_port(), folder / "gateway.log"
        self._report, self._down = Report(), asyncio.Event()

    async def run(self, seconds: float, kills: int) -> Report:
        started, report = time.monotonic(), self._report
        with stopping(self._upstream()) as upstream:
            await asyncio.to_thread(await_port, upstream, STARTS)
            tenants = self._configured(upstream)
            gateway = await self._started()
            try:
                stop = asyncio.Event()
                async with self._session() as session, asyncio.TaskGroup() as group:
                    for client in self._clients(tenants):
                        group.create_task(client.run(session, stop))
                    try:
                        await self._watch(gateway, seconds * STEADY)
                        gateway = await self._killing(gateway, seconds * (1 - STEADY), kills)
                    finally:
                        stop.set()
                report.left_running = await self._left_running(upstream)
            finally:
                report.exit_status = await asyncio.to_thread(gateway.stop, DRAINS)
        self._check_kept()
        self._check_all()
        report.tracebacks = self._log.read_text(errors="replace").count("Traceback (most recent")
        report.seconds = time.monotonic() - started
        return report

    def _upstream(self) -> Server:
        port = free_port()
        command = [sys.executable, "-m", "tests.gateway.faulty_upstream", "--port", str(port)]
        more = ["--seed", str(self._seed), "--correct", "0.75"]
        return start([*command, *more], port, self._folder / "upstream.log")

    def _configured(self, upstream: Server) -> list[TenantKey]:
        filled = CONFIG.format(
            port=self._port,
            folder=self._folder,
            upstream=f"{upstream.url}/v1",
            route=ROUTES[self._route],
        )
        (self._folder / "bottega.toml").write_text(filled)
        data = self._folder / "data"
        return [TenantKey(new_key(data, name, name, *UNLIMITED), name) for name in NAMESPACES]

    async def _started(self) -> Server:
        config = self._folder / "bottega.toml"
        return await asyncio.to_thread(serve, config, self._port, self._log, {"SOAK_KEY": "none"})

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )

    def _clients(self, tenants: Sequence[TenantKey]) -> list[Client]:
        return [
            Client(
                f"http://127.0.0.1:{self._port}",
                tenants[number % len(tenants)],
                self._report.log,
                random.Random(f"{self._seed}/{number}"),
                questions=QUESTIONS,
                down=self._down,
            )
            for number in range(self._concurrency)
        ]

    async def _watch(self, gateway: Server, seconds: float) -> None:
        """Run undisturbed and sample memory."""
        begun, pause = time.monotonic(), min(3.0, seconds / 60)
        while (passed := time.monotonic() - begun) < seconds:
            await asyncio.sleep(pause)
            if gateway.process.poll() is not None:
                raise SystemExit(f"the gateway died: {self._log.read_text()[-2000:]}")
            sizes = gateway.resident(), gateway.sockets(), gateway.threads()
            self._report.samples.append(Sample(passed, *sizes))

    async def _killing(self, gateway: Server, seconds: float, kills: int) -> Server:
        """Kill at random moments; check acknowledged entries before each restart."""
        for _ in range(kills):
            await asyncio.sleep(seconds / kills * self._rng.uniform(0.3, 1.0))
            self._down.set()
            gateway.kill()
            await asyncio.sleep(0.2)  # replies in flight arrive
            await asyncio.to_thread(self._check_kept)
            gateway = await self._started()
            self._down.clear()
            self._report.kills += 1
        await asyncio.sleep(1)
        return gateway

    def _check_kept(self) -> None:
        for namespace in NAMESPACES:
            there: dict[str, list[str]] = {}
            with self._cache(namespace) as cache:
                for example in cache:
                    there.setdefault(question(example), []).append(str(example.id))
            self._report.lost += self._report.log.lost(namespace, there)
            self._report.twice += [ids for ids in there.values() if len(ids) > 1]

    def _check_all(self) -> None:
        """Check that each stored entry is a complete answer of the master to its question."""
        for namespace in NAMESPACES:
            with self._cache(namespace) as cache:
                for problem in cache.verify().problems:
                    self._report.log.is_wrong("the file is damaged", problem)
                for example in cache:
                    self._report.entries += 1
                    spoken = parse_reply(example.answer)
                    if spoken is None or spoken.model != "large":
                        self._report.log.is_wrong("stored, but not the master's", example)
                    elif spoken.question != question(example):
                        self._report.log.is_wrong("stored for another question", example)
                    elif (
                        self._report.log.first_namespace.get(spoken.number, namespace) != namespace
                    ):
                        self._report.log.is_wrong("stored for another namespace", example)

    def _cache(self, namespace: str) -> KnowledgeBase:
        return KnowledgeBase.open(
            self._folder / "cache.db", None, create=False, namespace=namespace
        )

    async def _left_running(self, upstream: Server) -> int:
        """Return pending requests after the last clients had time to end."""
        for _ in range(50):
            now = json.loads(await asyncio.to_thread(read, f"{upstream.url}/counts"))["now"]
            if not now:
                break
            await asyncio.sleep(0.1)
        return int(now)


def question(example: Example) -> str:
    return digest(example.query.text, [image.data for image in example.query.images])


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return bytes(reply.read())


def text(report: Report) -> str:
    log, memory = report.log, report.memory()
    counts = ", ".join(f"{count:,} {name}" for name, count in log.counts.most_common())
    refused = ", ".join(f"{count:,} x {status}" for status, count in sorted(log.refused.items()))
    acknowledged = sum(map(len, log.kept.values()))
    said = [
        f"{report.seconds:.0f} s: {counts}",
        f"refused while the upstream failed: {refused or 'none'}",
        f"killed {report.kills} times: {acknowledged:,} entries acknowledged, {len(report.lost)}"
        f" lost; {report.entries:,} entries in the file",
        "memory: the life was too short to say" if memory is None else f"memory: {sizes(report)}",
    ]
    faults = report.faults()
    said += [f"FAULT {one}" for one in faults[:20]] or ["no fault"]
    return "\n".join(said)


def sizes(report: Report) -> str:
    fifth = len(report.samples) // 5
    early, late = report.samples[fifth : 2 * fifth], report.samples[-fifth:]

    def between(read: Callable[[Sample], float]) -> str:
        return f"{statistics.mean(map(read, early)):.0f} to {statistics.mean(map(read, late)):.0f}"

    megabytes = between(lambda one: one.resident / 1e6)
    return (
        f"{megabytes} MB ({report.memory():.3f}), {between(lambda one: one.sockets)} sockets,"
        f" {between(lambda one: one.threads)} threads, from the second fifth to the last"
    )


if __name__ == "__main__":
    main()
