from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from bottega.errors import (
    EmbedderMismatchError,
    EmptyKnowledgeBaseError,
    SettingError,
    StoreBusyError,
    StoreError,
)
from bottega.knowledge import KnowledgeBase, PixelEmbedder, TokenEmbedder
from bottega.knowledge.sqlite.rows import SqliteRows
from bottega.protocols import Embedder
from bottega.types import Example, Query
from tests.builders import example
from tests.knowledge.doubles import SeededEmbedder, image_example, rows_of, text_example


@pytest.fixture
def kb() -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as opened:
        yield opened


def test_nearest_comes_first(kb: KnowledgeBase) -> None:
    kb.add([text_example(f"q{i}") for i in range(20)])
    found = kb.search(Query("q7"), 20)
    assert found[0].example.query.text == "q7"
    assert found[0].score == pytest.approx(1.0)
    assert [c.score for c in found] == sorted((c.score for c in found), reverse=True)


def test_l2_scores_are_negative_distances() -> None:
    with KnowledgeBase.open(":memory:", SeededEmbedder(), metric="l2") as kb:
        kb.add([text_example("a"), text_example("b")])
        assert kb.search(Query("a"), 1)[0].score == pytest.approx(0.0, abs=1e-3)
        assert kb.search(Query("a"), 2)[1].score < 0
        assert kb.stats().metric == "l2"


def test_embedded_query_and_excluded_ids_are_those_of_the_search(kb: KnowledgeBase) -> None:
    kb.add(examples := [example("a", 1), example("b", 2)])
    query = examples[0].query
    [vector] = kb.embed([query])
    own, other = kb.ids()
    assert np.array_equal(vector, kb.vectors([own])[0])
    assert kb.excluded_ids(query) == {own}
    another = replace(query, text="Another question?", id=None)
    assert kb.excluded_ids(another) == {own}
    assert kb.excluded_ids(another, "same-question") == set()
    assert [c.example.id for c in kb.search(another, 5)] == [other]


def test_query_itself_is_excluded_by_default(kb: KnowledgeBase) -> None:
    kb.add(
        [
            image_example(1),
            image_example(1, question="Other?"),
            image_example(2),
            text_example("text"),
        ]
    )
    query = image_example(1).query
    assert [c.example.query.images for c in kb.search(query, 9) if c.example.query.images] == [
        image_example(2).query.images
    ]
    assert len(kb.search(query, 9, include_self=True)) == 4
    stored = kb.get(kb.ids()[3])
    assert stored.id not in {c.example.id for c in kb.search(stored.query, 9)}


def test_large_k_returns_all_examples(kb: KnowledgeBase) -> None:
    kb.add([text_example("a"), text_example("b")])
    assert len(kb.search(Query("c"), 100)) == 2


def test_batch_search_equals_single_searches(kb: KnowledgeBase) -> None:
    kb.add([image_example(i) for i in range(12)])
    queries = [image_example(i).query for i in (3, 40, 5)]
    assert kb.search_many(queries, 4) == [kb.search(query, 4) for query in queries]
    assert kb.search_many([], 4) == []


def test_search_within_ids_finds_only_these(kb: KnowledgeBase) -> None:
    kb.add([text_example(f"q{i}") for i in range(9)])
    chosen = kb.ids()[2:5]
    assert {c.example.id for c in kb.search(Query("x"), 9, within=chosen)} == set(chosen)
    assert kb.search(Query("x"), 9, within=[]) == []


def test_empty_knowledge_base_is_an_error(kb: KnowledgeBase) -> None:
    with pytest.raises(EmptyKnowledgeBaseError) as raised:
        kb.search(Query("a"), 3)
    assert raised.value.hint
    kb.add([text_example("a")])
    kb.delete(kb.ids())
    with pytest.raises(EmptyKnowledgeBaseError):
        kb.search(Query("a"), 3)


@pytest.mark.parametrize("k", [0, -1])
def test_k_must_be_positive(kb: KnowledgeBase, k: int) -> None:
    kb.add([text_example("a")])
    with pytest.raises(SettingError):
        kb.search(Query("a"), k)


