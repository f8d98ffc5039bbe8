from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from bottega.errors import EmbeddingError, EmptyKnowledgeBaseError, NotFoundError, StoreError
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.knowledge.late_interaction.token_index import LateInteractionIndex
from bottega.knowledge.records import unit
from bottega.protocols import Vectors
from bottega.retrieval import DenseRetriever
from bottega.types import Example, ExampleChange, Query
from tests.builders import solid_image

WORDS = ("red", "green", "blue", "round", "square", "small", "large")


class Letters:
    """Embedder with one token per word; counts the documents it embeds."""

    fingerprint = "letters"
    dimension = 16

    def __init__(self) -> None:
        self.embedded = 0

    def embed_queries(self, queries: Sequence[Query]) -> list[Vectors]:
        none = np.empty((0, self.dimension), np.float32)
        return [np.concatenate([none, *map(_word, query.text.split())]) for query in queries]

    def embed_documents(self, queries: Sequence[Query]) -> list[Vectors]:
        self.embedded += len(queries)
        return self.embed_queries(queries)


def _word(word: str) -> Vectors:
    noise = np.random.default_rng(sum(map(ord, word))).normal(size=(1, 16))
    return unit(noise.astype(np.float32))


def example(text: str, shade: int) -> Example:
    return Example(Query(text, (solid_image(shade),)), text)


def word_examples() -> list[Example]:
    return [
        example(f"{one} {other}", 100 * i + j)
        for i, one in enumerate(WORDS)
        for j, other in enumerate(WORDS)
    ]


@pytest.fixture
def knowledge() -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(":memory:", embed=PixelEmbedder()) as opened:
        opened.add(word_examples())
        yield opened


def answers(index: LateInteractionIndex, text: str, k: int) -> list[str]:
    return [candidate.example.answer for candidate in index.search(Query(text), k)]


def test_every_token_matches_its_best(knowledge: KnowledgeBase) -> None:
    with LateInteractionIndex(knowledge, Letters()) as index:
        assert set(answers(index, "red round", 2)) == {"red round", "round red"}
        [select_best] = index.search(Query("red round"), 1)
        assert select_best.score == pytest.approx(2, abs=1e-3)


async def test_dense_retriever_wraps_the_index(knowledge: KnowledgeBase) -> None:
    with LateInteractionIndex(knowledge, Letters()) as index:
        found = await DenseRetriever(index.search)(Query("blue small"), 2)
    assert {c.example.answer for c in found} == {"blue small", "small blue"}


def test_index_follows_the_knowledge_base(knowledge: KnowledgeBase) -> None:
    embed = Letters()
    with LateInteractionIndex(knowledge, embed, batch_size=8) as index:
        assert index.refresh() == len(knowledge) == embed.embedded
        assert index.refresh() == 0
        knowledge.add([example("purple star", 9000)])
        assert answers(index, "purple star", 1) == ["purple star"]
        [id] = [c.example.id for c in index.search(Query("purple star"), 1)]
        assert id is not None
        knowledge.delete([id])
        assert "purple star" not in answers(index, "purple star", 5)
        assert embed.embedded == len(knowledge) + 1


def test_tokens_are_kept_in_the_folder(tmp_path: Path, knowledge: KnowledgeBase) -> None:
    with LateInteractionIndex(knowledge, Letters(), tmp_path) as index:
        index.refresh()
    embed = Letters()
    with LateInteractionIndex(knowledge, embed, tmp_path) as index:
        assert set(answers(index, "red round", 2)) == {"red round", "round red"}
    assert embed.embedded == 0


def test_search_excludes_the_query_itself(knowledge: KnowledgeBase) -> None:
    with LateInteractionIndex(knowledge, Letters()) as index:
        own = Query("red red", (solid_image(0),))
        assert "red red" not in [c.example.answer for c in index.search(own, 3)]
        assert index.search(own, 1, include_self=True)[0].example.answer == "red red"
        assert len(index.search(own, 1000)) == len(knowledge) - 1


def test_within_restricts_the_search(knowledge: KnowledgeBase) -> None:
    ids = knowledge.ids()[:5]
    with LateInteractionIndex(knowledge, Letters()) as index:
        found = index.search(Query("large large"), 10, within=ids)
        assert {c.example.id for c in found} == set(ids)


