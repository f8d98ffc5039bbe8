"""Embedding by one and by two Ray workers: python benchmarks/ray_embedding.py [--images 20000]

Adds small images to a new knowledge base with --on ray and one worker, then two workers, in turn,
and compares the seconds of `add`, without the start of the cluster and the models. The vectors of
both files must be equal. The ratio needs a free core for each worker and one for the process that
decodes and stores, whose CPU time is printed: on a busy machine workers share its cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image as Pillow

from bottega import Example, Image, KnowledgeBase, Query
from bottega._util.ray_executor import RayExecutor
from bottega.knowledge.embedders.workers import WorkerEmbedders
from bottega.types import IMAGE_QUESTION

SIDE, LABELS = 32, 10
BAR = 1.7


def examples(count: int) -> Iterator[Example]:
    """Yield different images of noise around a colour per label."""
    rng = np.random.default_rng(0)
    for index in range(count):
        colour = np.full((SIDE, SIDE, 3), 25 * (index % LABELS), np.uint8)
        noise = rng.integers(0, 30, (SIDE, SIDE, 3), np.uint8)
        image = Image.from_pillow(Pillow.fromarray(colour + noise))
        yield Example(Query(IMAGE_QUESTION, (image,)), f"label {index % LABELS}")


@dataclass(frozen=True)
class Run:
    """Seconds of `add`, CPU seconds of its process, and the stored vectors."""

    seconds: float
    driver: float
    vectors: bytes


def measured(folder: Path, given: list[Example], workers: int, embed: str) -> Run:
    """Add the examples to a new file with this number of workers."""
    executor = RayExecutor("ray", workers)
    with closing(executor), closing(WorkerEmbedders(executor)) as embedders:
        embedder = embedders.open(embed)
        with ThreadPoolExecutor(8 * workers) as pool:  # load the model in each worker
            list(pool.map(embedder.embed, [[given[0].query] * 64] * 8 * workers))
        with KnowledgeBase.open(folder / f"{workers}.db", embedder) as knowledge:
            started, used = time.perf_counter(), time.process_time()
            added = knowledge.add(given)
            taken, used = time.perf_counter() - started, time.process_time() - used
            assert added.new == len(given), added
            return Run(taken, used, knowledge.vectors(knowledge.ids()).tobytes())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--images", type=int, default=20_000)
    options.add_argument("--embed", default="bundled")
    given = options.parse_args()
    images = list(examples(given.images))
    with tempfile.TemporaryDirectory() as folder:
        runs = {n: measured(Path(folder), images, n, given.embed) for n in (1, 2)}
    for workers, run in runs.items():
        rate = given.images / run.seconds
        print(
            f"{workers} workers: {given.images} images in {run.seconds:.1f} s, {rate:.0f} images/s;"
            f" {run.driver:.1f} s CPU of the storing process"
        )
    ratio = runs[1].seconds / runs[2].seconds
    equal = runs[1].vectors == runs[2].vectors
    held = ratio >= BAR and equal
    print(
        f"{'held' if held else 'MISSED'}: 2 workers / 1 worker {ratio:.2f} (>= {BAR}),"
        f" vectors {'equal' if equal else 'DIFFERENT'}, {os.cpu_count()} CPUs,"
        f" load {os.getloadavg()[0]:.1f}"
    )
    sys.exit(not held)


if __name__ == "__main__":
    main()
