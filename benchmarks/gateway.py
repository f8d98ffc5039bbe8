"""Compare the gateway with its peers: python benchmarks/gateway.py [--quick] [--json FILE]
[--litellm-python PATH/TO/python] [--tensorzero-python PATH/TO/python] [--portkey FOLDER]

Measures CPU time per request of the server processes and client latency, beside a bare Starlette
server (the floor), a bare proxy of Starlette and aiohttp, and the peers of gateway_peers.py, each
in its own environment. The floor of a request with an image and examples is to hash, decode and
embed the image, in this process. All servers run at the same time on loopback, with one worker
each, before an upstream that answers immediately. Requests alternate between servers, and each
ratio compares one round. --quick ends within 90 s. Exits with 1 if a requirement is missed. Shared
state is measured by benchmarks/gateway_state.py, several workers by gateway_workers.py.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from benchmarks.gateway_bodies import Body, image_body, photograph, text_body
from benchmarks.gateway_cases import (
    AUGMENTED,
    PASSED,
    REPEATED,
    Case,
    ours,
)
from benchmarks.gateway_figures import Bar, Figures, Run
from benchmarks.gateway_load import LoadResult, Work
from benchmarks.gateway_peers import (
    BARE,
    FLOOR,
    LITELLM,
    PORTKEY,
    TENSORZERO,
    Environments,
    peers,
)
from benchmarks.peers.mock_upstream import TEXT
from benchmarks.processes import ROOT
from bottega.image import Image
from bottega.knowledge import PixelEmbedder
from bottega.types import Query

EMBEDDED = "hash, decode, embed"
WARM, IDLE = 30, 2.0
MOST = 200_000


@dataclass(frozen=True)
class Size:
    rounds: int
    concurrencies: tuple[int, ...]
    seconds: float
    pause: float = 0.0
    """Seconds between two requests of a single client."""


QUICK = Size(rounds=2, concurrencies=(1, 16), seconds=0.6)
FULL = Size(rounds=5, concurrencies=(1, 16, 64), seconds=3.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="fewer, shorter rounds: 90 s (default: full)"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file (default: none)")
    left_out = "(default: the peer is left out)"
    parser.add_argument(
        "--litellm-python", type=Path, help=f"Python of an environment with LiteLLM {left_out}"
    )
    parser.add_argument(
        "--tensorzero-python",
        type=Path,
        help=f"Python of an environment with TensorZero {left_out}",
    )
    parser.add_argument("--portkey", type=Path, help=f"folder with Portkey's package {left_out}")
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"rounds of all cases (default: {FULL.rounds}, or {QUICK.rounds} with --quick)",
    )
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    rounds = arguments.rounds or size.rounds
    installed = Environments(
        arguments.litellm_python, arguments.tensorzero_python, arguments.portkey
    )
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        mock, cases, skipped = stack.enter_context(peers(folder, installed))
        cases += stack.enter_context(ours(folder, mock))
        for one in skipped:
            print(f"{one.name} is left out: {one.reason}")
        bench = stack.enter_context(Bench.ready(folder, cases, [text_body(), image_body()]))
        runs = list(bench.rounds(size, rounds))
    figures = Figures(runs)
    print(*figures.rows(), sep="\n")
    bars = list(judged(figures))
    print(*bars, sep="\n")
    if arguments.json:
        document = {
            "size": asdict(size) | {"rounds": rounds},
            "cores": os.cpu_count(),
            "skipped": [asdict(one) for one in skipped],
            "runs": [asdict(run) for run in runs],
            "bars": [bar.document() for bar in bars],
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    sys.exit(1 if any(bar.met is False for bar in bars) else 0)


def judged(figures: Figures) -> Iterator[Bar]:
    yield from figures.ratio(f"{PASSED} / bare proxy", PASSED, BARE, 1.3)
    yield from figures.ratio(f"{REPEATED} / floor", REPEATED, FLOOR, 1.4)
    yield from figures.ratio(f"LiteLLM / {PASSED}", LITELLM, PASSED, 25, at_least=True)
    yield from figures.ratio(f"{PASSED} / TensorZero", PASSED, TENSORZERO, 1.2)
    yield from figures.ratio(f"Portkey / {PASSED}", PORTKEY, PASSED, None)
    yield from figures.ratio("LiteLLM / bare proxy", LITELLM, BARE, None)
    yield from figures.ratio(f"{AUGMENTED} / bare proxy", AUGMENTED, BARE, None)
    yield from figures.ratio(f"{AUGMENTED} / {EMBEDDED}", AUGMENTED, EMBEDDED, 2)
    for case in (PASSED, REPEATED, AUGMENTED):
        yield from figures.outliers(case)


class Bench:
    """Load process, and the servers' CPU before and after it."""

    def __init__(
        self,
        load: subprocess.Popen[str],
        folder: Path,
        cases: Sequence[Case],
        bodies: Sequence[Body],
    ) -> None:
        self._load, self._folder, self._cases, self._bodies = load, folder, cases, bodies
        self._numbers = itertools.count(step=MOST)
        self._idle: dict[str, float] = {}

    @classmethod
    @contextlib.contextmanager
    def ready(cls, folder: Path, cases: Sequence[Case], bodies: Sequence[Body]) -> Iterator[Bench]:
        """Warm up the servers and measure their idle CPU."""
        with subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gateway_load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
        ) as load:
            assert load.stdin is not None
            bench = cls(load, folder, cases, bodies)
            bench._warm()
            yield bench
            load.stdin.close()

    def rounds(self, size: Size, rounds: int) -> Iterator[Run]:
        for number in range(rounds):
            for body, concurrency in itertools.product(self._bodies, size.concurrencies):
                for case in self._cases:
                    if body.name in case.bodies:
                        yield self._run(number, case, body, concurrency, size)
                if body.name == "image":
                    yield embedding(number, concurrency, size.seconds)

    def _warm(self) -> None:
        for case, body in itertools.product(self._cases, self._bodies):
            if body.name not in case.bodies:
                continue
            seen = self._drive(case, body, 1, 30.0, WARM)
            if seen.errors:
                raise SystemExit(f"{case.name} does not answer {body.name}: {seen.example}")
        before = [case.server.cpu() for case in self._cases]
        time.sleep(IDLE)
        for case, cpu in zip(self._cases, before, strict=True):
            self._idle[case.name] = (case.server.cpu() - cpu) / IDLE

    def _run(self, number: int, case: Case, body: Body, concurrency: int, size: Size) -> Run:
        start, cpu = time.perf_counter(), case.server.cpu()
        pause = size.pause if concurrency == 1 else 0.0
        seen = self._drive(case, body, concurrency, size.seconds, MOST, pause)
        time.sleep(case.settles)
        idle = self._idle[case.name] * (time.perf_counter() - start)
        cpu = case.server.cpu() - cpu - idle
        if seen.errors:
            print(f"{case.name}, {body.name}: {seen.example}", file=sys.stderr)
        return Run(
            round=number,
            case=case.name,
            body=body.name,
            concurrency=concurrency,
            requests=seen.done,
            errors=seen.errors,
            cpu=cpu * 1000 / max(seen.done, 1),
            rate=seen.done / seen.seconds,
            p50=seen.p50 * 1000,
            p99=seen.p99 * 1000,
            longest=seen.longest * 1000,
        )

    def _drive(
        self,
        case: Case,
        body: Body,
        concurrency: int,
        seconds: float,
        most: int,
        pause: float = 0.0,
    ) -> LoadResult:
        path, slots = body.written(self._folder, case.model, {})
        work = Work(
            port=case.server.port,
            headers=case.sent,
            body=path,
            slots=tuple(slots),
            variants=case.variants,
            first=next(self._numbers),
            concurrency=concurrency,
            seconds=seconds,
            most=most,
            expected=TEXT.strip(),
            path=case.path,
            pause=pause,
        )
        assert self._load.stdin is not None and self._load.stdout is not None
        self._load.stdin.write(json.dumps(asdict(work)) + "\n")
        return LoadResult(**json.loads(self._load.stdout.readline()))


def embedding(number: int, concurrency: int, seconds: float) -> Run:
    """Measure hashing, decoding and embedding the image of `image_body`, one at a time."""
    data, embedder = photograph(), PixelEmbedder()

    def embed() -> None:
        embedder.embed([Query("", (Image.from_bytes(data),))])

    for _ in range(WARM):
        embed()
    took: list[float] = []
    cpu, end = time.process_time(), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        embed()
        took.append(time.perf_counter() - start)
    cpu = (time.process_time() - cpu) * 1000 / len(took)
    p50, p99 = np.percentile(took, [50, 99])
    return Run(
        round=number,
        case=EMBEDDED,
        body="image",
        concurrency=concurrency,
        requests=len(took),
        errors=0,
        cpu=cpu,
        rate=len(took) / sum(took),
        p50=float(p50) * 1000,
        p99=float(p99) * 1000,
        longest=max(took) * 1000,
    )


if __name__ == "__main__":
    main()