def test_empty_knowledge_base_is_an_error() -> None:
    with (
        KnowledgeBase.open(":memory:", embed=PixelEmbedder()) as empty,
        LateInteractionIndex(empty, Letters()) as index,
        pytest.raises(EmptyKnowledgeBaseError),
    ):
        index.search(Query("red"), 1)


class Forgetful:
    """Knowledge base that loses an example between one search and its fetch."""

    def __init__(self, knowledge: KnowledgeBase) -> None:
        self._knowledge = knowledge
        self.lose: str | None = None

    def ids(self) -> list[str]:
        return self._knowledge.ids()

    def changes(self, since: int) -> Iterable[ExampleChange]:
        return self._knowledge.changes(since)

    def get_many(self, ids: Sequence[str]) -> list[Example]:
        if self.lose is not None and self.lose in ids:
            self._knowledge.delete([self.lose])
            self.lose = None
            raise NotFoundError("gone")
        return self._knowledge.get_many(ids)


def test_deletion_during_a_search_is_respected(knowledge: KnowledgeBase) -> None:
    forgetful = Forgetful(knowledge)
    with LateInteractionIndex(forgetful, Letters()) as index:
        index.refresh()
        forgetful.lose = index.search(Query("red round"), 1)[0].example.id
        found = index.search(Query("red round"), 1)
    assert {c.example.answer for c in found} <= {"red round", "round red"}
    assert len(knowledge) == len(word_examples()) - 1


class Watched:
    """Source that counts reads of all ids; its log may have gaps or restart."""

    def __init__(self, knowledge: KnowledgeBase) -> None:
        self._knowledge = knowledge
        self.listed = 0
        self.log = "whole"

    def ids(self) -> list[str]:
        self.listed += 1
        return self._knowledge.ids()

    def get_many(self, ids: Sequence[str]) -> list[Example]:
        return self._knowledge.get_many(ids)

    def changes(self, since: int) -> Iterable[ExampleChange]:
        if self.log == "pruned":
            raise StoreError("the log begins later")
        return self._knowledge.changes(0 if self.log == "renumbered" else since)


def test_later_refreshes_read_only_changes(tmp_path: Path) -> None:
    path, embed = tmp_path / "k.db", Letters()
    with (
        KnowledgeBase.open(path, embed=PixelEmbedder()) as knowledge,
        KnowledgeBase.open(path, embed=PixelEmbedder()) as other,
    ):
        other.add(word_examples())
        watched = Watched(knowledge)
        with LateInteractionIndex(watched, embed) as index:
            assert index.refresh() == len(word_examples())
            deleted = other.ids()[::7]
            other.delete(deleted)
            other.add([example("purple star", 9000), example("short lived", 9001)])
            other.delete([other.ids()[-1]])
            other.add([one for one in word_examples() if one.answer == "red red"])
            assert answers(index, "purple star", 1) == ["purple star"]
            found = index.search(Query("red round"), 1000)
            assert {c.example.id for c in found} == set(other.ids())
            assert index.refresh() == 0
    assert watched.listed == 1
    assert embed.embedded == len(word_examples()) + 1


def test_restored_example_keeps_its_tokens(knowledge: KnowledgeBase) -> None:
    embed = Letters()
    with LateInteractionIndex(knowledge, embed) as index:
        index.refresh()
        knowledge.delete(knowledge.ids())
        knowledge.add(word_examples())
        assert index.refresh() == 0
        assert len(index.search(Query("red"), 1000)) == embed.embedded == len(word_examples())


@pytest.mark.parametrize("log", ["pruned", "renumbered"])
def test_gap_in_the_log_compares_ids(knowledge: KnowledgeBase, log: str) -> None:
    watched = Watched(knowledge)
    with LateInteractionIndex(watched, Letters()) as index:
        index.refresh()
        watched.log = log
        knowledge.delete(knowledge.ids()[:3])
        knowledge.add([example("purple star", 9000)])
        assert answers(index, "purple star", 1) == ["purple star"]
        assert {c.example.id for c in index.search(Query("red"), 99)} == set(knowledge.ids())
        watched.log = "whole"
        index.refresh()
        seen = watched.listed
        knowledge.delete(knowledge.ids()[:1])
        assert index.refresh() == 1
    assert watched.listed == seen


