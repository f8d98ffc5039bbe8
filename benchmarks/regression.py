"""Compare quick benchmarks with recorded ratios (make bench): python -m benchmarks.regression
[--record] [--only NAME ...] [--runs N]

Each benchmark runs in its quick form, on one thread, and prints ratios to a peer or a floor.
`--record` stores the lowest, the median and the highest of its runs in recorded_ratios.json, by
processor. Later calls print each ratio and exit with 1 if one is worse than all recorded ones by
more than their range (at least 5 %; recall: 0.005), if a recorded one is no longer measured, or if
no ratios are recorded. Ratios with a range above 25 % of their median are not judged. Missed
requirements are printed but do not change the exit status. A busy machine widens every range:
record on a quiet one.
"""

from __future__ import annotations

import argparse
import json
import os
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
LEAST_NOISE, MOST_NOISE, RECALL_NOISE = 0.05, 0.25, 0.005
"""The first two are shares of the median."""

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Ratio:
    """Ratio of one run; `bar` is the value that the benchmark requires."""

    name: str
    value: float
    at_least: bool
    bar: float | None = None


@dataclass(frozen=True)
class Recorded:
    """Lowest, median and highest value of a ratio over several runs."""

    low: float
    median: float
    high: float
    at_least: bool

    @classmethod
    def of(cls, ratios: Sequence[Ratio]) -> Recorded:
        values = [one.value for one in ratios]
        median = statistics.median(values)
        return cls(min(values), median, max(values), ratios[0].at_least)

    def is_recall(self, name: str) -> bool:
        return "recall" in name and self.high <= 1

    def exemption(self, name: str) -> str:
        """Return why this ratio is never a regression; empty if it can be one."""
        if "p99 / p50" in name or name.startswith("longest "):
            return "information only"
        if self.high - self.low > MOST_NOISE * self.median and not self.is_recall(name):
            return "too noisy to judge"
        return ""

    def limit(self, name: str) -> float:
        """Return the worst value that is not a regression."""
        noise = max(self.high - self.low, LEAST_NOISE * self.median)
        if self.is_recall(name):
            noise = RECALL_NOISE
        return self.low - noise if self.at_least else self.high + noise

    def is_worse(self, name: str, value: float) -> bool:
        return value < self.limit(name) if self.at_least else value > self.limit(name)


def of_gateway(document: Document) -> Iterator[Ratio]:
    for bar in document["bars"]:
        name = f"{bar['name']}, {bar['body']}, {bar['concurrency']} at once"
        yield Ratio(name, bar["value"]["median"], bar["at_least"], bar["bar"])


def of_stores(document: Document) -> Iterator[Ratio]:
    for ratio in document["ratios"]:
        if not ratio["name"].endswith(", ms"):  # a time of this machine
            yield Ratio(ratio["name"], ratio["value"], ratio["at_least"], ratio["bar"])


def of_late_interaction(document: Document) -> Iterator[Ratio]:
    for line in document["lines"]:
        if "skipped" not in line:
            yield Ratio(line["name"], line["value"], line["at_least"], line["bar"])


def of_racc(document: Document) -> Iterator[Ratio]:
    values = {f"concatenation / {line['name']}": line["faster"] for line in document["lines"]}
    values |= {bar["name"]: bar["value"] for bar in document["bars"]}
    bars = {bar["name"]: bar["bar"] for bar in document["bars"]}
    for name, value in values.items():
        yield Ratio(name, value, True, bars.get(name))


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
    parser.add_argument(
        "--only",
        nargs="+",
        choices=BENCHMARKS,
        default=list(BENCHMARKS),
        help="benchmarks to run (default: all)",
    )
    parser.add_argument(
        "--runs", type=int, help="runs of each benchmark (default: 1, or 3 with --record)"
    )
    options = parser.parse_args()
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    here = recorded.setdefault(processor(), {})
    unrecorded = [name for name in options.only if not here.get(name)]
    if unrecorded and not options.record:
        sys.exit(
            f"no ratios of {', '.join(unrecorded)} are recorded for {processor()};"
            " record them with --record"
        )
    runs = options.runs or (3 if options.record else 1)
    failures: list[str] = []
    worse: list[str] = []
    show_load("before")
    for name in options.only:
        ratios = measure(name, runs)
        measured = {ratio: Recorded.of(values) for ratio, values in ratios.items()}
        if options.record:
            here[name] = {ratio: asdict(one) for ratio, one in measured.items()}
            RECORD.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
        else:
            found = list(compared(name, measured, here[name]))
            failures += found
            worse += [name] if any(line.startswith("WORSE") for line in found) else []
        for line in missed(name, ratios):
            print(line)
    show_load("after")
    if options.record:
        print(f"recorded in {RECORD.name}")
    else:
        print(*failures, sep="\n") if failures else print("no ratio is worse than recorded")
    if worse:
        print(f"repeat with --only {' '.join(worse)} --runs 3 on a quiet machine")
    sys.exit(1 if failures else 0)


def processor() -> str:
    """Return the instruction set, which most ratios depend on."""
    vnni = "vnni" if torch.cpu._is_vnni_supported() else "no vnni"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {vnni}"


def show_load(when: str) -> None:
    print(f"load average {when} the measurements: {os.getloadavg()[0]:.2f}", flush=True)


def measure(name: str, runs: int) -> dict[str, list[Ratio]]:
    """Return the ratios of all runs by their name."""
    found: dict[str, list[Ratio]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        for number in range(runs):
            print(f"{name}, run {number + 1} of {runs}", flush=True)
            command = [sys.executable, f"benchmarks/{name}.py", "--quick", "--json", str(file)]
            # They exit with 1 for a missed requirement, with complete results.
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            if not file.exists():
                raise SystemExit(f"{name} failed:\n{done.stdout}{done.stderr}")
            ratios = list(BENCHMARKS[name](json.loads(file.read_text())))
            if not ratios:
                raise SystemExit(f"{name} reported no ratios:\n{done.stdout}{done.stderr}")
            for ratio in ratios:
                found[ratio.name].append(ratio)
            file.unlink()
    return found


def compared(
    name: str, measured: Mapping[str, Recorded], recorded: Mapping[str, Document]
) -> Iterator[str]:
    """Print every ratio, and yield a line for each that is worse than recorded or no longer
    measured.
    """
    for ratio, now in measured.items():
        if ratio not in recorded:
            print(f"{name}: {ratio}: {now.median:.3g}, not recorded")
            continue
        before = Recorded(**recorded[ratio])
        exemption = before.exemption(ratio)
        line = (
            f"{name}: {ratio}: {now.median:.3g}, recorded {before.median:.3g}"
            f" ({before.low:.3g} to {before.high:.3g}),"
            f" {exemption or f'limit {before.limit(ratio):.3g}'}"
        )
        print(line)
        if not exemption and before.is_worse(ratio, now.median):
            yield f"WORSE {line}"
    for ratio in sorted(recorded.keys() - measured.keys()):
        yield f"NOT MEASURED {name}: {ratio}: recorded earlier; record again with --record"


def missed(name: str, ratios: Mapping[str, Sequence[Ratio]]) -> Iterator[str]:
    """Yield a line for each requirement that the median of the runs misses."""
    for ratio, values in ratios.items():
        bar, now = values[0].bar, Recorded.of(values)
        if bar is None:
            continue
        if now.median < bar if now.at_least else now.median > bar:
            required = f"at {'least' if now.at_least else 'most'} {bar:g}"
            yield f"missed requirement: {name}: {ratio}: {now.median:.3g}, required {required}"


if __name__ == "__main__":
    main()
