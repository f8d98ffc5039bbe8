"""Cache-of-Thought with the bundled models: python -m benchmarks.cache_of_thought [--quick]

Runs the commands of tables 1 to 3 (retrieval, shots, half of the cache) and figures 5 to 7
(streams) of the paper on handwriting and on synthetic scenes, then `bottega report`. A second call
resumes. docs/experiments/cache_of_thought.md explains the results.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

RETRIEVE = ("image", "dual", "crossed", "probe", "hashtag", "keyword-hashtag")
RATES = "0.1,0.3,0.5,0.7,0.9"
MASTER = "bundled:master"


@dataclass(frozen=True)
class Task:
    """Benchmark with the number of its items, shots of the tables, and retrieval of its streams."""

    name: str
    spec: str
    items: int
    shots: str
    streamed_items: int
    stream: tuple[str, ...]


TASKS = (
    Task("digits", "digits:half=second", 500, "1,4", 300, ("--start", "none,cold,warm")),
    Task(
        *("scenes", "attributes:words=plain", 200, "1,4,8", 150),
        (
            *("--start", "none,warm", "--retrieve", "dual,hashtag", "--shots", "4"),
            *("--controls", "no-cache,random"),
        ),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="40 items, one order of the streams")
    parser.add_argument("--out", type=Path, default=Path("build/cache-of-thought"))
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    for command in commands(quick=chosen.quick):
        print("bottega", *command, flush=True)
        program = [sys.executable, "-m", "bottega", *command]
        subprocess.run(program, cwd=chosen.out, check=True)


def commands(*, quick: bool) -> Iterator[Sequence[str]]:
    """Yield the commands in order."""
    for task in TASKS:
        answers, items = f"{task.name}.db", str(40 if quick else task.items)
        yield "answer", answers, task.spec, "--model", MASTER
        shared = ("--limit", items, "--traces", "none")
        out = f"{task.name}-master"
        yield (
            *("eval", task.spec, *shared),
            *("--model", MASTER, "--methods", "zero-shot", "--out", out),
        )
        for share in ("1", "0.5"):
            for retrieve in RETRIEVE:
                out = f"{task.name}-{retrieve}-{share}"
                yield (
                    *("eval", task.spec, *shared, "--answers-from", answers, "--kb-share", share),
                    *("--retrieve", retrieve, "--methods", "zero-shot,random,top-k,knn"),
                    *("--shots", task.shots, "--out", out),
                )
        streamed = str(40 if quick else task.streamed_items)
        yield (
            *("stream", task.spec, "--master", MASTER, "--apprentice", "bundled", *task.stream),
            *("--answers", answers, "--master-rate", RATES, "--orders", "1" if quick else "3"),
            *("--limit", streamed, "--out", f"{task.name}-streams"),
        )
        yield "report", f"{task.name}-streams"


if __name__ == "__main__":
    main()
