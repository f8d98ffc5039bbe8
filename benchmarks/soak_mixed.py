"""Soak of every endpoint: python benchmarks/soak.py --mixed [--minutes 30] [--concurrency 16]

One gateway, before an upstream that fails like that of the other soak, with keys, traces, shadow
samples and a judge, an experiment, stored responses, batches and the console. Its bounds are low,
and its ledger has old requests, so that its caches are full after a sixth of the time. The soak
fails if memory grows from then to the end, if a cache was not full by then and grew, or if
something acknowledged is lost after SIGTERM: requests and their costs, feedback, corrections,
stored responses, lines of batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
import sqlite3
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import orjson
from aiohttp import web

from benchmarks.console_data import fill_ledger, store_run
from benchmarks.processes import (
    STARTS,
    UNLIMITED,
    Server,
    await_port,
    free_port,
    new_key,
    start,
)
from benchmarks.soak_clients import TenantKey, image
from benchmarks.soak_mixed_clients import (
    CORRECTIONS,
    PRICES,
    REFUSED,
    SAMPLING,
    Acknowledged,
    MixedClient,
)
from bottega.gateway.accounting.ledger_schema import FILE
from bottega.knowledge import KnowledgeBase
from tests.gateway.faulty_upstream import FaultyUpstream

CONFIG = """
[gateway]
port = {port}
data = "{folder}/data"

[tiers.apprentice]
model = "openai:small"
base_url = "{upstream}/v1"
api_key_env = "SOAK_KEY"
shots = 2
timeout = 3
retries = 1
price = {prices[apprentice]}

[tiers.master]
model = "openai:large"
base_url = "{upstream}/v1"
api_key_env = "SOAK_KEY"
timeout = 3
retries = 1
price = {prices[master]}

[route]
router = "random"
master_rate = 0.4

[cache]
embed = "pixels"
capacity = 250
open_namespaces = 4

[replay]
memory_mb = 1

[limits]
fetch_images = true

[shadow]
rate = 0.2
judge = "master"

[keys]
required = true

[traces]
store = "images"
images_mb = 1
keep_days = 60.0

[batches]
max_requests = 100

[console]
runs = "{folder}/runs"

[feedback]
max_corrections = {corrections}

[responses]
store = true
max_per_key = {responses}

