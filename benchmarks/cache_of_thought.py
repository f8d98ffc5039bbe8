"""Cache-of-Thought with the bundled models: python -m benchmarks.cache_of_thought [--quick]

Runs the commands of tables 1 to 3 (retrieval, shots, half of the cache) and of figures 4 (groups)
to 7 (streams) of the paper on handwriting and on synthetic scenes, then eviction under drift and
`bottega report`. A second call resumes. docs/experiments/cache_of_thought.md explains the results.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

RETRIEVE = ("image", "dual", "crossed", "probe", "hashtag", "keyword-hashtag")
GROUPS = ("2", "5", "10", "20", "50")
RATES = "0.1,0.3,0.5,0.7,0.9"
MASTER = "bundled:master"


@dataclass(frozen=True)
class Task:
    """Benchmark with the number of its items, shots of the tables, and options of its streams.

    `dense` is the retrieval without groups that the tree is compared with.
    """

    name: str
    spec: str
    items: int
    shots: str
    streamed_items: int
    stream: tuple[str, ...]
    dense: str
    drift: tuple[str, ...]


TASKS = (
    Task(
        *("digits", "digits:half=second", 500, "1,4", 300),
        ("--start", "none,cold,warm"),
        "image",
        ("--phases", "5", "--capacity", "20"),
    ),
    Task(
        *("scenes", "attributes:words=plain", 200, "1,4,8", 150),
        (
            *("--start", "none,cold,warm", "--retrieve", "dual,hashtag", "--shots", "4"),
            *("--controls", "no-cache,random"),
        ),
        "dual",
        ("--retrieve", "dual", "--shots", "4", "--phases", "5", "--capacity", "20"),
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
        for groups in GROUPS:
            yield (
                *("eval", task.spec, *shared, "--answers-from", answers, "--retrieve", "hashtag"),
                *("--groups", groups, "--methods", "top-k", "--shots", task.shots),
                *("--out", f"{task.name}-{groups}-groups"),
            )
        orders = "2" if quick else "3"
        limit = ("--limit", str(40 if quick else task.streamed_items))
        models = ("--master", MASTER, "--apprentice", "bundled")
        streamed = ("stream", task.spec, *models, *limit)
        started = (*streamed, "--answers", answers)
        yield (
            *(*started, "--master-rate", RATES, "--orders", orders, *task.stream),
            *("--out", f"{task.name}-streams"),
        )
        tree = ("--start", "cold", "--shots", "4")
        for groups, options in (("adaptive", ()), ("fixed", ("--groups", "10"))):
            yield (
                *(*started, "--master-rate", "0.1,0.3,0.5", "--orders", orders, *tree),
                *("--retrieve", f"{task.dense},hashtag", "--controls", "no-cache", *options),
                *("--out", f"{task.name}-{groups}-tree"),
            )
        yield (
            *(*streamed, "--master-rate", "0.3", "--orders", orders, *task.drift),
            *("--evict", "none,lru,lfu,least-saving,fifo,random", "--controls", "no-cache"),
            *("--out", f"{task.name}-drift"),
        )
        for name in ("streams", "adaptive-tree", "fixed-tree", "drift"):
            yield "report", f"{task.name}-{name}"


if __name__ == "__main__":
    main()
