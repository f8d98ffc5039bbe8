"""Rationales and tags added to a stored example."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.errors import LoadError, NotFoundError, SettingError
from bottega.knowledge import Eq, KnowledgeBase
from bottega.retrieval import BM25Retriever
from bottega.types import Query
from tests.knowledge.doubles import SeededEmbedder, image_example, text_example

# Annotates all examples repeatedly and reports each annotation after it is done.
WRITER = """
import sys
from bottega.knowledge import KnowledgeBase
kb = KnowledgeBase.open(sys.argv[1], None)
print("opened", flush=True)
for i in range(100_000):
    for id in sorted(kb.ids()):
        kb.annotate(id, rationale=f"{i}", tags={"round": f"{i}"})
    print(i, flush=True)
"""


EXAMPLES = (
    image_example(1),
    text_example("a", tags={"hue": "red"}, source="s"),
    text_example("b"),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with KnowledgeBase.open(tmp_path / "kb.db", SeededEmbedder()) as kb:
        kb.add(EXAMPLES)
    return tmp_path / "kb.db"


@pytest.fixture
def kb(path: Path) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(path, SeededEmbedder()) as opened:
        yield opened


def test_labels_are_replaced_or_kept(kb: KnowledgeBase) -> None:
    id, before = kb.ids()[0], kb.last_change()
    kb.annotate(id, rationale=None, labels=["a", "b"])
    kb.annotate(id, rationale="since")
    assert kb.get(id).labels == ("a", "b") and kb.ids(label="b") == [id]
    assert kb.last_change() > before
    with pytest.raises(LoadError):
        kb.annotate(id, rationale=None, labels=["a\0"])


def test_annotation_keeps_all_other_fields(kb: KnowledgeBase) -> None:
    for example in list(kb):
        id = str(example.id)
        kb.pin([id])
        kb.used([id], 0.5)
        before = kb.metadata(id)
        kb.annotate(id, rationale="since", tags={"seen": "1"})
        reported = replace(example, rationale="since", tags={**example.tags, "seen": "1"})
        assert kb.get(id) == reported
        assert kb.metadata(id) == before
        assert before.pinned
        assert kb.search(example.query, 1, include_self=True)[0].example == reported
    assert len(kb) == 3
    assert kb.verify(deep=True).problems == ()


def test_annotation_reaches_other_handles(kb: KnowledgeBase, path: Path) -> None:
    query, red = Query("a"), Eq("tags.hue", "red")
    with KnowledgeBase.open(path, SeededEmbedder(), hnsw_above=1) as other:
        (found,) = other.search(query, 1, include_self=True, where=red)
        other.wait_for_indexes()
        assert other.search(query, 1, include_self=True, where=Eq("tags.hue", "blue")) == []
        kb.annotate(str(found.example.id), rationale="since", tags={"hue": "blue"})
        assert other.search(query, 1, include_self=True, where=red) == []
        (again,) = other.search(query, 1, include_self=True, where=Eq("tags.hue", "blue"))
        assert again.example.rationale == "since"


async def test_annotation_appears_in_the_changes(kb: KnowledgeBase) -> None:
    words = BM25Retriever(kb)
    assert [c.score > 0 for c in await words(Query("penguin"), 3)].count(True) == 0
    kb.annotate(kb.ids()[1], rationale="a penguin", tags={})
    best = (await words(Query("penguin"), 1))[0]
    assert (best.example.query.text, best.example.rationale) == ("a", "a penguin")
    reported = {change.id: change.deleted for change in kb.changes()}
    assert reported == dict.fromkeys(kb.ids(), False)


def test_tags_keep_the_rationale(kb: KnowledgeBase) -> None:
    first = kb.ids()[0]
    kb.annotate(first, rationale="Mine.")
    kb.tag(first, {"seen": "1"})
    assert (kb.get(first).rationale, kb.get(first).tags["seen"]) == ("Mine.", "1")
    with pytest.raises(NotFoundError):
        kb.tag("gone", {"seen": "1"})


def test_annotated_example_moves_to_the_end(kb: KnowledgeBase) -> None:
    first, *others = kb.ids()
    kb.annotate(first, rationale=None)
    assert kb.ids() == [*others, first]


def test_keys_are_never_reused_by_annotations(kb: KnowledgeBase, path: Path) -> None:
    """Otherwise an index would return the new row for the old vector."""
    kb.annotate(kb.ids()[2], rationale="x")
    kb.delete(kb.ids()[2:])
    kb.add([text_example("new")])
    with closing(sqlite3.connect(path)) as connection, connection:
        keys = [row[0] for row in connection.execute("SELECT key FROM changes WHERE op = 'put'")]
    assert len(keys) == len(set(keys)) == 5


def test_annotation_keeps_other_namespaces(kb: KnowledgeBase, path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder(), namespace="other") as other:
        other.add([text_example("b")])
        (id,) = other.ids()
        kb.annotate(id, rationale="ours")
        assert other.get(id).rationale is None


def test_annotating_a_deleted_id_is_an_error(kb: KnowledgeBase) -> None:
    gone = kb.ids()[0]
    kb.delete([gone])
    with pytest.raises(NotFoundError):
        kb.annotate(gone, rationale="x")


def test_invalid_annotation_changes_nothing(kb: KnowledgeBase) -> None:
    before, id = list(kb), kb.ids()[0]
    for rationale, tags in (("\ud800", {}), ("a\0b", {}), ("x", {"a": "\ud800"})):
        with pytest.raises(LoadError):
            kb.annotate(id, rationale=rationale, tags=tags)
    with pytest.raises(SettingError, match="context"):
        kb.annotate(id, rationale="x", tags={"context": "another"})
    assert list(kb) == before


def test_killed_writer_leaves_complete_annotations(path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "opened\n"
    done = [int(writer.stdout.readline()) for _ in range(20)][-1]
    writer.kill()
    writer.communicate()
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        assert len(kb) == 3
        assert all(e.rationale == e.tags["round"] for e in kb)
        assert all(int(str(e.rationale)) >= done for e in kb)
        assert kb.verify(deep=True).problems == ()
