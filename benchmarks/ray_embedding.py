"""Compare embedding with one and two Ray workers:
python benchmarks/ray_embedding.py [--images 20000]

Embeds small images in batches of 64, as `add` does. The start of the cluster and the models is not
measured. Rounds with one and two workers alternate over parts of the images; the figure is the
median of the rounds' ratios. The vectors must be equal. Each worker needs a free core: on a busy
machine the ratio is not meaningful.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
from PIL import Image as Pillow

from bottega import Image, Query
from bottega._util.executor import batched, computed_ahead
from bottega._util.ray_executor import RayExecutor
from bottega.knowledge.embedders.embedding_workers import WorkerEmbedder, WorkerEmbedders
from bottega.protocols import Vectors
from bottega.types import IMAGE_QUESTION

SIDE, BATCH, ROUNDS = 32, 64, 5
WORKERS = (1, 2)
REQUIRED_RATIO = 1.7


def images(count: int) -> list[Query]:
    """Return queries about different images of noise."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)
    return [Query(IMAGE_QUESTION, (Image.from_pillow(Pillow.fromarray(one)),)) for one in noise]


def embedded(embedder: WorkerEmbedder, queries: Sequence[Query]) -> tuple[float, Vectors]:
    """Return the seconds and the vectors."""
    started = time.perf_counter()
    ahead = computed_ahead(batched(queries, BATCH), embedder.embed, embedder.concurrency)
    vectors = np.concatenate([result() for _, result in ahead])
    return time.perf_counter() - started, vectors


def load_in_all_workers(embedder: WorkerEmbedder, query: Query) -> None:
    with ThreadPoolExecutor(4 * embedder.concurrency) as pool:
        list(pool.map(embedder.embed, [[query] * BATCH] * 4 * embedder.concurrency))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--images", type=int, default=20_000)
    options.add_argument("--embed", default="bundled")
    given = options.parse_args()
    queries = images(given.images)
    ratios, equal = [], True
    with ExitStack() as stack:
        stack.enter_context(closing(RayExecutor("ray", sum(WORKERS))))
        embedders = []
        for count in WORKERS:
            workers = stack.enter_context(closing(WorkerEmbedders(RayExecutor("ray", count))))
            embedders.append(workers.open(given.embed))
            load_in_all_workers(embedders[-1], queries[0])
        for part in batched(queries, -(-len(queries) // ROUNDS)):
            (one, first), (two, second) = (embedded(embedder, part) for embedder in embedders)
            ratios.append(one / two)
            equal = equal and np.array_equal(first, second)
            rates = f"{len(part) / one:.0f} and {len(part) / two:.0f} images/s"
            print(f"{len(part)} images: {rates} with 1 and 2 workers, ratio {one / two:.2f}")
    ratio = statistics.median(ratios)
    met = ratio >= REQUIRED_RATIO and equal
    print(
        f"{'met' if met else 'MISSED'}: 2 workers / 1 worker {ratio:.2f} (>= {REQUIRED_RATIO});"
        f" vectors {'equal' if equal else 'DIFFERENT'};"
        f" {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    )
    sys.exit(not met)


if __name__ == "__main__":
    main()