[experiment]
name = "fewer-shots"
b = "shots=1"
"""
NAMESPACES = ("red", "blue")
OLD_REQUESTS = 25_000
"""More than the console reads at a time."""
RESPONSES = 200
FULL, GROWTH = 0.9, 1.05
"""A cache is full from this share of its bound on; memory may grow by this factor."""
WARM, WINDOW = 1 / 6, 1 / 60
"""Shares of the time: when caches are full, and half of the time over which memory is measured."""
SHORTEST = 300.0
"""Seconds of a soak whose memory and caches are judged."""
DRAINS = 40.0
ROUNDING = 1e-9


@dataclass(frozen=True)
class MemorySample:
    seconds: float
    resident: int


@dataclass
class MixedReport:
    seconds: float
    outcomes: Acknowledged = field(default_factory=Acknowledged)
    samples: list[MemorySample] = field(default_factory=list)
    warm: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Size and bound of each cache when they should be full."""
    full: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The same at the end."""
    grown: Mapping[str, int] = field(default_factory=dict)
    """Kinds of objects that became more since then."""
    lost: list[str] = field(default_factory=list)
    costs: tuple[float, float] = (0.0, 0.0)
    """US dollars by the replies, and by the ledger."""
    compared_costs: int = 0
    exit_status: int = 0
    tracebacks: int = 0

    @property
    def is_judged(self) -> bool:
        return self.seconds >= SHORTEST

    def memory(self, share: float) -> float:
        """Return the median of resident memory around this share of the time, in bytes."""
        width = WINDOW * self.seconds
        around = share * self.seconds
        near = [one.resident for one in self.samples if abs(one.seconds - around) <= width]
        return statistics.median(near or [one.resident for one in self.samples[-1:]])

    def growth(self) -> float:
        return self.memory(1 - WINDOW) / self.memory(WARM)

    def unfilled(self) -> list[str]:
        """Return the caches that were not full when they should be, and grew."""
        return [
            f"{name}: {self.warm[name][0]:,} of {bound:,}, then {size:,}"
            for name, (size, bound) in self.full.items()
            if name in self.warm
            and not (bound > 0 and self.warm[name][0] >= FULL * bound)
            and size > GROWTH * self.warm[name][0]
        ]

    def faults(self) -> list[str]:
        """Return violations of the guarantees."""
        outcomes = self.outcomes
        found = [f"wrong: {one}" for one in outcomes.wrong]
        found += [f"lost: {one}" for one in self.lost]
        if self.is_judged:
            if self.growth() > GROWTH:
                found.append(f"memory is {self.growth():.3f} of that of the warm gateway")
            found += [f"not filled early: {one}" for one in self.unfilled()]
        if abs(self.costs[0] - self.costs[1]) > ROUNDING * max(1, self.compared_costs):
            found.append(f"the replies cost {self.costs[0]} USD, in the ledger {self.costs[1]}")
        if self.exit_status not in (0, -signal.SIGTERM):
            found.append(f"it ended with the status {self.exit_status}")
        if self.tracebacks:
            found.append(f"{self.tracebacks} tracebacks in its log")
        needed = {
            **{name: outcomes.done[name] for name in ("console", "leave", "metrics", "image_url")},
            "replayed": outcomes.done["replayed"],
            "shown examples": outcomes.done["shown examples"],
            "requests": len(outcomes.requests),
            "costs": self.compared_costs,
            "feedback": len(outcomes.feedback),
            "corrections": len(outcomes.corrections),
            "responses": len(outcomes.responses),
            "lines of batches": outcomes.batches["lines"],
        }
        found += [
            f"no {name}: the soak says nothing about it" for name in needed if not needed[name]
        ]
        return found

    def document(self) -> dict[str, object]:
        outcomes = self.outcomes
        return {
            "seconds": self.seconds,
            "done": dict(outcomes.done),
            "refused": dict(outcomes.refused),
            "batches": dict(outcomes.batches),
            "acknowledged": self.acknowledged(),
            "costs": self.costs,
            "memory": [(one.seconds, one.resident) for one in self.samples],
            "caches": {name: [self.warm.get(name), full] for name, full in self.full.items()},
            "grown": dict(self.grown),
            "faults": self.faults(),
        }

    def acknowledged(self) -> dict[str, int]:
        outcomes = self.outcomes
        return {
            "requests": len(outcomes.requests),
            "costs": self.compared_costs,
            "feedback": len(outcomes.feedback),
            "corrections": len(outcomes.corrections),
            "responses": sum(map(len, outcomes.responses.values())),
            "lines of batches": outcomes.batches["lines"],
            "lost": len(self.lost),
        }

    def text(self) -> str:
        outcomes, lines = (
            self.outcomes,
            [f"{self.seconds:.0f} s", "", "| action | done | refused |"],
        )
        lines.append("|---|---|---|")
        names = {*outcomes.done, *(one.partition(" ")[0] for one in outcomes.refused)}
        for name in sorted(names, key=lambda name: -outcomes.done[name]):
            count = outcomes.done[name]
            refused = [
                f"{times:,} x {one.partition(' ')[2]}"
                for one, times in sorted(outcomes.refused.items())
                if one.partition(" ")[0] == name
            ]
            lines.append(f"| {name} | {count:,} | {', '.join(refused)} |")
        lines += ["", "| share of the time | resident MB | of the warm gateway |", "|---|---|---|"]
        for step in range(1, 7):
            size = self.memory(min(step / 6, 1 - WINDOW))
            lines.append(f"| {step}/6 | {size / 1e6:.1f} | {size / self.memory(WARM):.3f} |")
        lines += ["", "| cache | bound | after a sixth | at the end |", "|---|---|---|---|"]
        for name, (size, bound) in sorted(self.full.items()):
            before = self.warm.get(name, (0, 0))[0]
            lines.append(
                f"| {name} | {f'{bound:,}' if bound > 0 else 'none'} | {before:,} | {size:,} |"
            )
        lines += ["", f"acknowledged: {self.acknowledged()}", f"batches: {dict(outcomes.batches)}"]
        lines.append(f"US dollars by replies and ledger: {self.costs[0]:.6f}, {self.costs[1]:.6f}")
        lines.append(f"objects that became more: {dict(list(self.grown.items())[:12])}")
        lines += [f"FAULT {one}" for one in self.faults()[:30]] or ["no fault"]
        return "\n".join(lines)


class MixedUpstream(FaultyUpstream):
    """The faulty upstream, which also refuses fields, and serves images."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        text = await request.read()
        if REFUSED.encode() in text and b'"small"' in text:
            names = ", ".join(f"'{name}'" for name in SAMPLING)
            error = {"message": f"unsupported values: {names}", "type": "invalid_request_error"}
            return web.json_response({"error": error}, status=400)
        try:
            return await super().answer(request)
        except ConnectionError:  # the gateway left
            return web.Response()

    async def image(self, request: web.Request) -> web.StreamResponse:
        number = int(request.match_info["number"])
        return web.Response(body=image(number).data, content_type="image/png")

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_get("/images/{number:\\d+}.png", self.image)
        return app


