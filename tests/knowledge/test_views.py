from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bottega.errors import (
    EmbedderMismatchError,
    EmptyKnowledgeBaseError,
    NotFoundError,
    SettingError,
    StoreError,
)
from bottega.knowledge import KnowledgeBase, View
from bottega.types import Example, ExampleChange, Query
from tests.knowledge.doubles import SeededEmbedder, text_example, vector_of


def answers(example: Example) -> Query:
    return Query(example.answer)


def two() -> dict[str, View]:
    return {"text": View(SeededEmbedder("t")), "keywords": View(SeededEmbedder("k"), answers)}


def test_each_view_searches_its_own_content(tmp_path: Path) -> None:
    path = tmp_path / "kb.db"
    with KnowledgeBase.open(path, two()) as kb:
        kb.add([text_example("a", "one"), text_example("b", "two"), text_example("one", "three")])
        assert kb.search(Query("one"), 1)[0].example.query.text == "one"
        assert kb.search(Query("one"), 1, by="keywords")[0].example.query.text == "a"
        assert kb.stats().views == {"text": "t", "keywords": "k"}
        stored = kb.vectors(kb.ids(), by="keywords")
        assert stored.dtype == np.float32
        np.testing.assert_array_equal(stored[1], vector_of(Query("two")))
    with KnowledgeBase.open(path, two()) as kb:
        assert kb.search(Query("two"), 1, by="keywords")[0].example.query.text == "b"


def test_search_by_vectors_equals_search_by_queries(tmp_path: Path) -> None:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as kb:
        kb.add([text_example(f"q{i}") for i in range(9)])
        query = Query("q3")
        found = kb.nearest(vector_of(query)[None], 4)
        assert found == [kb.search(query, 4)]
        own = replace(query, id=found[0][0].example.id)
        (without,) = kb.nearest(vector_of(query)[None], 4, excluded_for=[own])
        assert "q3" not in [c.example.query.text for c in without]
        assert without == kb.search(own, 4)
        with pytest.raises(NotFoundError):
            kb.vectors(["0123456789abcdef"])
        assert kb.vectors([]).shape == (0, 8)


