"""Searches with invalid vectors and concurrent changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from bottega.errors import EmbeddingError, SettingError, StoreError
from bottega.knowledge import KnowledgeBase, TokenEmbedder
from bottega.knowledge.index.vector_index import VectorMetric
from bottega.knowledge.sqlite.rows import SqliteRows
from bottega.protocols import Vectors
from bottega.types import Query
from tests.knowledge.doubles import SeededEmbedder, rows_of, search_of, text_example, vector_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kb.db"


class Wrong(SeededEmbedder):
    """Embedder with valid vectors for examples and invalid ones for queries."""

    made: object = None

    def embed(self, queries: Sequence[Query]) -> Vectors:
        vectors = super().embed(queries)
        return vectors if self.made is None else self.made  # type: ignore[return-value]


@pytest.mark.parametrize(
    "made",
    [
        np.full((1, 8), np.nan, np.float32),
        np.full((1, 8), np.inf, np.float32),
        np.full((1, 8), 1e30, np.float32),
        np.full((1, 8), 1e300),
        np.ones((2, 8), np.float32),
        np.ones((0, 8), np.float32),
        [[1.0], [1.0, 2.0]],
        ["a"],
    ],
)
@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_invalid_query_vector_is_an_error(made: object, metric: VectorMetric) -> None:
    embed = Wrong()
    with KnowledgeBase.open(":memory:", embed, metric=metric) as kb:
        kb.add([text_example("a"), text_example("b")])
        embed.made = made
        with pytest.raises(EmbeddingError, match="returned"):
            kb.search(Query("a"), 1)
        with pytest.raises(EmbeddingError, match="returned"):
            kb.add([text_example("c")])


def test_lone_surrogate_is_an_error() -> None:
    with KnowledgeBase.open(":memory:", TokenEmbedder.bundled()) as kb:
        kb.add([text_example("a cat")])
        assert kb.search(Query("a cat \N{CAT FACE}"), 1)
        with pytest.raises(EmbeddingError, match="surrogates"):
            kb.search(Query("a cat \ud83d"), 1)


def test_search_rejects_vectors_that_are_not_finite() -> None:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as kb:
        kb.add([text_example("a")])
        with pytest.raises(SettingError, match="NaN"):
            kb.nearest(np.full((1, 8), np.nan, np.float32), 1)


@pytest.mark.parametrize(
    "beside",
    [
        lambda kb: kb.verify(),
        lambda kb: kb.reindex("default", SeededEmbedder()),
    ],
)
def test_search_during_a_rebuild_misses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, beside: Callable[[KnowledgeBase], object]
) -> None:
    filling, go_on = Event(), Event()
    read = SqliteRows.vectors_after

    def slowly(rows: SqliteRows, key: int, limit: int, view: int) -> list[tuple[int, Vectors]]:
        page = read(rows, key, 10, view)
        filling.set()
        go_on.wait(0.1)
        return page

    found: list[int] = []
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example(f"q{i}") for i in range(30)])
        monkeypatch.setattr(SqliteRows, "vectors_after", slowly)
        vectors = vector_of(Query("q1"))[None]
        search = Thread(target=lambda: found.append(len(kb.nearest(vectors, 99)[0])))
        search.start()
        filling.wait()
        upkeep = Thread(target=beside, args=[kb])
        upkeep.start()
        search.join()
        upkeep.join()
        go_on.set()
        assert found == [30]
        assert len(kb.search(Query("q1"), 99)) == 30


def test_handle_survives_reindexing_twice(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder("A")) as kb:
        kb.add([text_example("q")])
        assert kb.search(Query("q"), 1)
        with KnowledgeBase.open(path, None) as other:
            other.reindex("default", SeededEmbedder("B"))
            other.reindex("default", SeededEmbedder("A"))
        assert kb.search(Query("q"), 1)[0].score == pytest.approx(1.0)


def test_default_view_has_one_index(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("q")])
        kb.search(Query("q"), 1)
        kb.search(Query("q"), 1, by="default")
        assert len(search_of(kb)._followers) == 1


def test_unlogged_deletion_does_not_block_search(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("a"), text_example("b"), text_example("c")])
        kb.search(Query("a"), 1, within=kb.ids()[:1])
        with rows_of(kb).transaction() as connection:
            connection.execute("DELETE FROM examples WHERE question = 'c'")
        assert {c.example.query.text for c in kb.search(Query("c"), 3)} == {"a", "b"}


def test_inconsistent_log_has_a_hint(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("a")])
        monkeypatch.setattr(SqliteRows, "by_keys", lambda self, keys: {})
        with pytest.raises(StoreError) as raised:
            kb.search(Query("a"), 1)
        assert "--repair" in raised.value.hint


def test_vector_is_found_while_another_process_annotates(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SqliteRows.keys
    with (
        KnowledgeBase.open(path, SeededEmbedder()) as kb,
        KnowledgeBase.open(path, SeededEmbedder()) as other,
    ):
        kb.add([text_example("a")])
        (id,) = kb.ids()

        def keys(rows: SqliteRows, ids: Collection[str]) -> dict[str, int]:
            found = read(rows, ids)
            if rows is rows_of(kb):
                other.annotate(id, rationale="because")
            return found

        monkeypatch.setattr(SqliteRows, "keys", keys)
        np.testing.assert_allclose(kb.vectors([id]), vector_of(Query("a"))[None])


class Wider(SeededEmbedder):
    """Embedder with the same fingerprint and another dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.dimension = 16

    def embed(self, queries: Sequence[Query]) -> Vectors:
        return np.tile(super().embed(queries), 2)


