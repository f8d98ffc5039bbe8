"""Seconds of one RCTS query with the bundled apprentice: python -m benchmarks.rcts_speed --base SRC

SRC is the folder `src` of another checkout, for example of `git worktree add DIR 9a9b1733`. Its
process and one of this checkout alternate; each answers the same queries, one after another, with
20 candidates, 3 demonstrations and 10 rollouts. The trees and replies of both are compared. For
another instruction set, set ONEDNN_MAX_CPU_ISA=AVX2 and ATEN_CPU_CAPABILITY=avx2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from benchmarks.rcts_plan import SETTINGS, MethodConfig, Rewarding
from benchmarks.rcts_searches import TaskSetup
from bottega import bundled
from bottega.image import Image
from bottega.protocols import Generator
from bottega.types import Prompt, Reply, Sampling, SearchNode

CASES: dict[str, Rewarding] = {"rules": "weighted", "attributes": "ensemble"}
ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True, help="`src` of the older checkout")
    parser.add_argument("--items", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        print(json.dumps(asyncio.run(answer(chosen.worker, chosen.items))))
        return
    for case in CASES:
        pairs = [
            (run(chosen.base, case, chosen.items), run(ROOT / "src", case, chosen.items))
            for _ in range(chosen.repeats)
        ]
        report(case, pairs)


def run(source: Path, case: str, items: int) -> dict[str, Any]:
    """Answer in a new process that imports bottega from a folder."""
    path = os.pathsep.join([str(source.resolve()), str(ROOT)])
    arguments = ["--base", str(source), "--worker", case, "--items", str(items)]
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.rcts_speed", *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        cwd=ROOT,
    )
    measured: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return measured


async def answer(case: str, items: int) -> dict[str, Any]:
    """Return seconds and CPU seconds per query, the trees, and the replies by request."""
    recorder = Recorder(bundled("apprentice"))
    task = TaskSetup(replace(SETTINGS[case], items=items + 1), 0, recorder)
    method = task.method(MethodConfig("rcts", CASES[case]))
    first, *rest = task.data.items
    await method.answer(first.query)  # loads the model
    wall, cpu = time.perf_counter(), time.process_time()
    outcomes = [await method.answer(item.query) for item in rest]
    seconds = [(time.perf_counter() - wall) / items, (time.process_time() - cpu) / items]
    await recorder.aclose()
    trees = [one.trace.tree for one in outcomes if one.trace]
    shown = [
        [tree and node(tree.root), tree and tree.requests, tree and tree.calls] for tree in trees
    ]
    return {"seconds": seconds, "trees": shown, "replies": recorder.replies}


class Recorder:
    """Generator wrapper that records replies by request."""

    turns_only = True

    def __init__(self, generator: Generator) -> None:
        self._generator, self.name = generator, generator.name
        self.replies: dict[str, list[list[Any]]] = {}

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        reply = await self._generator.generate(prompt, sampling)
        turns = [(one.role, [_shown(part) for part in one.parts]) for one in prompt.messages]
        key = repr((turns, sampling))
        self.replies[key] = [
            [one.text, one.finish_reason, one.logprob] for one in reply.completions
        ]
        return reply

    async def aclose(self) -> None:
        await self._generator.aclose()


def _shown(part: str | Image) -> str:
    return part.sha256 if isinstance(part, Image) else part


def node(one: SearchNode) -> list[Any]:
    """Return a node of the trace with all nodes below it."""
    query = one.candidate.example.query if one.candidate else None
    images = [image.sha256 for image in query.images] if query else []
    text = one.answer.text if one.answer else None
    return [images, one.value, one.visits, text, [node(child) for child in one.children]]


def report(case: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for number, kind in enumerate(("seconds", "CPU")):
        times = [[side["seconds"][number] * 1000 for side in pair] for pair in pairs]
        before, after = (statistics.median(column) for column in zip(*times, strict=True))
        ratios = sorted(old / new for old, new in times)
        print(
            f"{case:10} {kind:7} {before:6.1f} ms before, {after:6.1f} ms after, ratio"
            f" {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    (old, new), *_ = pairs
    texts, differences = 0, []
    for key, completions in old["replies"].items():
        for one, other in zip(completions, new["replies"][key], strict=True):
            texts += one[:2] != other[:2]
            differences.append(abs(one[2] - other[2]))
    trees = sum(one != other for one, other in zip(old["trees"], new["trees"], strict=True))
    differences.sort()
    print(
        f"{case:10} {trees} of {len(old['trees'])} trees and {texts} of {len(differences)} texts"
        f" differ; log probabilities by {statistics.median(differences):.1e} (median),"
        f" {differences[int(0.95 * len(differences))]:.1e} (95 %), {differences[-1]:.1e} (largest)",
        flush=True,
    )


if __name__ == "__main__":
    main()
