"""Embedders whose calls are computed by the workers of an executor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from bottega._util.event_loops import BACKGROUND_LOOP
from bottega._util.executor import Actor, Executor
from bottega.errors import EmbeddingError, WorkerError
from bottega.knowledge.embedders.names import open_embedder
from bottega.protocols import Embedder, Vectors
from bottega.types import Query

# Concurrent calls per worker: one is computed while the next one is sent.
AHEAD = 2


@dataclass(frozen=True)
class EmbeddingBatch:
    """Queries for the embedder of a name; None requests its description."""

    spec: str
    queries: Sequence[Query] | None = None


@dataclass(frozen=True)
class EmbedderDescription:
    fingerprint: str
    dimension: int


class EmbeddingActor:
    """Actor that loads embedders, each once, and embeds queries with them."""

    def __init__(self) -> None:
        self._embedders: dict[str, Embedder] = {}

    async def __call__(self, batch: EmbeddingBatch, /) -> Vectors | EmbedderDescription:
        return await asyncio.to_thread(self._embed, batch)

    def _embed(self, batch: EmbeddingBatch) -> Vectors | EmbedderDescription:
        embedder = self._embedders.get(batch.spec)
        if embedder is None:
            embedder = self._embedders[batch.spec] = open_embedder(batch.spec)
        if batch.queries is None:
            return EmbedderDescription(embedder.fingerprint, embedder.dimension)
        return embedder.embed(batch.queries)

    async def aclose(self) -> None:
        pass


class WorkerEmbedders:
    """Workers of an executor that hold embedders."""

    def __init__(self, executor: Executor) -> None:
        # One call at a time: embedders are not safe for concurrent calls.
        self._workers = executor.start(EmbeddingActor, concurrency=1)
        self._concurrency = AHEAD * executor.count

    def open(self, spec: str) -> WorkerEmbedder:
        """Return the embedder of a name. Blocks while a worker loads it."""
        found = BACKGROUND_LOOP.run(self._workers(EmbeddingBatch(spec)))
        assert isinstance(found, EmbedderDescription)
        return WorkerEmbedder(spec, self._workers, found, self._concurrency)

    def close(self) -> None:
        """End the workers."""
        BACKGROUND_LOOP.run(self._workers.aclose())


class WorkerEmbedder:
    """Embedder in the workers of `WorkerEmbedders`. Threads may call it concurrently.

    The vectors are those of the embedder in this process, for the same batches. `concurrency` is
    the number of calls that keep all workers busy. Raises `EmbeddingError` for a batch whose worker
    ended several times.
    """

    def __init__(
        self,
        spec: str,
        workers: Actor[EmbeddingBatch, Vectors | EmbedderDescription],
        description: EmbedderDescription,
        concurrency: int,
    ) -> None:
        self._spec, self._workers = spec, workers
        self.fingerprint, self.dimension = description.fingerprint, description.dimension
        self.concurrency = concurrency

    def embed(self, queries: Sequence[Query]) -> Vectors:
        try:
            found = BACKGROUND_LOOP.run(self._workers(EmbeddingBatch(self._spec, list(queries))))
        except WorkerError as error:
            raise EmbeddingError(str(error), hint=error.hint) from error
        assert not isinstance(found, EmbedderDescription)
        return found
