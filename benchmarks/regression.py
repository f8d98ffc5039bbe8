"""Compare the quick benchmarks with recorded ratios: python -m benchmarks.regression [--record]
[--only NAME ...] [--runs N]

Each benchmark runs in its quick form and prints ratios to a peer or a floor. `--record` stores the
lowest, the median and the highest of its runs in recorded_ratios.json, by processor. Later calls
print each ratio and exit with 1 if one is worse than all recorded ones by more than their range (at
least 5 %). A busy machine widens every range: record on a quiet one.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_name("recorded_ratios.json")
LEAST_NOISE = 0.05

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Ratio:
    name: str
    value: float
    at_least: bool


@dataclass(frozen=True)
class Recorded:
    """Ratios of several runs."""

    low: float
    median: float
    high: float
    at_least: bool

    @classmethod
    def of(cls, ratios: Sequence[Ratio]) -> Recorded:
        values = [one.value for one in ratios]
        median = statistics.median(values)
        return cls(min(values), median, max(values), ratios[0].at_least)

    def limit(self) -> float:
        """Return the worst value that is not a regression."""
        noise = max(self.high - self.low, LEAST_NOISE * self.median)
        return self.low - noise if self.at_least else self.high + noise

    def is_worse(self, value: float) -> bool:
        return value < self.limit() if self.at_least else value > self.limit()


def of_gateway(document: Document) -> Iterator[Ratio]:
    for bar in document["bars"]:
        name = f"{bar['name']}, {bar['body']}, {bar['concurrency']} at once"
        yield Ratio(name, bar["value"]["median"], bar["at_least"])


def of_stores(document: Document) -> Iterator[Ratio]:
    for ratio in document["ratios"]:
        if not ratio["name"].endswith(", ms"):  # a time of this machine
            yield Ratio(ratio["name"], ratio["value"], ratio["at_least"])


def of_late_interaction(document: Document) -> Iterator[Ratio]:
    for line in document["lines"]:
        if isinstance(line["value"], float):  # a string if the peer is missing
            yield Ratio(line["name"], line["value"], "raw forward" not in line["name"])


def of_racc(document: Document) -> Iterator[Ratio]:
    for line in document["lines"]:
        yield Ratio(f"concatenation / {line['name']}", line["faster"], True)


BENCHMARKS: Mapping[str, Callable[[Document], Iterator[Ratio]]] = {
    "gateway": of_gateway,
    "late_interaction": of_late_interaction,
    "racc": of_racc,
    "stores": of_stores,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--record", action="store_true", help="record the ratios, in place of earlier ones"
    )
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--runs", type=int, help="runs of each benchmark: 1, or 3 with --record")
    options = parser.parse_args()
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    here = recorded.setdefault(processor(), {})
    runs = options.runs or (3 if options.record else 1)
    worse: list[str] = []
    for name in options.only:
        measured = measure(name, runs)
        if options.record:
            here[name] = {ratio: asdict(one) for ratio, one in measured.items()}
            RECORD.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
        elif name not in here:
            print(f"{name}: no ratios of {processor()} are recorded; add --record")
        else:
            worse += compared(name, measured, here[name])
    print(*worse, sep="\n") if worse else print("no ratio is worse than recorded")
    sys.exit(1 if worse else 0)


def processor() -> str:
    """Return the instruction set, which most ratios depend on, and the number of threads."""
    vnni = "vnni" if torch.cpu._is_vnni_supported() else "no vnni"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {capability} {vnni}, {torch.get_num_threads()} threads"


def measure(name: str, runs: int) -> dict[str, Recorded]:
    found: dict[str, list[Ratio]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        for number in range(runs):
            print(f"{name}, run {number + 1} of {runs}", flush=True)
            command = [sys.executable, f"benchmarks/{name}.py", "--quick", "--json", str(file)]
            # Some exit with 1 for a missed limit, with complete results.
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if not file.exists():
                raise SystemExit(f"{name} failed:\n{done.stdout}{done.stderr}")
            ratios = list(BENCHMARKS[name](json.loads(file.read_text())))
            if not ratios:
                raise SystemExit(f"{name} gave no ratios:\n{done.stdout}{done.stderr}")
            for ratio in ratios:
                found[ratio.name].append(ratio)
            file.unlink()
    return {ratio: Recorded.of(values) for ratio, values in found.items()}


def compared(
    name: str, measured: Mapping[str, Recorded], recorded: Mapping[str, Document]
) -> Iterator[str]:
    """Print every ratio, and yield a line for each that is worse than recorded."""
    for ratio, now in measured.items():
        if ratio not in recorded:
            print(f"{name}: {ratio}: {now.median:.3g}, not recorded")
            continue
        before = Recorded(**recorded[ratio])
        line = (
            f"{name}: {ratio}: {now.median:.3g}, recorded {before.median:.3g}"
            f" ({before.low:.3g} to {before.high:.3g}), limit {before.limit():.3g}"
        )
        print(line)
        if before.is_worse(now.median):
            yield f"WORSE {line}"


if __name__ == "__main__":
    main()
