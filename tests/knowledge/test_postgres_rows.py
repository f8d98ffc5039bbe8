"""Rows, search and change feed of a knowledge base in PostgreSQL, against one in memory."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from bottega._util.locations import WITHOUT_TABLES
from bottega._util.postgres_database import PostgresDatabase
from bottega.errors import (
    EmbedderMismatchError,
    EmptyKnowledgeBaseError,
    LogPrunedError,
    SettingError,
    StoreError,
    StoreUnavailableError,
)
from bottega.knowledge import Eq, KnowledgeBase, View
from bottega.knowledge.eviction import EVICTIONS
from bottega.knowledge.postgres.schema import WRITE_LOCK
from bottega.types import Example, Query
from tests.builders import example
from tests.knowledge.doubles import SeededEmbedder, image_example, text_example
from tests.postgres import PostgresServer, running_postgres

TEXTS = [text_example(f"q{n}", f"a{n % 3}", tags={"half": str(n % 2)}) for n in range(40)]


@pytest.fixture
def kb(database: str, vectors: dict[str, Any]) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(database, SeededEmbedder(), **vectors) as opened:
        yield opened


def opened(database: str, **options: object) -> KnowledgeBase:
    return KnowledgeBase.open(database, SeededEmbedder(), **options)  # type: ignore[arg-type]


def test_handles_and_namespaces_share_a_database(database: str) -> None:
    with opened(database) as one, opened(database) as two, opened(database, namespace="b") as b:
        one.add(TEXTS[:3])
        assert two.search(Query("q1"), 1)[0].example.query.text == "q1"
        b.add([text_example("q1", "other")])
        assert (len(one), len(b), one.namespaces()) == (3, 1, {"": 3, "b": 1})
        assert [c.example.answer for c in b.search(Query("q1"), 5, include_self=True)] == ["other"]
        assert two.delete(two.ids()[:1]) == 1
        assert len(one) == 2 == len(one.search(Query("q9"), 9))
    with KnowledgeBase.open(database, None) as again:
        assert len(again) == 2 and again.stats().examples == 2


def test_scores_equal_those_of_a_file(kb: KnowledgeBase) -> None:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as memory:
        for store in (kb, memory):
            store.add([*TEXTS, *(image_example(n) for n in range(3))])
        for where in (None, Eq("tags.half", "1")):
            ours, theirs = (s.search(Query("new"), 9, where=where) for s in (kb, memory))
            assert [c.example for c in ours] == [c.example for c in theirs]
            assert [c.score for c in ours] == pytest.approx([c.score for c in theirs], abs=1e-5)
        ids = kb.ids()
        names = [[[id for id, _ in one] for one in s.neighbours(ids, 3)] for s in (kb, memory)]
        assert names[0] == names[1]
        assert all(id not in one for id, one in zip(ids, names[0], strict=True))
        scores = [store.leave_one_out_scores(3) for store in (kb, memory)]
        assert np.sort(scores[0], axis=0) == pytest.approx(np.sort(scores[1], axis=0), abs=1e-5)


@pytest.mark.parametrize("policy", sorted(EVICTIONS.keys() - {"random"}))
def test_policies_evict_the_same_examples_as_in_a_file(database: str, policy: str) -> None:
    kept = []
    for location in (database, ":memory:"):
        evict = EVICTIONS[policy]()
        with opened(location, capacity=12, evict=evict) as kb:
            for n, one in enumerate(TEXTS):
                kb.add([one])
                if n % 4 == 0:
                    kb.used(kb.ids()[:2], saved_usd=0.01 * n)
                if n == 5:
                    kb.pin(kb.ids()[3:4])
            kept.append([one.query.text for one in kb])
    assert kept[0] == kept[1] and len(kept[0]) == 12


def test_annotation_keeps_vectors_and_reports_a_change(kb: KnowledgeBase) -> None:
    kb.add(TEXTS[:2])
    before = list(kb.changes())
    kb.annotate(kb.ids()[0], rationale="why", tags={"more": "1"})
    [one] = [one for one in kb if one.rationale]
    assert (one.query.text, one.tags["more"], one.tags["half"]) == ("q0", "1", "0")
    assert [c.id for c in kb.changes(before[-1].seq)][-1] == one.id
    assert kb.search(Query("q0"), 1, include_self=True)[0].score == pytest.approx(1)
    kb.tag(str(one.id), {"more": "2"})
    assert kb.get(str(one.id)).rationale == "why"
    kb.annotate(str(one.id), rationale=None)
    assert kb.get(str(one.id)).rationale is None


def test_reader_behind_the_pruned_log_starts_again(kb: KnowledgeBase) -> None:
    kb.add(TEXTS[:3])
    kb.delete(kb.ids()[:2])
    kb._rows.read("INSERT INTO kb_pruned VALUES ('', 4)")  # type: ignore[attr-defined]
    with pytest.raises(LogPrunedError, match="after change 3"):
        list(kb.changes(3))
    assert [change.deleted for change in kb.changes(4)] == [True]
    assert [change.id for change in kb.changes() if not change.deleted] == kb.ids()


def test_reader_of_changes_misses_no_concurrent_write(database: str) -> None:
    """A number that is assigned earlier may be committed later; a reader must not pass it."""
    seen: set[str] = set()
    writers = [Thread(target=_write, args=(database, n)) for n in range(4)]
    for writer in writers:
        writer.start()
    with opened(database) as kb:
        last = 0
        while any(writer.is_alive() for writer in writers):
            for change in kb.changes(last):
                seen.add(change.id)
                last = change.seq
        for change in kb.changes(last):
            seen.add(change.id)
        assert seen == set(kb.ids()) and len(seen) == 4 * 15


def _write(database: str, writer: int) -> None:
    rng = random.Random(writer)
    with opened(database) as kb:
        for n in range(15):
            size = rng.choice((1, 1, 3))
            kb.add([text_example(f"{writer} {n} {i}") for i in range(size)][:1])


def test_reindex_serves_the_old_view_until_it_is_complete(database: str) -> None:
    with opened(database) as kb:
        kb.add(TEXTS)
        other = SeededEmbedder("other-8")
        assert kb.reindex("default", other) == len(TEXTS)
        assert kb.search(Query("q3"), 1, include_self=True)[0].example.query.text == "q3"
        assert kb.reindex("questions", View(other, lambda one: Query(one.answer))) == len(TEXTS)
        assert list(kb.views()) == ["default", "questions"]
        assert kb.verify().sound
    with pytest.raises(EmbedderMismatchError), opened(database):
        pass


@pytest.mark.parametrize("view", ["default", "questions"])
def test_insertion_into_changed_views_stores_nothing(database: str, view: str) -> None:
    with opened(database) as one, opened(database) as other:
        assert one.add([image_example(1)]).new == one.add([image_example(2)]).new == 1
        other.reindex(view, View(SeededEmbedder("other-8"), lambda one: Query(one.answer)))
        with pytest.raises((EmbedderMismatchError, SettingError)):
            one.add([image_example(3)])
        assert len(other) == 2 and other.stats().images == 2 and other.verify().sound


def test_insertion_waits_for_another_writer(postgres: PostgresServer, database: str) -> None:
    locks = PostgresDatabase(database, WITHOUT_TABLES)
    with opened(database) as kb, closing(locks):
        kb.add(TEXTS[:1])
        writer = Thread(target=kb.add, args=([text_example("late")],))
        with locks.lock(WRITE_LOCK):
            writer.start()
            writer.join(0.2)
            assert len(kb) == 1
        writer.join()
        assert len(kb) == 2 and len(list(kb.changes())) == 2


def test_verification_finds_a_missing_vector_and_repairs_it(kb: KnowledgeBase) -> None:
    kb.add([*TEXTS[:5], image_example(1)])
    rows = kb._rows
    rows.read("DELETE FROM kb_vectors_1 WHERE key = 2")  # type: ignore[attr-defined]
    report = kb.verify()
    assert [problem.what[:9] for problem in report.problems] == ["1 vector "]
    assert (report.examples, report.images) == (6, 1)
    assert kb.verify(repair=True).sound and kb.verify(deep=True).problems == ()


def test_export_from_a_database_restores_into_a_file(kb: KnowledgeBase, tmp_path: Path) -> None:
    kb.add([*TEXTS[:3], *(image_example(n) for n in range(2))])
    kb.pin(kb.ids()[:1])
    assert kb.export_to(tmp_path / "out") == 5
    with KnowledgeBase.open(tmp_path / "k.db", SeededEmbedder()) as file:
        assert file.import_from(tmp_path / "out").new == 5
        assert list(file) == list(kb)
        assert file.metadata(file.ids()[0]).pinned


def test_index_finds_nearly_the_exact_neighbours(database: str) -> None:
    rng = np.random.default_rng(0)
    many = [text_example(f"t{n}", tags={"part": str(n % 40)}) for n in range(600)]
    with opened(database, hnsw_above=200) as kb:
        kb.add(many)
        # The index is random: a single query may miss several neighbours.
        queries = [Query(f"new {n}") for n in range(20)]
        exact = kb.search_many(queries, 10)
        kb.wait_for_indexes()
        rows = kb._rows.read("SELECT indexname FROM pg_indexes WHERE indexname LIKE '%hnsw%'")  # type: ignore[attr-defined]
        assert [row["indexname"] for row in rows] == ["kb_vectors_1_hnsw_cosine"]
        pairs = zip(kb.search_many(queries, 10), exact, strict=True)
        shared = [len({c.example.id for c in a} & {c.example.id for c in b}) for a, b in pairs]
        assert sum(shared) >= 0.9 * 10 * len(queries)
        part = str(rng.integers(40))
        filtered = kb.search(Query("new"), 15, where=Eq("tags.part", part))
        assert {c.example.tags["part"] for c in filtered} == {part} and len(filtered) == 15


def test_shared_image_stays_with_its_last_example(kb: KnowledgeBase) -> None:
    first, second = example("a", 7), replace(example("b", 7))
    kb.add([first, replace(second, query=replace(second.query, text="other"))])
    kb.delete(kb.ids()[:1])
    [left] = kb
    assert left.query.images == first.query.images
    kb.delete(kb.ids())
    assert kb.stats().images == 0
    with pytest.raises(EmptyKnowledgeBaseError):
        kb.search(Query("q"), 1)


def test_long_vectors_are_refused(database: str) -> None:
    class Long(SeededEmbedder):
        def embed(self, queries: object) -> np.ndarray:
            return np.ones((len(queries), 4001), np.float32)  # type: ignore[arg-type]

    embed = Long("long")
    embed.dimension = 4001
    with KnowledgeBase.open(database, embed) as kb, pytest.raises(StoreError, match="got 4001"):
        kb.add([Example(Query("q"), "a")])


def test_restarted_server_keeps_what_was_acknowledged() -> None:
    with running_postgres() as server, opened(server.url()) as kb:
        kb.add(TEXTS[:3])
        server.stop(signal.SIGQUIT)
        with pytest.raises(StoreUnavailableError):
            kb.add(TEXTS[3:4])
        server.start()
        assert len(kb) == 3
        kb.add(TEXTS[3:4])
        assert len(kb.search(Query("q"), 9)) == 4
