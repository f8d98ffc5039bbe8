"""Search in PostgreSQL while other handles replace views, and by an index with filters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from bottega.errors import EmbedderMismatchError, StoreError
from bottega.knowledge import Eq, KnowledgeBase, View
from bottega.knowledge.postgres import schema
from bottega.protocols import Vectors
from bottega.types import Query
from tests.knowledge.doubles import SeededEmbedder, image_example, text_example


def opened(database: str, **options: object) -> KnowledgeBase:
    return KnowledgeBase.open(database, SeededEmbedder(), **options)  # type: ignore[arg-type]


def test_search_follows_a_view_that_another_handle_replaces(database: str) -> None:
    with opened(database) as one, opened(database) as two:
        one.add([*(text_example(f"q{n}") for n in range(5)), image_example(1)])
        [image] = next(kept for kept in one if kept.query.images).query.images
        before = one.vectors(one.ids()), one.leave_one_out_scores(3), one.search(Query("q1"), 3)
        for fingerprint in ("other-8", SeededEmbedder().fingerprint):
            two.reindex("default", SeededEmbedder(fingerprint))
        assert np.array_equal(one.vectors(one.ids()), before[0])
        two.reindex("default", SeededEmbedder("other-8"))
        two.reindex("default", SeededEmbedder())
        assert np.array_equal(one.leave_one_out_scores(3), before[1])
        assert one.search(Query("q1"), 3) == before[2]
        assert list(one.image_vectors([image.sha256])) == [image.sha256]
        two.reindex("default", SeededEmbedder("other-8"))
        for work in (lambda: one.vectors(one.ids()), lambda: one.search(Query("q1"), 1)):
            with pytest.raises(EmbedderMismatchError):
                work()


def test_search_finds_a_view_that_another_handle_adds(database: str) -> None:
    views = {"default": View(SeededEmbedder()), "answers": View(SeededEmbedder(), answer_of)}
    with KnowledgeBase.open(database, views) as one, opened(database) as two:
        two.add([text_example("q1", "a1"), text_example("q2", "a2")])
        with pytest.raises(StoreError, match="'answers' does not exist"):
            one.search(Query("a2"), 1, by="answers")
        two.reindex("answers", views["answers"])
        found = one.search(Query("a2"), 1, by="answers")
        assert [candidate.example.answer for candidate in found] == ["a2"]


def answer_of(example: object) -> Query:
    return Query(example.answer)  # type: ignore[attr-defined]


def force_index(monkeypatch: pytest.MonkeyPatch, more: str = "") -> None:
    """Make the planner use the index of a small table. `more` contains further settings."""
    forced = f"SET enable_sort = off; SET enable_seqscan = off; {more}"
    monkeypatch.setattr(schema, "SESSION", f"{schema.SESSION}; {forced}")


class TwoGroups(SeededEmbedder):
    """Embedder that separates questions by their first letter."""

    def embed(self, queries: Sequence[Query]) -> Vectors:
        sides = np.array([[4.0 if query.text[0] == "a" else -4.0] for query in queries], np.float32)
        return super().embed(queries) + sides


def test_filter_on_distant_rows_is_exact(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_index(monkeypatch, "SET hnsw.max_scan_tuples = 1")
    rows = [text_example(f"{side}{n}", tags={"side": side}) for n in range(150) for side in "ab"]
    with KnowledgeBase.open(database, TwoGroups(), hnsw_above=30) as kb:
        kb.add(rows)
        wanted = Eq("tags.side", "b")
        exact = kb.search(Query("a-new"), 40, where=wanted)
        assert len(exact) == 40
        kb.wait_for_indexes()
        assert kb.search(Query("a-new"), 40, where=wanted) == exact  # the index finds fewer


def test_index_returns_no_deleted_example(database: str) -> None:
    with opened(database, hnsw_above=100) as one, opened(database, hnsw_above=100) as two:
        one.add([text_example(f"q{n}") for n in range(150)])
        one.search(Query("new"), 10)
        one.wait_for_indexes()
        statistics = "SELECT 1 FROM pg_stats WHERE tablename = 'kb_vectors_1'"
        assert one._rows.read(statistics)  # type: ignore[attr-defined]
        for _ in range(3):
            found = [str(candidate.example.id) for candidate in one.search(Query("new"), 10)]
            two.delete(found)
            later = one.search(Query("new"), 10)
            assert len(later) == 10 and not {one.example.id for one in later} & set(found)


class ScaledEmbedder(SeededEmbedder):
    """Embedder of vectors whose norm is the number at the end of the question."""

    def embed(self, queries: Sequence[Query]) -> Vectors:
        norms = np.array([[float(query.text.split()[-1])] for query in queries], np.float32)
        return super().embed(queries) * norms


SCALED = [text_example(f"{n} {norm}") for n in range(50) for norm in ("1e-9", "1", "1e6")]


def test_cosine_index_accepts_vectors_of_any_norm(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_index(monkeypatch)
    with KnowledgeBase.open(database, ScaledEmbedder(), hnsw_above=30) as kb:
        kb.add(SCALED[:60])
        exact = kb.search(Query("new 1e6"), 20)
        kb.wait_for_indexes()
        assert kb.search(Query("new 1e6"), 20) == exact
        kb.add(SCALED)
        for example in SCALED:
            [found] = kb.search(example.query, 1)
            assert found.example.query.text == example.query.text


def test_vector_of_zeros_has_similarity_0(database: str) -> None:
    with KnowledgeBase.open(database, ScaledEmbedder()) as kb:
        kb.add([text_example("a 0"), text_example("b 1")])
        found = [(one.example.query.text, one.score) for one in kb.search(Query("b 1"), 2)]
        assert found == [("b 1", pytest.approx(1.0)), ("a 0", 0.0)]
        assert [one.score for one in kb.search(Query("c 0"), 2)] == [0.0, 0.0]


def test_l2_index_rejects_large_values(database: str) -> None:
    with KnowledgeBase.open(database, ScaledEmbedder(), metric="l2", hnsw_above=30) as kb:
        kb.add(text_example(f"{n} 1") for n in range(50))
        kb.search(Query("new 1"), 1)
        kb.wait_for_indexes()
        with pytest.raises(StoreError, match="absolute values above 65,504"):
            kb.add([text_example("large 1e6")])
        assert len(kb) == 50