@pytest.fixture(params=["file", "postgres"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("database"))
    return str(tmp_path / "kb.db")


def test_dropped_view_is_missed_only_where_it_is_searched(path: str) -> None:
    optional = {name: replace(view, optional=name == "keywords") for name, view in two().items()}
    with KnowledgeBase.open(path, optional, namespace="a") as kb:
        kb.add([text_example("a", "one"), text_example("b", "two")])
        assert kb.search(Query("two"), 1, by="keywords")[0].example.query.text == "b"
        with KnowledgeBase.open(path, None) as other:
            other.drop_view("keywords")
            assert other.views().keys() == {"text"}
            with pytest.raises(SettingError, match="only view"):
                other.drop_view("text")
        assert kb.add([text_example("e", "five")]).new == 1  # not stored with the dropped view
        assert kb.search(Query("b"), 1)[0].example.query.text == "b"
        with pytest.raises(SettingError, match="'keywords' does not exist"):
            kb.search(Query("two"), 1, by="keywords")
        with KnowledgeBase.open(path, optional, namespace="a") as other:
            other.reindex("keywords", optional["keywords"])
        assert kb.search(Query("five"), 1, by="keywords")[0].example.query.text == "e"
        assert kb.add([text_example("f", "six")]).new == 1
        with KnowledgeBase.open(path, None) as other:
            other.drop_view("keywords")
    with KnowledgeBase.open(path, optional, namespace="a") as kb:
        kb.add([text_example("c", "three")])
        assert kb.reindex("keywords", optional["keywords"]) == 5
        assert kb.search(Query("three"), 1, by="keywords")[0].example.query.text == "c"
        kb.add([text_example("d", "four")])
        assert kb.search(Query("four"), 1, by="keywords")[0].example.query.text == "d"
        assert kb.verify(deep=True).problems == ()


def test_dropped_view_leaves_no_index_files(tmp_path: Path) -> None:
    path = tmp_path / "kb.db"
    with KnowledgeBase.open(path, two(), namespace="a", hnsw_above=1) as kb:
        kb.add([text_example(str(number), f"answer {number}") for number in range(4)])
        for name in two():
            kb.search(Query("1"), 1, by=name)
        kb.wait_for_indexes()
    kept = {one.name.split(".")[2] for one in tmp_path.glob("kb.db.*.index")}
    assert kept == {"text", "keywords"}
    with KnowledgeBase.open(path, None) as kb:
        kb.drop_view("keywords")
    assert {one.name.split(".")[2] for one in tmp_path.glob("kb.db.*.index")} == {"text"}


def test_unknown_views_are_an_error() -> None:
    with KnowledgeBase.open(":memory:", two()) as kb:
        with pytest.raises(EmptyKnowledgeBaseError):
            kb.search(Query("a"), 1)
        kb.add([text_example("a")])
        with pytest.raises(SettingError, match="view 'image' does not exist"):
            kb.search(Query("a"), 1, by="image")
    for wrong in ({}, {"a/b": View(SeededEmbedder())}):
        with pytest.raises(SettingError):
            KnowledgeBase.open(":memory:", wrong)


def test_file_stores_its_views(tmp_path: Path) -> None:
    path = tmp_path / "kb.db"
    with KnowledgeBase.open(path, two()) as kb:
        kb.add([text_example("a")])
    # One of them can be searched, but an example stored with it alone would lack the other.
    with KnowledgeBase.open(path, {"text": View(SeededEmbedder("t"))}) as kb:
        assert len(kb.search(Query("a"), 1)) == 1
        with pytest.raises(SettingError, match="keywords"):
            kb.add([text_example("b")])
    with KnowledgeBase.open(path, SeededEmbedder("k")) as bare:
        assert len(bare.search(Query("yes"), 1)) == 1
    with pytest.raises(EmbedderMismatchError, match=r"'t'.*'other'"):
        KnowledgeBase.open(path, {"text": View(SeededEmbedder("other"))})
    with pytest.raises(EmbedderMismatchError, match=r"'t'.*'other'"):
        KnowledgeBase.open(path, SeededEmbedder("other"))
    with pytest.raises(StoreError, match="view 'image' does not exist") as raised:
        KnowledgeBase.open(path, {**two(), "image": View(SeededEmbedder("i"))})
    assert "reindex" in raised.value.hint


def test_namespaces_are_separate(tmp_path: Path) -> None:
    path = tmp_path / "kb.db"
    with (
        KnowledgeBase.open(path, SeededEmbedder(), namespace="one") as one,
        KnowledgeBase.open(path, SeededEmbedder(), namespace="two") as two,
    ):
        one.add([text_example("a", "x"), text_example("b", "x")])
        assert two.add([text_example("a", "x"), text_example("c", "z")]).new == 2
        a = one.ids()[0]
        assert a == two.ids()[0]
        assert one.labels() == ["x"]
        assert two.labels() == ["x", "z"]
        assert {c.example.query.text for c in one.search(Query("c"), 9)} == {"a", "b"}
        assert {c.example.query.text for c in two.search(Query("c"), 9)} == {"a", "c"}
        with pytest.raises(NotFoundError):
            one.get(two.ids()[1])
        assert one.delete([a]) == 1
        assert (len(one), len(two)) == (1, 2)
        assert two.get(a).query.text == "a"
        assert (one.stats().examples, two.stats().namespace) == (1, "two")
        with KnowledgeBase.open(path, SeededEmbedder()) as outside:
            assert len(outside) == 0
            with pytest.raises(EmptyKnowledgeBaseError):
                outside.search(Query("a"), 1)


def test_changes_report_additions_and_deletions() -> None:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as kb:
        kb.add([text_example("a"), text_example("b")])
        a, b = kb.ids()
        first = list(kb.changes(0))
        assert [(c.id, c.deleted) for c in first] == [(a, False), (b, False)]
        kb.delete([a])
        kb.add([text_example("a")])
        assert [(c.id, c.deleted) for c in kb.changes(first[-1].seq)] == [(a, True), (a, False)]
        derived: set[str] = set()
        for change in kb.changes():
            derived = derived - {change.id} if change.deleted else derived | {change.id}
        assert derived == set(kb.ids())
        last = list(kb.changes())[-1].seq
        assert list(kb.changes(last)) == []
        assert isinstance(first[0], ExampleChange)
