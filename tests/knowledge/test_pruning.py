"""Pruning of the change log, and its effect on readers of older changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, rule

from bottega.errors import LogPrunedError
from bottega.knowledge import KnowledgeBase
from bottega.knowledge.sqlite import writes
from bottega.types import Query
from tests.knowledge.doubles import SeededEmbedder, rows_of, text_example
from tests.knowledge.test_store_model import HANDLES, TwoHandles

KEPT = 10


@pytest.fixture(autouse=True)
def short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        shorten(patched)
        yield


def shorten(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(writes, "KEPT_CHANGES", KEPT)
    patched.setattr(writes, "CHECK_EVERY", 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kb.db"


def opened(path: Path, hnsw_above: int = 1000, namespace: str = "") -> KnowledgeBase:
    embed = SeededEmbedder()
    return KnowledgeBase.open(path, embed, capacity=20, hnsw_above=hnsw_above, namespace=namespace)


def churn(kb: KnowledgeBase, start: int, end: int) -> None:
    for number in range(start, end):
        kb.add([text_example(str(number))])


def logged(kb: KnowledgeBase) -> int:
    return int(rows_of(kb).read("SELECT count(*) FROM changes")[0][0])


def texts(kb: KnowledgeBase) -> set[str]:
    return {c.example.query.text for c in kb.search(Query("any"), 1000)}


def test_log_of_a_full_store_stops_growing(path: Path) -> None:
    with opened(path) as kb:
        churn(kb, 0, 300)
        assert logged(kb) <= 20 + 3 * KEPT
        assert rows_of(kb).last_seq() == 580
        assert [c.id for c in kb.changes() if not c.deleted] == kb.ids()
        assert kb.verify().problems == ()


def test_log_is_pruned_at_intervals(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "CHECK_EVERY", 10)
    with opened(path) as kb:
        churn(kb, 0, 20)
        pruned = list[int]()
        before = logged(kb)
        for number in range(20, 80):  # each adds one row and evicts one: two changes
            churn(kb, number, number + 1)
            if (now := logged(kb)) != before + 2:
                pruned.append(rows_of(kb).last_seq())
            before = now
        assert pruned == [30, 50, 70, 90, 110, 130]


def test_log_without_deletions_keeps_everything(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        churn(kb, 0, 100)
        assert logged(kb) == 100
        assert [c.id for c in kb.changes()] == kb.ids()


@pytest.mark.parametrize("hnsw_above", [5, 1000])
def test_old_handle_rebuilds_its_index(path: Path, hnsw_above: int) -> None:
    with opened(path, hnsw_above) as one, opened(path, hnsw_above) as two:
        churn(one, 0, 20)
        assert len(texts(two)) == 20
        two.wait_for_indexes()
        churn(one, 20, 200)
        assert texts(two) == {str(number) for number in range(180, 200)}
        two.wait_for_indexes()
        churn(one, 200, 203)
        assert texts(two) == {str(number) for number in range(183, 203)}


def test_old_index_file_is_ignored(path: Path) -> None:
    with opened(path, hnsw_above=5) as kb:
        churn(kb, 0, 20)
        texts(kb)
        kb.wait_for_indexes()
    with opened(path) as kb:
        churn(kb, 20, 200)
        assert kb.verify().problems == ()
    with opened(path, hnsw_above=5) as kb:
        assert texts(kb) == {str(number) for number in range(180, 200)}
        kb.wait_for_indexes()
        assert kb.verify().problems == ()


def test_index_file_survives_pruning_of_older_changes(path: Path) -> None:
    with opened(path, hnsw_above=5) as kb:
        churn(kb, 0, 35)
        texts(kb)
        kb.wait_for_indexes()
    with opened(path) as kb:
        for number in range(35, 60):
            churn(kb, number, number + 1)
            assert kb.verify().problems == ()


def test_old_reader_gets_an_error(path: Path) -> None:
    with opened(path) as kb, opened(path, namespace="other") as other:
        churn(kb, 0, 5)
        seen = list(kb.changes())[-1].seq
        churn(kb, 5, 100)
        with pytest.raises(LogPrunedError, match="has lost entries"):
            list(kb.changes(seen))
        assert len(list(kb.changes())) >= 20
        seen = list(kb.changes())[-1].seq
        assert list(kb.changes(seen)) == []
        kb.delete([kb.ids()[0]])
        churn(other, 0, 100)
        for since in (seen, 0):  # changes of other namespaces lose nothing here
            seen = list(kb.changes(since))[-1].seq
        assert list(kb.changes(seen)) == []
        assert [c.id for c in kb.changes() if not c.deleted] == kb.ids()


def test_pruning_during_a_read_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.knowledge.base.PAGE", 4)
    with opened(path) as kb:
        churn(kb, 0, 20)
        reading = kb.changes()
        for _ in range(4):
            next(reading)
        churn(kb, 20, 100)
        with pytest.raises(LogPrunedError, match="has lost entries"):
            list(reading)


class PrunedHandles(TwoHandles):
    """As the store model, with pruning and an external reader of each handle's changes."""

    @initialize()
    def begin(self) -> None:
        self.patched = pytest.MonkeyPatch()
        shorten(self.patched)
        self.seen, self.outside = 0, set[str]()
        super().begin()

    @rule(handle=HANDLES)
    def follow(self, handle: int) -> None:
        try:
            self.take(handle)
        except LogPrunedError:
            self.seen, self.outside = 0, set()
            self.take(handle)
        assert self.outside == set(self.derived.values())

    def take(self, handle: int) -> None:
        for change in self.handles[handle].changes(self.seen):
            self.seen = change.seq
            (self.outside.discard if change.deleted else self.outside.add)(change.id)

    def teardown(self) -> None:
        super().teardown()
        self.patched.undo()


TestPrunedHandles = PrunedHandles.TestCase
TestPrunedHandles.settings = settings(max_examples=25, stateful_step_count=25)
