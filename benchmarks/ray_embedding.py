"""Embedding by one and by two Ray workers: python benchmarks/ray_embedding.py [--images 20000]

Adds small images to a new knowledge base with --on ray and one worker, then two workers, in turn,
and compares the seconds of `add`, without the start of the cluster and the models. The rows of
both files must be equal. Needs as many free cores as workers, and one for the process that stores.
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


def seconds(folder: Path, given: list[Example], workers: int, embed: str) -> tuple[float, bytes]:
    """Return the seconds of `add`, and the vectors."""
    executor = RayExecutor("ray", workers)
    with closing(executor), closing(WorkerEmbedders(executor)) as embedders:
        embedder = embedders.open(embed)
        with ThreadPoolExecutor(8 * workers) as pool:  # load the model in each worker
            list(pool.map(embedder.embed, [[given[0].query] * 64] * 8 * workers))
        with KnowledgeBase.open(folder / f"{workers}.db", embedder) as knowledge:
            started = time.perf_counter()
            added = knowledge.add(given)
            taken = time.perf_counter() - started
            assert added.new == len(given), added
            return taken, knowledge.vectors(knowledge.ids()).tobytes()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--images", type=int, default=20_000)
    options.add_argument("--embed", default="bundled")
    given = options.parse_args()
    images = list(examples(given.images))
    with tempfile.TemporaryDirectory() as folder:
        results = {n: seconds(Path(folder), images, n, given.embed) for n in (1, 2)}
    for workers, (taken, _) in results.items():
        rate = given.images / taken
        print(f"{workers} workers: {given.images} images in {taken:.1f} s, {rate:.0f} images/s")
    ratio = results[1][0] / results[2][0]
    equal = results[1][1] == results[2][1]
    held = ratio >= BAR and equal
    print(
        f"{'held' if held else 'MISSED'}: 2 workers / 1 worker {ratio:.2f} (>= {BAR}),"
        f" vectors {'equal' if equal else 'DIFFERENT'}, {os.cpu_count()} CPUs,"
        f" load {os.getloadavg()[0]:.1f}"
    )
    sys.exit(not held)


if __name__ == "__main__":
    main()
