"""Search by a derived index that lags, is lost or contains other rows: a collection in memory takes
the place of Milvus."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bottega.errors import MissingDependencyError, SettingError, StoreUnavailableError
from bottega.knowledge import Eq, KnowledgeBase
from bottega.knowledge.milvus import search
from bottega.knowledge.milvus.collection import Consistency, StoredVector
from bottega.knowledge.milvus.database import MilvusDatabase, MilvusUrl, NotLoadedError
from bottega.knowledge.milvus.search import MilvusSearch
from bottega.knowledge.records import SearchHit
from bottega.protocols import Vectors
from bottega.types import Query
from tests.knowledge.doubles import SeededEmbedder, text_example
from tests.postgres import free_port

URL = "milvus://root:s3cret@127.0.0.1/default"
TEXTS = [text_example(f"q{n}", tags={"part": str(n % 20)}) for n in range(60)]


class MemoryCollection:
    """Collection that compares all vectors by their cosine."""

    stored: dict[str, dict[int, StoredVector]]
    positions: dict[str, int]
    searches: list[int]

    def __init__(self, database: MilvusDatabase, name: str, dimension: int, metric: str) -> None:
        self.name = name

    def prepare(self) -> bool:
        is_new = self.name not in self.stored
        self.stored.setdefault(self.name, {})
        return is_new

    def position(self) -> int:
        if self.name not in self.stored:
            raise NotLoadedError("missing")
        return self.positions.get(self.name, 0)

    def apply(self, stored: Sequence[StoredVector], deleted: Collection[int] = ()) -> None:
        self.stored[self.name] |= {one.key: one for one in stored}
        for key in deleted:
            self.stored[self.name].pop(key, None)

    def set_position(self, before: int, position: int) -> None:
        self.positions[self.name] = position

    def nearest(
        self, vector: Vectors, limit: int, namespace: str, consistency: Consistency
    ) -> list[SearchHit]:
        if self.name not in self.stored:
            raise NotLoadedError("missing")
        self.searches.append(limit)
        rows = [one for one in self.stored[self.name].values() if one.namespace == namespace]
        hits = [SearchHit(one.key, float(one.vector @ vector)) for one in rows]
        return sorted(hits, key=lambda hit: -hit.score)[:limit]

    def drop(self) -> None:
        self.stored.pop(self.name, None)
        self.positions.pop(self.name, None)


@pytest.fixture
def collection(monkeypatch: pytest.MonkeyPatch) -> type[MemoryCollection]:
    """Return the collections of an empty server, which nothing updates in the background."""
    MemoryCollection.stored, MemoryCollection.positions = {}, {}
    MemoryCollection.searches = []
    monkeypatch.setattr(search, "MilvusCollection", MemoryCollection)
    monkeypatch.setattr(search, "COMPARED_ABOVE", 0)
    monkeypatch.setattr(MilvusDatabase, "names", lambda self, prefix: [*MemoryCollection.stored])
    monkeypatch.setattr(
        MilvusDatabase, "drop", lambda self, name: MemoryCollection.stored.pop(name)
    )
    monkeypatch.setattr(MilvusSearch, "_start_update", lambda self, progress: None)
    return MemoryCollection


@pytest.fixture
def kb(database: str, collection: type[MemoryCollection]) -> Iterator[KnowledgeBase]:
    with opened(database) as kb:
        kb.add(TEXTS)
        yield kb


def opened(database: str, **options: Any) -> KnowledgeBase:
    return KnowledgeBase.open(database, SeededEmbedder(), vectors=URL, hnsw_above=0, **options)


def update(kb: KnowledgeBase) -> int:
    """Copy what changed, and return the position."""
    searcher = kb._searcher
    assert isinstance(searcher, MilvusSearch)
    progress = searcher._current(searcher.view(None)[0])
    searcher.wait_for_indexes()  # the next search reads the position
    return progress.copy.update()


def exact(database: str, text: str, k: int, **options: Any) -> list[str]:
    with KnowledgeBase.open(database, SeededEmbedder()) as kb:
        return found(kb, text, k, **options)


def found(kb: KnowledgeBase, text: str, k: int, **options: Any) -> list[str]:
    return [str(c.example.id) for c in kb.search(Query(text), k, **options)]


def test_results_equal_those_of_an_exact_search(
    kb: KnowledgeBase, database: str, collection: type[MemoryCollection]
) -> None:
    assert found(kb, "new", 5) == exact(database, "new", 5)  # while nothing is copied
    assert collection.searches == []
    assert update(kb) == 60
    assert found(kb, "new", 5) == exact(database, "new", 5)
    assert collection.searches == [10]


def test_changes_that_are_not_copied_count(
    kb: KnowledgeBase, database: str, collection: type[MemoryCollection]
) -> None:
    update(kb)
    kb.add([text_example("new")])
    [nearest, *_] = found(kb, "new", 5, include_self=True)
    assert kb.get(nearest).query.text == "new"
    deleted = found(kb, "q7", 3)
    kb.delete(deleted)
    assert found(kb, "q7", 5) == exact(database, "q7", 5)
    assert not {*deleted} & {*found(kb, "q7", 20)}
    assert [len(rows) for rows in collection.stored.values()] == [60]
    update(kb)
    assert [len(rows) for rows in collection.stored.values()] == [58]


def test_filters_fetch_more_candidates(
    kb: KnowledgeBase, database: str, collection: type[MemoryCollection]
) -> None:
    update(kb)
    one = Eq("tags.part", "3")
    assert found(kb, "new", 2, where=one) == exact(database, "new", 2, where=one)
    assert collection.searches[:2] == [4, 32]
    few = found(kb, "new", 9, where=one)
    assert few == exact(database, "new", 9, where=one) and len(few) == 3


def test_filter_with_few_matches_compares_all_of_them(
    kb: KnowledgeBase, database: str, collection: type[MemoryCollection]
) -> None:
    update(kb)
    one = Eq("tags.part", "3")
    kb._searcher._compared_above = 3  # type: ignore[attr-defined]
    assert found(kb, "new", 2, where=one) == exact(database, "new", 2, where=one)
    assert collection.searches == []


def test_rows_that_are_not_copied_do_not_end_a_filtered_search(
    kb: KnowledgeBase, database: str
) -> None:
    """They fill up the hits, but nearer ones may be beyond the first candidates."""
    update(kb)
    one = Eq("tags.part", "3")
    kb.add([text_example(f"late {n}", tags={"part": "3"}) for n in range(6)])
    for n in range(20):
        assert found(kb, f"t{n}", 2, where=one) == exact(database, f"t{n}", 2, where=one)


def test_namespaces_are_separate(kb: KnowledgeBase, database: str) -> None:
    with opened(database, namespace="b") as other:
        other.add([text_example(f"b{n}") for n in range(3)])
        assert update(kb) == update(other) == 63
        assert len(found(other, "new", 9)) == 3
    assert found(kb, "new", 5) == exact(database, "new", 5)


def test_lost_collection_is_filled_again(
    kb: KnowledgeBase, database: str, collection: type[MemoryCollection]
) -> None:
    update(kb)
    collection.stored.clear()
    collection.positions.clear()
    assert found(kb, "new", 5) == exact(database, "new", 5)
    assert update(kb) == 60
    assert found(kb, "new", 5) == exact(database, "new", 5)
    assert [len(rows) for rows in collection.stored.values()] == [60]


@pytest.mark.parametrize("position", [1, 10**6])
def test_position_outside_of_the_change_feed_starts_again(
    kb: KnowledgeBase, collection: type[MemoryCollection], position: int
) -> None:
    """Before the feed, deletions are unknown; after it, the database is an older copy."""
    update(kb)
    [(name, rows)] = collection.stored.items()
    rows[1000] = rows[1]._replace(key=1000)
    collection.positions[name] = position
    kb._rows.read("INSERT INTO kb_pruned VALUES ('', 30)")  # type: ignore[attr-defined]
    assert update(kb) == 60
    assert collection.stored[name].keys() == {*range(1, 61)}


def test_interrupted_copy_starts_again(
    kb: KnowledgeBase, collection: type[MemoryCollection], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise StoreUnavailableError("gone", hint="start it")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryCollection, "set_position", fail)
        with pytest.raises(StoreUnavailableError):
            update(kb)
    assert collection.positions == {} and len(found(kb, "new", 5)) == 5
    [rows] = collection.stored.values()
    rows[1000] = rows[1]._replace(key=1000)
    assert update(kb) == 60
    [rows] = collection.stored.values()
    assert len(rows) == 60


def test_collections_of_replaced_views_are_dropped(
    kb: KnowledgeBase, collection: type[MemoryCollection]
) -> None:
    update(kb)
    [before] = collection.stored
    kb.reindex("default", SeededEmbedder("other-8"))
    assert update(kb) == 60
    [after] = collection.stored
    assert after != before


def test_two_processes_copy_one_after_the_other(kb: KnowledgeBase, database: str) -> None:
    with opened(database) as other:
        assert update(kb) == update(other) == 60
        other.add([text_example("more")])
        assert update(kb) == 61


def test_url_has_a_scheme_host_port_and_database() -> None:
    given = MilvusUrl.parse("milvus://root:p%40ss@db.example:1953/vectors")
    assert (given.address, given.database) == ("http://db.example:1953", "vectors")
    assert given.token == "root:p@ss" and "p@ss" not in repr(given)
    given = MilvusUrl.parse("milvus+tls://key@db.example")
    assert (given.address, given.token) == ("https://db.example:19530", "key")
    assert given.name == "milvus+tls://db.example:19530/default"


@pytest.mark.parametrize(
    "url",
    ["http://s3cret@host", "milvus://", "milvus://s3cret@h:port", "milvus://s3cret@h/a/b", "x"],
)
def test_invalid_url_is_not_quoted(url: str) -> None:
    with pytest.raises(SettingError, match="vectors") as caught:
        MilvusUrl.parse(url)
    assert "s3cret" not in str(caught.value) + caught.value.hint


def test_files_have_no_vectors_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="PostgreSQL"):
        KnowledgeBase.open(tmp_path / "new.db", SeededEmbedder(), vectors=URL)
    assert not list(tmp_path.iterdir())


def test_missing_client_names_its_extra(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "bottega.errors.find_spec", lambda name: None if name == "pymilvus" else name
    )
    with pytest.raises(MissingDependencyError, match="pymilvus") as caught:
        KnowledgeBase.open(database, SeededEmbedder(), vectors=URL)
    assert "[milvus]" in caught.value.hint


def test_closed_port_is_reported_without_the_password(database: str) -> None:
    pytest.importorskip("pymilvus")
    url = f"milvus://root:s3cret@127.0.0.1:{free_port()}/default"
    with pytest.raises(StoreUnavailableError, match="cannot be reached") as caught:
        KnowledgeBase.open(database, SeededEmbedder(), vectors=url)
    assert "s3cret" not in str(caught.value) + caught.value.hint
    assert "vectors=" in caught.value.hint
