"""Cost of the console: python benchmarks/console.py [--requests N] [--entries N] [--rounds N]
[--parts pages cpu]

The time of each page of a gateway with 100,000 requests and 20,000 cached entries (median of five
loads by one client), and the CPU time of gateways with the console and stored traces, compared with
one without both: all run at the same time, requests alternate between them, and each ratio compares
one round. One line per bar, held or MISSED.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.parse import urlencode

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from benchmarks.gateway import Bench, Size
from benchmarks.gateway_bodies import image_body, text_body
from benchmarks.gateway_cases import (
    AUGMENTED,
    CONFIG,
    PASSED,
    TEAM,
    Case,
    cases,
    fill,
    question,
    running,
)
from benchmarks.gateway_figures import Figures
from benchmarks.processes import Server, free_port, new_key, serve, stopping
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.database import FILE
from bottega.gateway.accounting.ledger import Entry, Ledger
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.recording import TraceStore
from bottega.types import Answer, Completion, Example, Message, Prompt, Query, Reply, Trace, Usage

PAGE_SECONDS, CPU_RATIO = 1.0, 1.03
LOADS = 5
PERIOD = 30 * 86_400
LABELS = ("tabby", "pug", "parrot", "goldfish")
PAGES = (
    *("overview?period=24h", "overview?period=30d", "requests", "requests?text=case%2077"),
    *("requests?state=failed", "playground", "keys"),
    *(
        f"cache?namespace={TEAM}",
        f"cache?namespace={TEAM}&text=case",
        f"knowledge?namespace={TEAM}",
    ),
)
STORED = {
    "texts stored": '\n[traces]\nstore = "texts"\nkeep_days = 60.0\n',
    "images stored": '\n[traces]\nstore = "images"\nkeep_days = 60.0\n',
}
WITHOUT = "\n[console]\nenabled = false\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--entries", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--parts", nargs="+", default=["pages", "cpu"], choices=["pages", "cpu"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if "pages" in arguments.parts:
            measure_pages(Path(name) / "pages", arguments.requests, arguments.entries)
        if "cpu" in arguments.parts:
            measure_cpu(Path(name) / "cpu", arguments.rounds, arguments.seconds)


def measure_pages(folder: Path, requests: int, entries: int) -> None:
    (folder / "data").mkdir(parents=True)
    fill_ledger(folder / "data", requests)
    fill_cache(folder / "cache.db", entries)
    with contextlib.closing(Accounts(folder / "data" / FILE)) as accounts:
        _, key = accounts.add("boss", admin=True)
    with contextlib.ExitStack() as stack:
        mock = stack.enter_context(running("mock_upstream", folder))
        server = stack.enter_context(gateway(folder, mock, STORED["images stored"]))
        client = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        same_origin = {"Sec-Fetch-Site": "same-origin"}
        form = urlencode({"key": key}).encode()
        client.open(urllib.request.Request(f"{server.url}/ui/login", form, same_origin)).read()
        for page in PAGES:
            seconds = statistics.median(load(client, f"{server.url}/ui/{page}"))
            held = "held" if seconds < PAGE_SECONDS else "MISSED"
            print(f"/ui/{page}: {seconds:.3f} s < {PAGE_SECONDS:g} s: {held}")


def load(client: urllib.request.OpenerDirector, url: str) -> Iterator[float]:
    for _ in range(LOADS):
        start = time.perf_counter()
        with client.open(url) as reply:
            reply.read()
        yield time.perf_counter() - start


def fill_ledger(data: Path, requests: int) -> None:
    """Fill the ledger and the traces with requests of the last 30 days."""
    rng = np.random.default_rng(0)
    now = time.time()
    moments = np.sort(now - rng.random(requests) * PERIOD)
    states = rng.choice(["answered", "replayed", "failed"], requests, p=[0.8, 0.17, 0.03])
    is_master = rng.random(requests) < 0.2
    with contextlib.closing(Ledger(data / FILE)) as ledger:
        ledger.set_master("master")
        for i, moment in enumerate(moments):
            state = str(states[i])
            ledger.record(
                Entry(
                    float(moment),
                    f"req_{i:032x}",
                    "",
                    TEAM,
                    "master" if is_master[i] else "apprentice",
                    "mock",
                    state,  # type: ignore[arg-type]
                    shots=0 if is_master[i] else 2,
                    similarity=float(rng.random()),
                    prompt_tokens=300,
                    completion_tokens=20,
                    cost_usd=float(rng.random()) * 1e-3 if state == "answered" else 0.0,
                    seconds=float(rng.lognormal(-1, 0.5)),
                    status=502 if state == "failed" else 200,
                )
            )
            if i % 5_000 == 0:
                ledger.flush()
    with contextlib.closing(TraceStore.open(data / "traces.db")) as traces:
        for start in range(0, requests, 2_000):
            batch = [
                trace(i, float(moments[i])) for i in range(start, min(start + 2_000, requests))
            ]
            traces.write(batch, namespace=TEAM)


def trace(number: int, moment: float) -> Trace:
    query = Query(f"Case {number}: what is on the left side of this picture?")
    text = f"A {LABELS[number % len(LABELS)]}, and it is brown."
    reply = Reply("mock", (Completion(text),), Usage(300, 20))
    prompt = Prompt((Message("user", (query.text,)),))
    return Trace(
        id=f"req_{number:032x}",
        time=moment,
        query=query,
        tier="apprentice",
        candidates=(),
        prompt=prompt,
        reply=reply,
        answer=Answer(text),
        seconds=0.4,
        cost_usd=1e-4,
    )


def fill_cache(file: Path, entries: int) -> None:
    rng = np.random.default_rng(0)
    with KnowledgeBase.open(file, PixelEmbedder(), namespace=TEAM) as cache:
        cache.add(
            Example(question(number, rng), LABELS[number % len(LABELS)])
            for number in range(entries)
        )


@contextlib.contextmanager
def gateway(folder: Path, mock: Server, more: str) -> Iterator[Server]:
    port, config = free_port(), folder / "bottega.toml"
    text = CONFIG.format(port=port, folder=folder, upstream=f"{mock.url}/v1")
    config.write_text(text + more)
    with stopping(serve(config, port, folder / "log", {"BENCH_KEY": "none"})) as server:
        yield server


def measure_cpu(folder: Path, rounds: int, seconds: float) -> None:
    with contextlib.ExitStack() as stack:
        folder.mkdir()
        mock = stack.enter_context(running("mock_upstream", folder))
        found: list[Case] = []
        for name, more in (("off", WITHOUT), *STORED.items()):
            own = folder / name.replace(" ", "-")
            own.mkdir()
            key = new_key(own / "data", "bench", TEAM, "--tiers", "*", "--max-concurrent", "256")
            fill(own / "cache.db")
            server = stack.enter_context(gateway(own, mock, more))
            found += [
                dataclasses.replace(one, name=f"{one.name}, {name}")
                for one in cases(server, key)
                if one.name in (PASSED, AUGMENTED)
            ]
        bench = stack.enter_context(Bench.ready(folder, found, [text_body(), image_body()]))
        runs = list(bench.rounds(Size(rounds, (16,), seconds), rounds))
    figures = Figures(runs)
    print(*figures.rows(), sep="\n")
    for name in (PASSED, AUGMENTED):
        for kind in STORED:
            title = f"{name}: console, {kind} / without"
            print(*figures.ratio(title, f"{name}, {kind}", f"{name}, off", CPU_RATIO), sep="\n")


if __name__ == "__main__":
    main()
