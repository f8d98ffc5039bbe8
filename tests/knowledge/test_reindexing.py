"""Reindexing stored examples with another embedder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bottega.errors import EmbedderMismatchError, EmbeddingError, StoreError
from bottega.knowledge import KnowledgeBase, View
from bottega.knowledge.sqlite.rows import SqliteRows
from bottega.protocols import Vectors
from bottega.types import Query
from tests.knowledge.doubles import (
    ImageOnlyEmbedder,
    SeededEmbedder,
    image_example,
    rows_of,
    text_example,
    vector_of,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kb.db"


class Stopping(SeededEmbedder):
    """Embedder that fails after some batches, like a killed process."""

    def __init__(self, batches: int) -> None:
        super().__init__("new")
        self.left = batches

    def embed(self, queries: Sequence[Query]) -> Vectors:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return -super().embed(queries)


def test_interrupted_reindex_resumes(path: Path) -> None:
    reported: list[int] = []
    with KnowledgeBase.open(path, SeededEmbedder("old")) as kb:
        kb.add([text_example(f"q{i}") for i in range(10)])
        with pytest.raises(KeyboardInterrupt):
            kb.reindex("default", Stopping(2), batch_size=2)
        assert kb.search(Query("q3"), 1)[0].score == pytest.approx(1.0)  # by the old vectors
        assert kb.stats().views == {"default": "old"}
        kb.add([text_example("later")])
        rest = Stopping(99)
        assert kb.reindex("default", rest, batch_size=2, progress=reported.append) == 7
        assert (rest.embedded, reported) == (7, [4, 2, 2, 2, 1])  # four were there
        assert kb.search(Query("q3"), 1)[0].example.query.text == "q3"
        assert kb.vectors(kb.ids()[:1]) == pytest.approx(-vector_of(Query("q0"))[None])
        assert kb.reindex("default", rest) == 0
        assert kb.verify().problems == ()
    with pytest.raises(EmbedderMismatchError, match=r"'new'.*'old'"):
        KnowledgeBase.open(path, SeededEmbedder("old"))


def test_replaced_vectors_reach_other_handles(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder("old")) as kb:
        kb.add([text_example("a")])
        assert kb.search(Query("a"), 1)
        with KnowledgeBase.open(path, None) as other:
            assert other.reindex("default", SeededEmbedder("new")) == 1
        for use in (lambda: kb.search(Query("a"), 1), lambda: kb.add([text_example("b")])):
            with pytest.raises(EmbedderMismatchError, match=r"'new'.*'old'"):
                use()


def test_new_view_does_not_disturb_other_handles(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("a"), text_example("b")])
        kb.reindex("other", SeededEmbedder("another"))
        assert kb.search(Query("a"), 1)[0].example.query.text == "a"
        kb.reindex("default", SeededEmbedder("third"))
        assert kb.search(Query("a"), 1)[0].example.query.text == "a"


def test_view_can_be_added_in_every_namespace(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder(), namespace="one") as one:
        one.add([text_example("a", "first")])
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("b", "second"), text_example("c", "third")])
        answers = View(SeededEmbedder("a"), lambda example: Query(example.answer))
        assert kb.reindex("answers", answers) == 3
    both = {"default": View(SeededEmbedder()), "answers": answers}
    with KnowledgeBase.open(path, both) as kb:
        assert kb.search(Query("third"), 1, by="answers")[0].example.query.text == "c"
        kb.add([text_example("d", "fourth")])
    with KnowledgeBase.open(path, both, namespace="one") as one:
        assert one.search(Query("first"), 1, by="answers")[0].score == pytest.approx(1.0)


def test_reindex_names_an_example_that_fails(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([image_example(1), text_example("no image"), image_example(2)])
        with pytest.raises(EmbeddingError, match=kb.ids()[1]):
            kb.reindex("default", ImageOnlyEmbedder("images"))
        kb.delete([kb.ids()[1]])
        kb.reindex("default", ImageOnlyEmbedder("images"))
        assert len(kb.search(image_example(3).query, 9)) == 2


class Overtaken(SeededEmbedder):
    """Embedder that calls a function during its first batch."""

    def __init__(self, fingerprint: str, meanwhile: Callable[[], object]) -> None:
        super().__init__(fingerprint)
        self.meanwhile = [meanwhile]

    def embed(self, queries: Sequence[Query]) -> Vectors:
        if self.meanwhile:
            self.meanwhile.pop()()
        return super().embed(queries)


@pytest.mark.parametrize("stopped", [False, True])
def test_concurrent_reindex_raises_in_one_process(path: Path, stopped: bool) -> None:
    def second() -> None:
        with KnowledgeBase.open(path, None) as other:
            if not stopped:
                other.reindex("default", SeededEmbedder("C"))
                return
            with pytest.raises(KeyboardInterrupt):
                other.reindex("default", Stopping(1), batch_size=2)

    with KnowledgeBase.open(path, SeededEmbedder("A")) as kb:
        kb.add([text_example(f"q{i}") for i in range(6)])
        with pytest.raises(StoreError, match="another process started to reindex"):
            kb.reindex("default", Overtaken("B", second), batch_size=2)
    with KnowledgeBase.open(path, SeededEmbedder("A" if stopped else "C")) as kb:
        assert len(kb.search(Query("q1"), 9)) == 6
        assert kb.verify().problems == ()


def test_reindex_fills_missing_vectors(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("a"), text_example("b")])
        with rows_of(kb).transaction() as connection:
            connection.execute("DELETE FROM vectors WHERE key = 2")
        with KnowledgeBase.open(path, SeededEmbedder()) as other:
            assert len(other.search(Query("b"), 9)) == 1
            assert kb.reindex("default", SeededEmbedder()) == 1
            assert len(other.search(Query("b"), 9)) == 2
        assert kb.verify().problems == ()


def test_killed_reindex_of_an_empty_file_allows_adding(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> bool:
        raise KeyboardInterrupt

    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        with monkeypatch.context() as patched:
            patched.setattr(SqliteRows, "complete_view", killed)
            with pytest.raises(KeyboardInterrupt):
                kb.reindex("default", SeededEmbedder())
        assert kb.add([text_example("a")]).new == 1
        assert kb.search(Query("a"), 1)
