"""Measure start-up times: python benchmarks/startup.py [--rounds 3]

Prints the CPU time and the elapsed time in seconds, median [lowest, highest] of all rounds, and
whether the median CPU time meets the requirement; exits with 1 if one is missed. Each start is a
process of its own with one thread, and the cases alternate. The imports are floors: the bundled
models need torch; models from the hub also need transformers' modelling code. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file
from benchmarks.processes import BOTTEGA, STARTS, DidNotStartError, free_port, start
from bottega import load_digits
from bottega.cli import GC_THRESHOLD

# Commands change the threshold of the garbage collection too, which saves 0.4 s.
SETUP = f"import gc; gc.set_threshold({GC_THRESHOLD})"
CODES = {
    "Python": "pass",
    "`import torch`": f"{SETUP}; import torch",
    "`import transformers.modeling_utils`": f"{SETUP}; import transformers.modeling_utils",
    "`import bottega`": "import bottega",
}
EXAMPLES = 50
CLASSIFY = f"`bottega classify`, {EXAMPLES} examples and one image"
ANSWERS = "`bottega serve --demo`, until it answers"
REQUIRED = {"`bottega --help`": 0.25, CLASSIFY: 2.5, ANSWERS: 5.0}  # CPU seconds, at most
ROUND = "20 to 30 s"
Seconds = tuple[float, float]  # CPU, elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help=f"rounds after a first one that fills the file cache; each takes {ROUND} (default: 3)",
    )
    rounds = parser.parse_args().rounds
    print(f"{rounds + 1} rounds of {ROUND} each", flush=True)
    measured: dict[str, list[Seconds]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"BOTTEGA_TRACES": "none", "TMPDIR": folder}
        cases = prepared_cases(Path(folder))
        for number in range(rounds + 1):
            for name, measure in cases.items():
                seconds = measure()
                if number:  # the first round fills the file cache
                    measured.setdefault(name, []).append(seconds)
    print("| | CPU | elapsed | required | |\n|---|---|---|---|---|")
    is_missed = False
    for name, times in measured.items():
        cpu, elapsed = zip(*times, strict=True)
        required, verdict = judged(name, cpu)
        is_missed |= verdict == "MISSED"
        print(f"| {name} | {summary(cpu)} | {summary(elapsed)} | {required} | {verdict} |")
    sys.exit(1 if is_missed else 0)


def judged(name: str, cpu: Sequence[float]) -> tuple[str, str]:
    """Return the required CPU time and the verdict, both empty without a requirement."""
    if name not in REQUIRED:
        return "", ""
    required = REQUIRED[name]
    return f"{required:g}", "met" if statistics.median(cpu) <= required else "MISSED"


def prepared_cases(folder: Path) -> dict[str, Callable[[], Seconds]]:
    """Return the measurements by name. The folder gets a small knowledge base of digits."""
    for number, example in zip(range(EXAMPLES), load_digits(), strict=False):
        file = folder / "digits" / example.answer / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(example.query.images[0].data)
    base = str(folder / "k.db")
    until_exit(folder, [*BOTTEGA, "add", base, str(folder / "digits")])
    commands = {
        **{name: [sys.executable, "-c", code] for name, code in CODES.items()},
        "`bottega --help`": [*BOTTEGA, "--help"],
        "`bottega stats`": [*BOTTEGA, "stats", base],
        CLASSIFY: [*BOTTEGA, "classify", base, str(file)],
    }
    served = {
        ANSWERS: "/healthz",
        "`bottega serve --demo`, until the models are loaded": "/readyz",
    }
    return {
        **{name: partial(until_exit, folder, command) for name, command in commands.items()},
        **{name: partial(until_served, folder, path) for name, path in served.items()},
    }


def until_exit(folder: Path, command: Sequence[str]) -> Seconds:
    began = time.perf_counter()
    server = start(command, 0, folder / "log")
    _, status, usage = os.wait4(server.process.pid, 0)
    if status:
        raise subprocess.CalledProcessError(status, command)
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - began


def until_served(folder: Path, path: str) -> Seconds:
    port, began = free_port(), time.perf_counter()
    server = start([*BOTTEGA, "serve", "--demo", "--port", str(port)], port, folder / "log")
    try:
        while time.perf_counter() < began + STARTS:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}{path}"):
                return server.cpu(), time.perf_counter() - began
            time.sleep(0.01)
        raise DidNotStartError(server.log.read_text(errors="replace")[-2000:])
    finally:
        server.stop()


def summary(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} [{min(seconds):.2f}, {max(seconds):.2f}]"


if __name__ == "__main__":
    main()
