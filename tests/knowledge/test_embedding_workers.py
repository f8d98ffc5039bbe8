"""Embedders that compute several batches at a time, in threads or in workers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from bottega._util.executor import LocalExecutor
from bottega._util.ray_executor import RayExecutor
from bottega.errors import BottegaError, EmbeddingError, SettingError, WorkerError
from bottega.knowledge import AddResult, KnowledgeBase
from bottega.knowledge.embedders.embedding_workers import (
    EmbedderDescription,
    EmbeddingBatch,
    WorkerEmbedder,
    WorkerEmbedders,
)
from bottega.knowledge.embedders.names import open_embedder
from bottega.protocols import Vectors
from bottega.types import Query
from tests.builders import solid_image
from tests.knowledge.doubles import SeededEmbedder, text_example


class ConcurrentEmbedder(SeededEmbedder):
    """Embedder whose first calls wait for each other. A query `bad` fails."""

    concurrency = 3

    def __init__(self) -> None:
        super().__init__()
        self._first = threading.Barrier(self.concurrency, timeout=30)
        self._calls = iter(range(self.concurrency))

    def embed(self, queries: Sequence[Query]) -> Vectors:
        if next(self._calls, None) is not None:
            self._first.wait()  # fails unless three calls run at a time
        if any(query.text == "bad" for query in queries):
            raise EmbeddingError("unreadable")
        return super().embed(queries)


class SerialEmbedder(ConcurrentEmbedder):
    concurrency = 1


EXAMPLES = [text_example(text) for text in [*"abcdefghijkl", "bad", *"klmnopqrst", "a", "u", "t"]]


def added(path: Path, embed: SeededEmbedder) -> tuple[AddResult, list[str], bytes, list[str]]:
    errors: list[BottegaError] = []
    with KnowledgeBase.open(path, embed) as knowledge:
        result = knowledge.add(EXAMPLES, batch_size=4, on_error=errors.append)
        texts = [one.query.text for one in knowledge]
        vectors = knowledge.vectors(knowledge.ids()).tobytes()
    return result, texts, vectors, [str(error) for error in errors]


def test_concurrent_embedding_stores_the_same_rows(tmp_path: Path) -> None:
    serial = added(tmp_path / "serial.db", SerialEmbedder())
    concurrent = added(tmp_path / "concurrent.db", ConcurrentEmbedder())
    assert concurrent == serial
    assert serial[0] == AddResult(new=21, duplicates=4, failed=1)


def test_concurrent_reindex_stores_the_same_vectors(tmp_path: Path) -> None:
    with KnowledgeBase.open(tmp_path / "kb.db", SeededEmbedder("first")) as knowledge:
        knowledge.add(EXAMPLES[:12])
        assert knowledge.reindex("default", ConcurrentEmbedder(), batch_size=2) == 12
        ids = knowledge.ids()
        expected = SeededEmbedder().embed([one.query for one in knowledge.get_many(ids)])
        assert (knowledge.vectors(ids) == expected).all()


def test_strict_errors_end_a_concurrent_add(tmp_path: Path) -> None:
    with KnowledgeBase.open(tmp_path / "kb.db", ConcurrentEmbedder()) as knowledge:
        with pytest.raises(EmbeddingError, match="unreadable"):
            knowledge.add(EXAMPLES, batch_size=4)
        assert len(knowledge) == 12  # the three batches before


def queries() -> list[Query]:
    return [Query(f"a square of shade {shade}", (solid_image(shade),)) for shade in (20, 90, 300)]


def test_vectors_of_workers_equal_those_of_the_embedder() -> None:
    with closing(WorkerEmbedders(LocalExecutor())) as embedders:
        for spec in ("pixels", "words"):
            embedder, own = embedders.open(spec), open_embedder(spec)
            assert (embedder.fingerprint, embedder.dimension) == (own.fingerprint, own.dimension)
            assert np.array_equal(embedder.embed(queries()), own.embed(queries()))


@pytest.mark.slow
def test_workers_hold_several_embedders(ray_cluster: RayExecutor) -> None:
    with closing(WorkerEmbedders(ray_cluster)) as embedders:
        found = [embedders.open(spec) for spec in ("pixels", "words")]
        vectors = [one.embed(queries()) for one in found]
    expected = [open_embedder(spec).embed(queries()) for spec in ("pixels", "words")]
    assert all(map(np.array_equal, vectors, expected))
    assert {one.concurrency for one in found} == {2 * ray_cluster.count}


def test_error_of_an_embedder_in_a_worker_is_raised() -> None:
    with closing(WorkerEmbedders(LocalExecutor())) as embedders:
        with pytest.raises(EmbeddingError, match="requires an image"):
            embedders.open("pixels").embed([Query("no image")])
        with pytest.raises(SettingError, match="weight of the pixels"):
            embedders.open("photos+pixels:2")


class EndedWorkers:
    async def __call__(self, item: EmbeddingBatch, /) -> Vectors:
        raise WorkerError("the worker ended 3 times during this item", hint="check the memory")

    async def aclose(self) -> None:
        pass


def test_batch_of_an_ended_worker_is_an_embedding_error(tmp_path: Path) -> None:
    embedder = WorkerEmbedder("pixels", EndedWorkers(), EmbedderDescription("pixels", 8), 2)
    errors: list[BottegaError] = []
    with KnowledgeBase.open(tmp_path / "kb.db", embedder) as knowledge:
        result = knowledge.add(EXAMPLES[:2], on_error=errors.append)
    assert result == AddResult(failed=2)
    assert [(type(one), one.hint) for one in errors] == [(EmbeddingError, "check the memory")] * 2