class MixedSoak:
    def __init__(self, folder: Path, concurrency: int, seed: int = 0) -> None:
        self._folder, self._concurrency, self._seed = folder, concurrency, seed
        self._port, self._log = free_port(), folder / "gateway.log"
        self._figures, self._upstream_port = folder / "figures.json", 0

    async def run(self, seconds: float, old_requests: int = OLD_REQUESTS) -> MixedReport:
        report = MixedReport(seconds)
        async with self._upstream() as upstream:
            tenants = await asyncio.to_thread(self._prepare, upstream, old_requests)
            gateway = await asyncio.to_thread(self._start)
            try:
                await self._load(gateway, tenants, upstream, report)
            finally:
                report.exit_status = await asyncio.to_thread(gateway.stop, DRAINS)
            again = await asyncio.to_thread(self._start)
            try:
                await self._check_responses(report)
            finally:
                await asyncio.to_thread(again.stop, DRAINS)
        self._check_ledger(report)
        self._check_corrections(report)
        report.tracebacks = self._log.read_text(errors="replace").count("Traceback (most recent")
        return report

    @contextlib.asynccontextmanager
    async def _upstream(self) -> AsyncIterator[str]:
        app = MixedUpstream(self._seed, correct=0.8).app()
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._upstream_port = runner.addresses[0][1]
        try:
            yield f"http://127.0.0.1:{self._upstream_port}"
        finally:
            await runner.cleanup()

    def _prepare(self, upstream: str, old_requests: int) -> list[TenantKey]:
        data = self._folder / "data"
        filled = CONFIG.format(
            port=self._port,
            folder=self._folder,
            upstream=upstream,
            prices={name: list(price) for name, price in PRICES.items()},
            corrections=CORRECTIONS,
            responses=RESPONSES,
        )
        (self._folder / "bottega.toml").write_text(filled)
        options = (*UNLIMITED, "--admin", "--max-namespaces", "1000")
        tenants = [TenantKey(new_key(data, name, name, *options), name) for name in NAMESPACES]
        fill_ledger(data, old_requests)
        store_run(self._folder / "runs" / "animals", 40)
        return tenants

    def _start(self) -> Server:
        command = [sys.executable, "-m", "benchmarks.soak_gateway"]
        command += [str(self._figures), str(self._upstream_port)]
        command += ["serve", "--config", str(self._folder / "bottega.toml")]
        server = start(command, self._port, self._log, {"SOAK_KEY": "none"})
        return await_port(server, STARTS)

    async def _load(
        self, gateway: Server, tenants: Sequence[TenantKey], upstream: str, report: MixedReport
    ) -> None:
        stop, numbers = asyncio.Event(), itertools.count(1_000_000)
        connector, no_cookies = aiohttp.TCPConnector(limit=0), aiohttp.DummyCookieJar()
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(
                timeout=timeout, connector=connector, cookie_jar=no_cookies
            ) as session,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._concurrency):
                client = MixedClient(
                    f"http://127.0.0.1:{self._port}",
                    tenants[number % len(tenants)],
                    f"{upstream}/images",
                    report.outcomes,
                    random.Random(f"{self._seed}/{number}"),
                    numbers,
                    session,
                )
                group.create_task(client.run(stop))
            try:
                await self._watch(gateway, report)
            finally:
                stop.set()

    async def _watch(self, gateway: Server, report: MixedReport) -> None:
        """Sample memory. Read the caches before it is measured for the first time, since reading
        takes memory, when they should be full, and at the end."""
        begun, seconds, pause = time.monotonic(), report.seconds, min(2.0, report.seconds / 120)
        reads = [WARM / 2, WARM + WINDOW]
        objects: Mapping[str, int] = {}
        while (passed := time.monotonic() - begun) < seconds:
            await asyncio.sleep(pause)
            if gateway.process.poll() is not None:
                raise SystemExit(f"the gateway died: {self._log.read_text()[-2000:]}")
            report.samples.append(MemorySample(passed, gateway.resident()))
            if reads and passed > reads[0] * seconds:
                del reads[0]
                report.warm, objects = await self._read_figures()
        report.full, last = await self._read_figures()
        more = {name: count - objects.get(name, 0) for name, count in last.items()}
        report.grown = dict(sorted(more.items(), key=lambda one: -one[1])[:40])

    async def _read_figures(self) -> tuple[Mapping[str, tuple[int, int]], Mapping[str, int]]:
        wanted = self._figures.with_suffix(".wanted")
        wanted.touch()
        for _ in range(600):
            await asyncio.sleep(0.1)
            if not wanted.exists():
                break
        else:
            raise SystemExit(f"no figures: {self._log.read_text()[-2000:]}")
        found = orjson.loads(self._figures.read_bytes())
        return {name: tuple(pair) for name, pair in found["caches"].items()}, found["objects"]

    async def _check_responses(self, report: MixedReport) -> None:
        """Check that each key can read its newest responses. Those that several clients stored at
        the same time may have another order."""
        newest = RESPONSES - self._concurrency
        async with aiohttp.ClientSession() as session:
            for key, ids in report.outcomes.responses.items():
                for id in ids[-newest:]:
                    url = f"http://127.0.0.1:{self._port}/v1/responses/{id}"
                    headers = {"authorization": f"Bearer {key}"}
                    async with session.get(url, headers=headers) as response:
                        text = await response.text()
                        if response.status != 200 or json.loads(text)["id"] != id:
                            report.lost.append(f"response {id}: {response.status} {text}")

    def _check_ledger(self, report: MixedReport) -> None:
        with contextlib.closing(sqlite3.connect(self._folder / "data" / FILE)) as ledger:
            entries = ledger.execute(
                "SELECT request_id, cost_usd FROM gateway_entries WHERE state != 'shadow'"
            )
            costs = dict(entries.fetchall())
            ratings = dict(ledger.execute("SELECT request_id, rating FROM gateway_feedback"))
        said = written = 0.0
        for id, cost in report.outcomes.requests.items():
            if id not in costs:
                report.lost.append(f"request {id}")
            elif cost is not None:
                report.compared_costs += 1
                said, written = said + cost, written + (costs[id] or 0.0)
                if abs(cost - (costs[id] or 0.0)) > ROUNDING:
                    report.lost.append(f"cost of {id}: {cost} USD, in the ledger {costs[id]}")
        report.costs = said, written
        report.lost += [
            f"feedback on {id}: {rating}, stored {ratings.get(id)}"
            for id, rating in report.outcomes.feedback.items()
            if ratings.get(id) != rating
        ]

    def _check_corrections(self, report: MixedReport) -> None:
        for namespace in NAMESPACES:
            file = self._folder / "data" / "cache.db"
            with KnowledgeBase.open(file, None, create=False, namespace=namespace) as cache:
                ids = set(cache.ids())
            report.lost += [
                f"correction {id} in {namespace}"
                for where, id in report.outcomes.corrections
                if where == namespace and id not in ids
            ]