def test_examples_persist_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "kb.db"
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([image_example(i, f"label {i}") for i in range(3)])
        before, found = kb.stats(), kb.search(Query("x"), 3)
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        assert kb.stats() == before
        assert kb.search(Query("x"), 3) == found
    assert before.path == str(path)
    assert (before.examples, before.images, before.labels) == (3, 3, 3)
    assert (before.embedder, before.dimension, before.format_version) == ("seeded-8", 8, 1)
    assert before.bytes == path.stat().st_size


def test_mismatch_error_names_both_embedders(tmp_path: Path) -> None:
    path = tmp_path / "kb.db"
    with (
        KnowledgeBase.open(path, SeededEmbedder("late")) as late,
        KnowledgeBase.open(path, SeededEmbedder("early")) as early,
    ):
        with pytest.raises(EmptyKnowledgeBaseError):
            late.search(Query("a"), 1)
        early.add([image_example(1)])
        for use in (lambda: late.add([image_example(2)]), lambda: late.search(Query("a"), 1)):
            with pytest.raises(EmbedderMismatchError, match=r"'early'.*'late'"):
                use()
    with pytest.raises(EmbedderMismatchError, match=r"'early'.*'other'"):
        KnowledgeBase.open(path, SeededEmbedder("other"))


def test_without_an_embedder_rows_can_be_read_and_deleted(tmp_path: Path) -> None:
    path = tmp_path / "kb.db"
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([image_example(1), image_example(2)])
    with KnowledgeBase.open(path, None) as kb:
        assert len(list(kb)) == 2
        assert kb.stats().embedder == "seeded-8"
        assert kb.delete(kb.ids()[:1]) == 1
        with pytest.raises(SettingError, match="without an embedder"):
            kb.search(Query("a"), 1)
        with pytest.raises(SettingError, match="without an embedder"):
            kb.add([image_example(3)])


def test_invalid_settings_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="dot"):
        KnowledgeBase.open(":memory:", None, metric="dot")  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="does not exist"):
        KnowledgeBase.open(tmp_path / "gone.db", None, create=False)
    with (
        KnowledgeBase.open(":memory:", SeededEmbedder()) as kb,
        pytest.raises(SettingError, match="batch_size"),
    ):
        kb.add([image_example(1)], batch_size=0)


@pytest.mark.parametrize("create", [True, False])
def test_empty_file_without_embedder_is_an_error(tmp_path: Path, create: bool) -> None:
    path = tmp_path / "empty.db"
    path.touch()
    with pytest.raises(StoreError, match="is empty, not a knowledge base"):
        KnowledgeBase.open(path, SeededEmbedder() if not create else None, create=create)
    assert path.stat().st_size == 0
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        assert len(kb) == 0


def test_null_byte_is_refused_and_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="file name contains a NUL"):
        KnowledgeBase.open(f"{tmp_path}/nul\0tail.db", SeededEmbedder())
    assert not list(tmp_path.iterdir())


