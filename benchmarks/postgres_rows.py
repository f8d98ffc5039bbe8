"""Databases, vectors and alternating timings of benchmarks/postgres.py."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import numpy as np

from benchmarks.stores import clustered, examples
from bottega import KnowledgeBase, Query
from bottega.knowledge.postgres.schema import set_up
from bottega.protocols import Vectors

BLOCK = 100_000
K = 10


class GivenVectors:
    """Embedder that returns the given vector whose number is the question."""

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors
        self.dimension = vectors.shape[1]
        self.fingerprint = f"given-{self.dimension}"

    def embed(self, queries: Sequence[Query]) -> Vectors:
        return self.vectors[[int(query.text) for query in queries]]


@dataclass(frozen=True)
class Timing:
    """Percentiles of call times in seconds."""

    p50: float
    p90: float
    n: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        p50, p90 = np.percentile(seconds, [50, 90])
        return cls(float(p50), float(p90), len(seconds))

    def __str__(self) -> str:
        return f"p50 {self.p50 * 1000:.2f} ms, p90 {self.p90 * 1000:.2f} ms, n {self.n}"


class Databases:
    """Databases of one server, with a blocking asyncpg client without a pool."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._runner = asyncio.Runner()
        self.loop = self._runner.get_loop()

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def url(self, name: str) -> str:
        return f"{self._url.rpartition('/')[0]}/{name}"

    def exists(self, name: str) -> bool:
        found = "SELECT 1 FROM pg_database WHERE datname = $1"
        return bool(self._administer(lambda connection: connection.fetchval(found, name)))

    def create(self, name: str) -> str:
        """Create a database, replacing one of the same name, and return its URL."""
        self.drop(name)
        self._administer(lambda connection: connection.execute(f"CREATE DATABASE {name}"))
        return self.url(name)

    def drop(self, name: str) -> None:
        drop = f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"
        self._administer(lambda connection: connection.execute(drop))

    @contextmanager
    def connection(self, url: str) -> Iterator[Any]:
        """Yield a connection with the settings of a knowledge base: `ef_search`, vectors in binary
        format."""
        connection = self.run(asyncpg.connect(url))
        try:
            self.run(set_up(connection))
            yield connection
        finally:
            self.run(connection.close())

    def close(self) -> None:
        self._runner.close()

    def _administer(self, work: Callable[[Any], Any]) -> Any:
        connection = self.run(asyncpg.connect(self._url))
        try:
            return self.run(work(connection))
        finally:
            self.run(connection.close())


def stored_vectors(rows: int, width: int) -> Vectors:
    """Return unit vectors in blocks with a seed each, which needs less memory."""
    blocks = (
        clustered(min(BLOCK, rows - first), first // BLOCK, width)
        for first in range(0, rows, BLOCK)
    )
    return np.concatenate(list(blocks))


def query_vectors(count: int, width: int) -> Vectors:
    return clustered(count, 1_000_003, width)


def fill(kb: KnowledgeBase, rows: int, query: Vectors) -> tuple[float, float]:
    """Add the rows, build the index, and return the seconds of both."""
    start = time.perf_counter()
    kb.add(examples(rows), batch_size=1000)
    filled = time.perf_counter()
    kb.nearest(query[None], K)
    kb.wait_for_indexes()
    return filled - start, time.perf_counter() - filled


def nearest_rows(vectors: Vectors, queries: Vectors) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the K nearest rows of each query by an exact search."""
    best: list[np.ndarray[Any, Any]] = []
    for query in queries:
        scores = vectors @ query
        best.append(np.argpartition(-scores, K)[:K])
    return np.stack(best)


def recall(
    kb: KnowledgeBase, truth: np.ndarray[Any, np.dtype[np.int64]], queries: Vectors, **options: Any
) -> float:
    """Return the share of the nearest rows that searches find."""
    shares = []
    for best, query in zip(truth, queries, strict=True):
        [hits] = kb.nearest(query[None], K, **options)
        found = {int(hit.example.query.text) for hit in hits}
        shares.append(len(found & set(best.tolist())) / K)
    return float(np.mean(shares))


def alternating(works: Sequence[Callable[[int], object]], count: int) -> list[Timing]:
    """Time the calls in turn, each with the same number; every second turn in reverse order,
    because the first call warms caches for the next."""
    seconds: list[list[float]] = [[] for _ in works]
    pairs = list(zip(works, seconds, strict=True))
    gc.collect()
    for number in range(count):
        for work, taken in pairs if number % 2 else reversed(pairs):
            start = time.perf_counter()
            work(number)
            taken.append(time.perf_counter() - start)
    return [Timing.of(taken) for taken in seconds]


def show(name: str, timing: Timing) -> None:
    print(f"  {name}: {timing}", flush=True)