def test_deletion_before_embedding_is_skipped(knowledge: KnowledgeBase) -> None:
    forgetful = Forgetful(knowledge)
    with LateInteractionIndex(forgetful, Letters()) as index:
        index.refresh()
        knowledge.add([example("purple star", 9000)])
        forgetful.lose = knowledge.ids()[-1]
        assert "purple star" not in answers(index, "purple star", 99)
    assert len(knowledge) == len(word_examples())


class Racing(Forgetful):
    """Source that deletes requested examples just before every fetch."""

    def __init__(self, knowledge: KnowledgeBase, ids: Sequence[str]) -> None:
        super().__init__(knowledge)
        self._doomed = list(ids)

    def get_many(self, ids: Sequence[str]) -> list[Example]:
        for id in [id for id in ids if id in self._doomed][:1]:
            self._doomed.remove(id)
            self._knowledge.delete([id])
        return super().get_many(ids)


def test_constant_deletion_does_not_fail_searches(knowledge: KnowledgeBase) -> None:
    doomed = knowledge.ids()[:30]
    with LateInteractionIndex(Racing(knowledge, doomed), Letters()) as index:
        found = index.search(Query("red round"), 10)
        assert len(found) == 10
        assert {c.example.id for c in index.search(Query("red"), 99)} == set(knowledge.ids())
    assert not set(knowledge.ids()) & set(doomed)


def test_deletion_during_the_fetch_returns_the_next_best(knowledge: KnowledgeBase) -> None:
    racing = Racing(knowledge, [])
    with LateInteractionIndex(racing, Letters()) as index:
        select_best = [str(c.example.id) for c in index.search(Query("red round"), 8)]
        racing._doomed = select_best[:6]
        found = [str(c.example.id) for c in index.search(Query("red round"), 8)]
    assert len(found) == 8
    assert not set(found) & (set(select_best) - set(knowledge.ids()))


def test_example_without_tokens_is_found_last(knowledge: KnowledgeBase) -> None:
    knowledge.add([example(" ", 9000)])
    with LateInteractionIndex(knowledge, Letters()) as index:
        found = index.search(Query("red round"), 99, exact=True)
        assert len(found) == len(knowledge)
        [blank] = [c for c in found if c.example.answer == " "]
        assert blank.score == 0
        assert blank not in index.search(Query("red round"), 5)
        assert index.refresh() == 0


def test_closed_index_says_so_and_writes_nothing(tmp_path: Path, knowledge: KnowledgeBase) -> None:
    index = LateInteractionIndex(knowledge, Letters(), tmp_path)
    index.refresh()
    index.close()
    index.close()
    knowledge.add([example("purple star", 9000)])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for use in (index.refresh, lambda: index.search(Query("red"), 1)):
        with pytest.raises(StoreError, match="closed") as raised:
            use()
        assert raised.value.hint
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


class Odd(Letters):
    """Embedder with invalid output."""

    def __init__(self, queries: list[Vectors], lost: int = 0) -> None:
        super().__init__()
        self._queries, self._lost = queries, lost

    def embed_queries(self, queries: Sequence[Query]) -> list[Vectors]:
        return self._queries

    def embed_documents(self, queries: Sequence[Query]) -> list[Vectors]:
        return Letters().embed_queries(queries)[self._lost :]


RIGHT = np.ones((1, 16), np.float32)


@pytest.mark.parametrize(
    "embed",
    [
        Odd([]),
        Odd([RIGHT, RIGHT]),
        Odd([RIGHT], lost=1),
        Odd([np.ones((1, 15), np.float32)]),
        Odd([np.ones(16, np.float32)]),
        Odd([RIGHT * np.float32("nan")]),
        Odd([RIGHT * np.float32(1e38)]),
    ],
)
def test_invalid_embedder_output_is_an_embedding_error(
    knowledge: KnowledgeBase, embed: Odd
) -> None:
    with LateInteractionIndex(knowledge, embed) as index, pytest.raises(EmbeddingError) as raised:
        index.search(Query("red"), 3)
    assert raised.value.hint