def test_file_name_that_is_not_utf8_is_opened_and_shown(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.db")
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        assert kb.stats().path.endswith("caf\ufffd.db")
    assert path.exists()


def test_busy_file_can_be_written_later(tmp_path: Path) -> None:
    path = str(tmp_path / "kb.db")
    with (
        KnowledgeBase.open(path, SeededEmbedder()) as holder,
        KnowledgeBase(SqliteRows(path, busy_seconds=0.05), SeededEmbedder(), path=path) as other,
    ):
        holder.add([image_example(1)])

        def while_writing() -> Iterator[Example]:
            yield image_example(2)

        with rows_of(holder).transaction():
            with pytest.raises(StoreBusyError):
                other.add(while_writing())
            assert len(other.search(Query("x"), 5)) == 1
        assert other.add(while_writing()).new == 1
        assert len(holder.search(Query("x"), 5)) == 2


def test_threads_may_add_search_and_delete_at_once(kb: KnowledgeBase) -> None:
    kb.add([text_example("first")])
    failures: list[Exception] = []

    def work(number: int) -> None:
        try:
            for i in range(10):
                kb.add([text_example(f"{number}/{i}")])
                nearest = kb.search(Query(f"{number}/{i}"), 1)[0].example
                assert nearest.query.text == f"{number}/{i}"
                if i % 2:
                    kb.delete([str(nearest.id)])
        except Exception as error:
            failures.append(error)

    threads = [Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(kb) == 21


WRITER = """
import sys, time
from bottega.knowledge import KnowledgeBase
from tests.knowledge.doubles import SeededEmbedder, text_example
kb = KnowledgeBase.open(sys.argv[1], SeededEmbedder())
for i in range(1000):
    kb.add([text_example(f"q{i}")])
    print(f"q{i}", flush=True)
    time.sleep(0.001)
"""


def test_examples_of_a_killed_process_are_visible(tmp_path: Path) -> None:
    path = tmp_path / "kb.db"
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("mine")])
        command = [sys.executable, "-c", WRITER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            acknowledged = [writer.stdout.readline().strip() for _ in range(20)]
            assert kb.search(Query("q19"), 1)[0].example.query.text == "q19"
            writer.send_signal(signal.SIGKILL)
            acknowledged += writer.stdout.read().split()
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        assert {"mine", *acknowledged} <= {example.query.text for example in kb}
        assert kb.add([text_example("later")]).new == 1


@pytest.mark.parametrize("namespace", [None, 5, "\ud83d", "a\0b"])
def test_namespace_is_a_text(namespace: str) -> None:
    with pytest.raises(SettingError, match="namespace"):
        KnowledgeBase.open(":memory:", SeededEmbedder(), namespace=namespace)


@pytest.mark.parametrize("embed", [PixelEmbedder(), TokenEmbedder.bundled()])
def test_a_file_opens_with_its_own_embedder(tmp_path: Path, embed: Embedder) -> None:
    path = tmp_path / "k.db"
    with KnowledgeBase.open(path, embed) as knowledge:
        knowledge.add([example("one", 10), example("two", 200)])
        expected = knowledge.search(example("?", 60).query, 2)
    with KnowledgeBase.open(path) as knowledge:
        assert knowledge.embedder().fingerprint == embed.fingerprint
        assert knowledge.search(example("?", 60).query, 2) == expected


def test_a_file_without_a_known_embedder_needs_one(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="embed is missing for the new file"):
        KnowledgeBase.open(tmp_path / "new.db")
    assert not (tmp_path / "new.db").exists()
    with KnowledgeBase.open(tmp_path / "k.db", SeededEmbedder()) as knowledge:
        knowledge.add([example("one", 10)])
    with pytest.raises(StoreError, match="names no embedder") as raised:
        KnowledgeBase.open(tmp_path / "k.db")
    assert "embed=" in raised.value.hint


def test_leave_one_out_compares_each_example_with_the_others() -> None:
    with KnowledgeBase.open(":memory:", PixelEmbedder()) as knowledge:
        assert knowledge.leave_one_out_scores(2).shape == (0, 2)
        knowledge.add(example(str(i), 40 * i) for i in range(5))
        scores = knowledge.leave_one_out_scores(4)
        assert scores.shape == (5, 4)
        assert (scores[:, :-1] >= scores[:, 1:]).all()
        assert knowledge.leave_one_out_scores(5).shape == (0, 5)
        assert knowledge.leave_one_out_scores(2, sample=3).shape == (3, 2)
        vectors = knowledge.vectors(knowledge.ids())
    others = np.sort(vectors @ vectors.T, axis=1)[:, :-1]
    assert np.allclose(np.sort(scores.ravel()), np.sort(others.ravel()), atol=1e-5)


def test_leave_one_out_excludes_further_questions_about_the_same_image() -> None:
    with KnowledgeBase.open(":memory:", PixelEmbedder()) as knowledge:
        knowledge.add(example(text, grey) for text in "ab" for grey in (0, 120, 240))
        assert knowledge.leave_one_out_scores(4).shape == (6, 4)
        assert knowledge.leave_one_out_scores(5).shape == (0, 5)
