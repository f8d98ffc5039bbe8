"""Embedding by one and by two Ray workers: python benchmarks/ray_embedding.py [--images 20000]

Embeds small images in batches of 64 with one worker, then two workers, without the start of the
cluster and the models, and compares the seconds. Then adds the images to a knowledge base with the
same workers; there this process decodes and stores, and needs a core of its own. Vectors must be
equal. On a busy machine workers share its cores, and ratios are lower.
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
from bottega._util.executor import batched, computed_ahead
from bottega._util.ray_executor import RayExecutor
from bottega.knowledge.embedders.workers import WorkerEmbedders
from bottega.types import IMAGE_QUESTION

SIDE, LABELS, BATCH = 32, 10, 64
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
    """Seconds of embedding, seconds and own CPU seconds of `add`, and the vectors of both."""

    embedding: float
    adding: float
    driver: float
    vectors: bytes
    stored: bytes


def measured(folder: Path, given: list[Example], workers: int, embed: str) -> Run:
    """Embed the examples, then add them to a new file, with this number of workers."""
    executor = RayExecutor("ray", workers)
    with closing(executor), closing(WorkerEmbedders(executor)) as embedders:
        embedder = embedders.open(embed)
        with ThreadPoolExecutor(8 * workers) as pool:  # load the model in each worker
            list(pool.map(embedder.embed, [[given[0].query] * BATCH] * 8 * workers))
        started = time.perf_counter()
        batches = batched((one.query for one in given), BATCH)
        ahead = computed_ahead(batches, embedder.embed, embedder.concurrency)
        vectors = np.concatenate([result() for _, result in ahead])
        embedding = time.perf_counter() - started
        with KnowledgeBase.open(folder / f"{workers}.db", embedder) as knowledge:
            started, used = time.perf_counter(), time.process_time()
            added = knowledge.add(given, batch_size=BATCH)
            adding, used = time.perf_counter() - started, time.process_time() - used
            assert added.new == len(given), added
            stored = knowledge.vectors(knowledge.ids()).tobytes()
    return Run(embedding, adding, used, vectors.tobytes(), stored)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--images", type=int, default=20_000)
    options.add_argument("--embed", default="bundled")
    given = options.parse_args()
    images = list(examples(given.images))
    with tempfile.TemporaryDirectory() as folder:
        runs = {n: measured(Path(folder), images, n, given.embed) for n in (1, 2)}
    for workers, run in runs.items():
        print(
            f"{workers} workers: {given.images / run.embedding:.0f} images/s embedded,"
            f" {given.images / run.adding:.0f} images/s added"
            f" ({run.driver:.1f} s CPU of this process)"
        )
    ratio = runs[1].embedding / runs[2].embedding
    equal = len({one for run in runs.values() for one in (run.vectors, run.stored)}) == 1
    held = ratio >= BAR and equal
    print(
        f"{'held' if held else 'MISSED'}: embedding by 2 workers / 1 worker {ratio:.2f} (>= {BAR});"
        f" add {runs[1].adding / runs[2].adding:.2f}; vectors {'equal' if equal else 'DIFFERENT'};"
        f" {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    )
    sys.exit(not held)


if __name__ == "__main__":
    main()
