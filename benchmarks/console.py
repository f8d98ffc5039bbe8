"""Cost of the console: python benchmarks/console.py [--requests N] [--entries N] [--items N]
[--starts N] [--rounds N] [--at-once N] [--parts pages cpu]

The time of each page of a gateway with 100,000 requests, 20,000 cached entries and an evaluation of
six methods on 2,000 items: the longest load at its first opening after a start, and the median of
five later loads by one client. And the CPU time of gateways with the console, which store no
traces, texts or also images, compared with one without console and traces: all run at the same
time, requests alternate between them, and each ratio compares one round. Equal processes differ by
about 5 %, so the gateways are started several times; the ratio of those that store nothing shows
the remaining error. Stored images fill the page cache, and in a virtual machine the first use of
memory can cost 10 us a page: use most of the memory once before a measurement. One line per bar,
met or MISSED.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from benchmarks.console_data import fill_cache, fill_ledger, store_run
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
    running,
)
from benchmarks.gateway_figures import Figures, Run
from benchmarks.processes import Server, await_ready, free_port, new_key, serve, stopping
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger_schema import FILE

PAGE_SECONDS, CPU_RATIO = 1.0, 1.03
LOADS = 5
RUN = "animals"
PAGES = (
    *("overview?period=24h", "overview?period=30d", "requests", "requests?text=case%2077"),
    *("requests?state=failed", "requests?text=case%2077&state=failed&period=30d"),
    *("playground", "keys"),
    *(
        f"cache?namespace={TEAM}",
        f"cache?namespace={TEAM}&text=case",
        f"knowledge?namespace={TEAM}",
        f"knowledge/map?namespace={TEAM}",
        f"knowledge/duplicates?namespace={TEAM}",
        f"knowledge/wrong-labels?namespace={TEAM}",
    ),
    *(
        "evaluations",
        f"evaluations/run?run={RUN}",
        f"evaluations/items?run={RUN}&text=case%2077",
        f"evaluations/item?run={RUN}&index=7",
        f"evaluations/report?run={RUN}",
    ),
)
STORED = {
    "nothing stored": '\n[traces]\nstore = "none"\n',
    "texts stored": '\n[traces]\nstore = "texts"\nkeep_days = 60.0\n',
    "images stored": '\n[traces]\nstore = "images"\nkeep_days = 60.0\n',
}
WITHOUT = "\n[console]\nenabled = false\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--entries", type=int, default=20_000)
    parser.add_argument("--items", type=int, default=2_000)
    parser.add_argument("--starts", type=int, default=5, help="starts of the gateways (cpu)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds after each start (cpu)")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--parts", nargs="+", default=["pages", "cpu"], choices=["pages", "cpu"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if "pages" in arguments.parts:
            measure_pages(
                Path(name) / "pages", arguments.requests, arguments.entries, arguments.items
            )
        if "cpu" in arguments.parts:
            size = Size(arguments.rounds, (arguments.at_once,), arguments.seconds)
            runs = []
            for start in range(arguments.starts):
                for run in measure_cpu(Path(name) / f"cpu-{start}", size):
                    number = start * arguments.rounds + run.round
                    runs.append(dataclasses.replace(run, round=number))
            show_cpu(Figures(runs))


def measure_pages(folder: Path, requests: int, entries: int, items: int) -> None:
    (folder / "data").mkdir(parents=True)
    fill_ledger(folder / "data", requests)
    fill_cache(folder / "cache.db", entries)
    store_run(folder / "runs" / RUN, items)
    with contextlib.closing(Accounts(folder / "data" / FILE)) as accounts:
        _, key = accounts.add("boss", admin=True)
    more = f'{STORED["images stored"]}\n[console]\nruns = "{folder / "runs"}"\n'
    with contextlib.ExitStack() as stack:
        mock = stack.enter_context(running("mock_upstream", folder))
        for page in PAGES:
            with gateway(folder, mock, more) as server:
                await_ready(server)
                client = logged_in(server, key)
                start = time.perf_counter()
                first = max(load_until_complete(client, f"{server.url}/ui/{page}"))
                whole = time.perf_counter() - start
                times = [load(client, f"{server.url}/ui/{page}")[0] for _ in range(LOADS)]
            verdict = "met" if max(first, *times) < PAGE_SECONDS else "MISSED"
            print(
                f"/ui/{page}: first {first:.3f} s (complete after {whole:.2f} s),"
                f" then {statistics.median(times):.3f} s < {PAGE_SECONDS:g} s: {verdict}"
            )


def logged_in(server: Server, key: str) -> urllib.request.OpenerDirector:
    client = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    same_origin = {"Sec-Fetch-Site": "same-origin"}
    form = urlencode({"key": key}).encode()
    client.open(urllib.request.Request(f"{server.url}/ui/login", form, same_origin)).read()
    return client


def load_until_complete(client: urllib.request.OpenerDirector, url: str) -> Iterator[float]:
    """Yield the seconds of each load, until the page does not ask to be loaded again."""
    pause: int | None = 0
    while pause is not None:
        time.sleep(pause)
        seconds, pause = load(client, url)
        yield seconds


def load(client: urllib.request.OpenerDirector, url: str) -> tuple[float, int | None]:
    """Return the seconds of a load, and after how many the page asks to be loaded again."""
    start = time.perf_counter()
    with client.open(url) as reply:
        reply.read()
        pause = reply.headers.get("refresh")
    return time.perf_counter() - start, None if pause is None else int(pause)


@contextlib.contextmanager
def gateway(folder: Path, mock: Server, more: str) -> Iterator[Server]:
    port, config = free_port(), folder / "bottega.toml"
    text = CONFIG.format(port=port, folder=folder, upstream=f"{mock.url}/v1")
    config.write_text(text + more)
    with stopping(serve(config, port, folder / "log", {"BENCH_KEY": "none"})) as server:
        yield server


def measure_cpu(folder: Path, size: Size) -> list[Run]:
    """Return the runs of one start of the gateways."""
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
        return list(bench.rounds(size, size.rounds))


def show_cpu(figures: Figures) -> None:
    print(*figures.rows(), sep="\n")
    for name in (PASSED, AUGMENTED):
        for kind in STORED:
            title = f"{name}: console, {kind} / without"
            print(*figures.ratio(title, f"{name}, {kind}", f"{name}, off", CPU_RATIO), sep="\n")


if __name__ == "__main__":
    main()