def test_other_dimension_with_the_same_fingerprint_is_rejected(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("a")])
    with KnowledgeBase.open(path, Wider()) as kb:
        with pytest.raises(StoreError, match="8 numbers"):
            kb.add([text_example("b")])
        with pytest.raises(StoreError, match="8 numbers"):
            kb.reindex("default", Wider())
        with pytest.raises(SettingError, match=r"shape \(n, 8\)"):
            kb.search(Query("a"), 1)
        assert len(kb) == 1


@pytest.mark.parametrize("first", [True, False])
def test_vector_with_a_wrong_length_is_reported(path: Path, first: bool) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("a")])
        if not first:
            kb.search(Query("a"), 1)
        kb.add([text_example("b")])
        with rows_of(kb).transaction() as connection:
            connection.execute("UPDATE vectors SET vector = x'0000803f' WHERE key = 2")
        with pytest.raises(StoreError, match="row 2") as raised:
            kb.search(Query("a"), 1)
        assert "--repair" in raised.value.hint
        kb.verify(repair=True)
        assert len(kb.search(Query("a"), 9)) == 2


def test_invalid_ids_are_an_error(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("a")])
        uses: list[Callable[[], object]] = [
            lambda: kb.get("\ud83d" * 5),
            lambda: kb.search(Query("a"), 1, within=[f"{kb.ids()[0]}\0"]),
            lambda: kb.delete(["\ud83d" * 5]),
            lambda: kb.search(Query("a", id="\ud83d"), 1),
            lambda: kb.set_note("n", "\ud83d"),
            lambda: list(kb.changes(2**70)),
        ]
        for use in uses:
            with pytest.raises(SettingError):
                use()
        assert len(kb) == 1


def test_embedder_without_a_view_is_an_error(path: Path) -> None:
    with pytest.raises(SettingError) as raised:
        KnowledgeBase.open(path, {"a": SeededEmbedder()})  # type: ignore[dict-item]
    assert "View(embedder)" in raised.value.hint


def test_concurrent_write_does_not_look_like_damage(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("a")])
        with rows_of(kb).transaction() as connection:
            connection.execute("UPDATE examples SET choices = 'no json'")
        with pytest.raises(StoreError, match="damaged") as raised:
            list(kb)
        assert "open it again" in raised.value.hint
