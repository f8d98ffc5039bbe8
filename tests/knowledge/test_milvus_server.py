"""Knowledge bases in PostgreSQL with a running Milvus: results, errors, restarts."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread

import numpy as np
import pytest

from bottega.errors import StoreError, StoreUnavailableError
from bottega.knowledge import Eq, KnowledgeBase
from bottega.knowledge.milvus.database import MilvusDatabase
from bottega.knowledge.milvus.search import CollectionState, MilvusSearch
from bottega.types import Query
from tests.knowledge.doubles import SeededEmbedder, text_example
from tests.milvus import RunningMilvus

pytestmark = pytest.mark.slow
TEXTS = [text_example(f"q{n}", tags={"part": str(n % 200)}) for n in range(2000)]


@pytest.fixture
def kb(database: str, milvus: RunningMilvus) -> Iterator[KnowledgeBase]:
    """Return a knowledge base whose vectors Milvus contains."""
    with opened(database, milvus) as kb:
        kb.add(TEXTS[:50])
        copied(kb)
        yield kb
    server = MilvusDatabase(milvus.url())
    for name in server.names("bottega_"):
        server.drop(name)
    server.close()


def opened(database: str, milvus: RunningMilvus, name: str = "default") -> KnowledgeBase:
    return KnowledgeBase.open(database, SeededEmbedder(), vectors=milvus.url(name), hnsw_above=0)


def copied(kb: KnowledgeBase) -> CollectionState:
    """Wait until Milvus contains every row that exists now."""
    searcher = kb._searcher
    assert isinstance(searcher, MilvusSearch)
    for _ in range(2):  # the update in progress may have begun earlier
        progress = searcher._current(searcher.view(None)[0])
        kb.wait_for_indexes()
    searcher._current(searcher.view(None)[0])
    assert progress.position
    return progress


def found(kb: KnowledgeBase, k: int, **options: object) -> list[str]:
    return [str(c.example.id) for c in kb.search(Query("new"), k, **options)]  # type: ignore[arg-type]


def test_results_equal_those_of_an_exact_search(kb: KnowledgeBase, database: str) -> None:
    kb.add(TEXTS[50:])
    copied(kb)
    one = Eq("tags.part", "7")
    with KnowledgeBase.open(database, SeededEmbedder()) as exact:
        for query in ("a", "b", "c", "d"):
            theirs = exact.search(Query(query), 10)
            ours = kb.search(Query(query), 10)
            assert len({c.example.id for c in ours} & {c.example.id for c in theirs}) >= 9
            assert ours[0].score == pytest.approx(theirs[0].score)
        assert found(kb, 10, where=one) == found(exact, 10, where=one)


def test_concurrent_writes_and_searches_find_every_row(kb: KnowledgeBase) -> None:
    writer = Thread(target=lambda: [kb.add([one]) for one in TEXTS[50:250]])
    writer.start()
    seen = 0
    while writer.is_alive():
        stored = kb.ids()[-1]
        query = kb.get(stored).query
        assert kb.search(query, 1, include_self=True)[0].example.id == stored
        seen += 1
    writer.join()
    copied(kb)
    assert seen and len(found(kb, 250)) == 250


def test_dropped_collection_is_filled_again(kb: KnowledgeBase, milvus: RunningMilvus) -> None:
    before = found(kb, 9)
    server = MilvusDatabase(milvus.url())
    [name] = server.names("bottega_")
    server.drop(name)
    assert found(kb, 9) == before
    copied(kb)
    assert found(kb, 9) == before and server.names("bottega_") == [name]
    server.close()


def test_server_that_does_not_answer(
    kb: KnowledgeBase, database: str, milvus: RunningMilvus
) -> None:
    before = found(kb, 9)
    milvus.suspend()
    try:
        with pytest.raises(StoreUnavailableError, match="cannot be reached") as caught:
            found(kb, 9)
        kb.add(TEXTS[50:51])  # writes need PostgreSQL alone
        with pytest.raises(StoreUnavailableError), opened(database, milvus):
            pass
    finally:
        milvus.resume()
    assert "vectors=" in caught.value.hint and "Milvus@" not in str(caught.value)
    assert [id for id in found(kb, 10) if id in before] == before
    assert len(kb) == 51


def test_wrong_password_and_database_are_named(database: str, milvus: RunningMilvus) -> None:
    with pytest.raises(StoreError, match="does not exist") as caught:
        opened(database, milvus, "missing")
    assert "vectors=" in caught.value.hint
    wrong = milvus.url().replace(":Milvus@", ":s3cret@")
    with pytest.raises(StoreError, match="rejects the user") as caught:
        KnowledgeBase.open(database, SeededEmbedder(), vectors=wrong)
    assert "s3cret" not in str(caught.value) + caught.value.hint
    assert "vectors=" in caught.value.hint


def test_collection_of_another_program_is_left_alone(
    kb: KnowledgeBase, milvus: RunningMilvus
) -> None:
    server = MilvusDatabase(milvus.url())
    [name] = server.names("bottega_")
    before = found(kb, 9)
    for make, problem in (
        ({"dimension": 8}, "belongs to another program"),
        ({"schema": True}, "must have vectors of 8 numbers, got 4"),
    ):
        server.drop(name)
        with server.client() as client:
            if "schema" in make:
                from pymilvus import DataType

                schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
                schema.add_field("key", DataType.INT64, is_primary=True)
                schema.add_field("space", DataType.INT64)
                schema.add_field("vector", DataType.FLOAT_VECTOR, dim=4)
                client.create_collection(name, schema=schema)
            else:
                client.create_collection(name, dimension=8)
        searcher = kb._searcher
        assert isinstance(searcher, MilvusSearch)
        [progress] = searcher._collections.values()
        with pytest.raises(StoreError, match=problem):
            progress.copy.update()
        assert np.array_equal(found(kb, 9), before)
    server.close()
