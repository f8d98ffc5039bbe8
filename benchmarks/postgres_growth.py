"""Search time by number of rows, part of benchmarks/postgres.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.plots import side_by_side
from benchmarks.postgres_rows import (
    Databases,
    GivenVectors,
    K,
    Timing,
    alternating,
    fill,
    nearest_rows,
    query_vectors,
    recall,
    show,
    stored_vectors,
)
from benchmarks.stores import Ratio
from bottega import KnowledgeBase
from bottega.protocols import Vectors

GROWTH_WIDTH = 256
TRUTHS = 100  # queries whose recall is measured


@dataclass(frozen=True)
class Growth:
    rows: int
    timing: Timing
    recall: float


def measure_growth(
    databases: Databases, sizes: Sequence[int], count: int, results: list[Growth]
) -> Iterator[Ratio]:
    """Time searches that alternate between knowledge bases of all sizes."""
    queries = query_vectors(count, GROWTH_WIDTH)
    with contextlib.ExitStack() as stack:
        bases = []
        for rows in sizes:
            kb, share = opened(databases, rows, queries[:TRUTHS])
            bases.append((stack.enter_context(kb), share))

        def search(kb: KnowledgeBase) -> Callable[[int], object]:
            return lambda number: kb.nearest(queries[number][None], K)

        searches = [search(kb) for kb, _ in bases]
        alternating(searches, count)  # reads the examples and warms the caches
        timings = alternating(searches, count)
    for rows, (_, share), timing in zip(sizes, bases, timings, strict=True):
        show(f"{rows} x {GROWTH_WIDTH}, recall {share:.3f}", timing)
        results.append(Growth(rows, timing, share))
    ratio = max(timing.p50 for timing in timings) / timings[0].p50
    yield Ratio(f"largest p50 of {sizes[0]} to {sizes[-1]} rows / that of {sizes[0]}", ratio, 3)


def opened(databases: Databases, rows: int, queries: Vectors) -> tuple[KnowledgeBase, float]:
    """Return a knowledge base with this number of rows, and the recall of its search."""
    name = f"bottega_benchmark_{rows}"
    vectors = stored_vectors(rows, GROWTH_WIDTH)
    exists = databases.exists(name)
    url = databases.url(name) if exists else databases.create(name)
    kb = KnowledgeBase.open(url, GivenVectors(vectors))
    if not exists or len(kb) < rows:
        filled, built = fill(kb, rows, queries[0])
        print(f"{rows} x {GROWTH_WIDTH}: stored in {filled:.0f} s, index built in {built:.0f} s")
    return kb, recall(kb, nearest_rows(vectors, queries), queries)


def plot(path: Path, growth: Sequence[Growth]) -> None:
    rows = np.array([one.rows for one in growth])
    with side_by_side(path, "Search in PostgreSQL by number of rows", 2, 9.0) as (times, recalls):
        times.plot(rows, [one.timing.p50 * 1000 for one in growth], marker="o", label="p50")
        times.plot(rows, [one.timing.p90 * 1000 for one in growth], marker="o", label="p90")
        times.set(xscale="log", xlabel="rows", ylabel="ms", ylim=(0, None))
        recalls.plot(rows, [one.recall for one in growth], marker="o", label="recall@10")
        recalls.set(xscale="log", xlabel="rows", ylabel="recall@10", ylim=(0.8, 1.01))
