"""Newer answers replace older ones to the same question, unless those are pinned."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.errors import NotFoundError, SettingError
from bottega.knowledge import KnowledgeBase
from bottega.knowledge.sqlite.writes import PINNED_IDS
from bottega.knowledge.stores import RowStore, full_ids
from bottega.protocols import Vectors
from bottega.types import Example, Query
from tests.knowledge.doubles import (
    ErrorList,
    SeededEmbedder,
    damaged_image,
    image_example,
    text_example,
)


@pytest.fixture
def kb() -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as opened:
        yield opened


def answers(kb: KnowledgeBase) -> list[str]:
    return [example.answer for example in kb]


def test_newer_answer_replaces_the_older_one(kb: KnowledgeBase) -> None:
    (old,) = kb.replace([image_example(1, "cat")])
    other, new = kb.replace([image_example(2, "cat"), image_example(1, "dog")])
    assert kb.ids() == [other, new]
    assert old not in kb.ids()
    assert answers(kb) == ["cat", "dog"]
    assert kb.search(Query("What?", image_example(3).query.images), 5)  # the index follows


def test_equal_answer_changes_nothing(kb: KnowledgeBase) -> None:
    first = kb.replace([image_example(1)])
    assert kb.replace([image_example(1)]) == first == kb.ids()


def test_added_example_can_be_replaced(kb: KnowledgeBase) -> None:
    kb.add(
        [
            image_example(1, "cat"),
            image_example(1, "cow"),
            image_example(1, "cat", question="Which?"),
        ]
    )
    kb.replace([image_example(1, "dog")])
    assert answers(kb) == ["cat", "dog"]


def test_pinned_answer_stays(kb: KnowledgeBase) -> None:
    (pinned,) = kb.replace([image_example(1, "cat")])
    kb.pin([str(pinned)])
    bad = ErrorList()
    ids = kb.replace([image_example(1, "dog"), image_example(2, "dog")], on_error=bad)
    assert ids == kb.ids() == [pinned, ids[1]]
    assert answers(kb) == ["cat", "dog"]
    assert kb.metadata(str(pinned)).pinned
    assert not kb.metadata(str(ids[1])).pinned
    assert not bad


def test_unpinned_answer_is_replaced(kb: KnowledgeBase) -> None:
    kb.pin([str(kb.replace([image_example(1, "cat")])[0])])
    kb.replace([image_example(1, "dog")])
    kb.unpin(kb.ids())
    (new,) = kb.replace([image_example(1, "dog")])
    assert kb.ids() == [new]
    assert answers(kb) == ["dog"]
    assert not kb.metadata(str(new)).pinned


@pytest.mark.parametrize("earlier", [None, "cat", "dog"])
@pytest.mark.parametrize("is_pinned", [False, True])
def test_answer_that_is_to_be_pinned_replaces_any(
    kb: KnowledgeBase, earlier: str | None, is_pinned: bool
) -> None:
    kb.add([image_example(2, "cat")])
    if earlier is not None:
        (id,) = kb.replace([image_example(1, earlier)])
        assert not is_pinned or kb.pin([str(id)])
    new = replace(image_example(1, "dog"), tags={"provenance": "human"})
    (stored,) = kb.replace([new], pin=True)
    assert answers(kb) == ["cat", "dog"]
    assert kb.get(str(stored)).tags == new.tags
    assert kb.metadata(str(stored)).pinned and kb.stats().pinned == 1
    (hit,) = kb.search(image_example(1).query, 1, exclude="same-question")
    assert hit.example.answer == "cat"
    assert kb.verify().sound


def test_answer_that_cannot_be_pinned_keeps_the_pinned_one(kb: KnowledgeBase) -> None:
    (pinned,) = kb.replace([image_example(1, "cat")], pin=True)
    bad = ErrorList()
    assert kb.replace([image_example(1, "\ud800")], pin=True, on_error=bad) == [None]
    assert len(bad) == 1
    assert kb.metadata(str(pinned)).pinned


@pytest.mark.parametrize("pin", [KnowledgeBase.pin, KnowledgeBase.unpin])
def test_pin_of_an_answer_that_is_replaced_meanwhile_fails(
    kb: KnowledgeBase,
    pin: Callable[[KnowledgeBase, Sequence[str]], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, old = kb.replace([image_example(2, "cat"), image_example(1, "cat")])

    def resolve_and_replace(rows: RowStore, ids: Iterable[str]) -> set[str]:
        found = full_ids(rows, ids)
        kb.replace([image_example(1, "dog")])
        return found

    monkeypatch.setattr("bottega.knowledge.base.full_ids", resolve_and_replace)
    with pytest.raises(NotFoundError, match=str(old)):
        pin(kb, [str(kept), str(old)])
    assert kb.stats().pinned == 0
    assert answers(kb) == ["cat", "dog"]


def test_concurrent_pin_counts(tmp_path: Path) -> None:
    """Embedder that pins the older answer while it embeds the newer one."""

    class Pinning(SeededEmbedder):
        def embed(self, queries: Sequence[Query]) -> Vectors:
            if (path := tmp_path / "kb.db").exists():
                with KnowledgeBase.open(path, None) as operators:
                    operators.pin(operators.ids())
            return super().embed(queries)

    with KnowledgeBase.open(tmp_path / "kb.db", Pinning()) as kb:
        first = kb.replace([image_example(1, "cat")])
        assert kb.replace([image_example(1, "dog")]) == first == kb.ids()


def test_pin_in_another_namespace_has_no_effect(tmp_path: Path) -> None:
    path = tmp_path / "kb.db"
    with (
        KnowledgeBase.open(path, SeededEmbedder(), namespace="a") as one,
        KnowledgeBase.open(path, SeededEmbedder(), namespace="b") as other,
    ):
        other.pin([str(other.replace([image_example(1, "cat")])[0])])
        one.replace([image_example(1, "cat")])
        one.replace([image_example(1, "dog")])
        assert answers(one) == ["dog"]


def test_another_context_is_another_question(kb: KnowledgeBase) -> None:
    french = text_example("Colour?", "rot", tags={"context": "in German"})
    ids = kb.replace([text_example("Colour?", "rot"), french, replace(french, answer="blau")])
    assert ids[0] != ids[1] == ids[2]
    assert answers(kb) == ["rot", "blau"]
    assert kb.verify().sound


def test_last_of_two_answers_in_one_commit_counts(kb: KnowledgeBase) -> None:
    ids = kb.replace([image_example(1, "cat"), image_example(2, "cat"), image_example(1, "dog")])
    assert ids[0] == ids[2]
    assert sorted(answers(kb)) == ["cat", "dog"]


def test_failed_answer_keeps_the_others(kb: KnowledgeBase) -> None:
    kb.replace([image_example(1, "cat")])
    bad = ErrorList()
    broken = Example(Query("What?", (damaged_image(),)), "cat")
    halved = image_example(1, "\ud800")
    ids = kb.replace([broken, image_example(2, "dog"), halved], on_error=bad)
    assert [id is None for id in ids] == [True, False, True]
    assert len(bad) == 2
    assert answers(kb) == ["cat", "dog"]


def test_other_namespaces_keep_their_answers(tmp_path: Path) -> None:
    path = tmp_path / "kb.db"
    with (
        KnowledgeBase.open(path, SeededEmbedder(), namespace="a") as one,
        KnowledgeBase.open(path, SeededEmbedder(), namespace="b") as other,
    ):
        one.replace([image_example(1, "cat")])
        other.replace([image_example(1, "dog")])
        assert answers(one) == ["cat"]


def test_replacing_needs_an_embedder(tmp_path: Path) -> None:
    with KnowledgeBase.open(tmp_path / "kb.db", None) as kb, pytest.raises(SettingError):
        kb.replace([image_example(1)])


def test_older_answer_is_found_by_an_index(tmp_path: Path) -> None:
    KnowledgeBase.open(tmp_path / "kb.db", SeededEmbedder()).close()
    with closing(sqlite3.connect(tmp_path / "kb.db")) as connection, connection:
        plan = connection.execute(
            "EXPLAIN QUERY PLAN SELECT key FROM examples"
            " WHERE namespace = 'a' AND question_digest = 'b'"
        ).fetchall()
        pins = connection.execute(f"EXPLAIN QUERY PLAN {PINNED_IDS}", ("a", "[]")).fetchall()
    assert "examples_by_question" in plan[0][-1]
    assert "examples_by_question" in pins[0][-1]
