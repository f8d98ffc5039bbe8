"""Files written by commit fd291dc open with all contents, can be searched and can be written."""

from __future__ import annotations

import gzip
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from bottega.knowledge import KnowledgeBase, LateInteractionIndex
from bottega.knowledge.index_files import load
from bottega.knowledge.schema import KNOWLEDGE_BASE
from bottega.protocols import Vectors
from bottega.types import Example, Query
from tests.data.fd291dc.knowledge.make import WordEmbedder, views
from tests.knowledge.doubles import search_of
from tests.paths import ROOT

STORED = ROOT / "tests" / "data" / "fd291dc" / "knowledge"
VIEWS = views()
QUESTIONS = {
    "cat": "which animal is this",
    "dog": "which animal is this",
    "red, blue": "which colours are shown",
    "four": "what is two plus two",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "stored"
    shutil.copytree(STORED, copy)
    (copy / "kb.db").write_bytes(gzip.decompress((copy / "kb.db.gz").read_bytes()))
    return copy


def opened(folder: Path, namespace: str = "") -> KnowledgeBase:
    return KnowledgeBase.open(folder / "kb.db", VIEWS, namespace=namespace, hnsw_above=2)


def check_contents(kb: KnowledgeBase) -> None:
    found = {example.answer: example for example in kb}
    assert {answer: example.query.text for answer, example in found.items()} == QUESTIONS
    cat, dog, colours, four = (found[answer] for answer in QUESTIONS)
    assert (cat.source, cat.query.images[0].source) == ("pets/1.png", "1.png")
    assert cat.query.images[0].decode().getpixel((0, 0)) == (1, 0, 90)
    assert (dog.query.choices, dog.rationale) == (("cat", "dog"), "It has floppy ears.")
    assert dog.tags == {"split": "train", "context": "earlier turns"}
    assert colours.labels == ("red", "blue")
    assert [image.source for image in colours.query.images] == ["3.png", "4.png"]
    assert four.rationale == "Count on your fingers."
    assert four.tags == {"split": "test", "checked": "yes"}
    metadata = {answer: kb.metadata(str(example.id)) for answer, example in found.items()}
    assert [m.pinned for m in metadata.values()] == [a == "cat" for a in metadata]
    assert (metadata["cat"].uses, metadata["cat"].saved_usd) == (1, 0.25)
    assert metadata["four"].uses == 1 and metadata["four"].last_used is not None
    assert metadata["dog"].uses == 0 and metadata["dog"].last_used is None
    assert all(m.created > 1.7e9 for m in metadata.values())


def test_knowledge_base_opens_with_all_contents(folder: Path) -> None:
    with opened(folder) as kb:
        check_contents(kb)
        assert kb.labels() == ["cat", "dog", "red", "blue", "four"]
        assert kb.namespaces() == {"": 4, "ward": 1}
        assert kb.stats().views == {"default": "seeded", "answer": "seeded-answer"}
        assert kb.stats().format_version == KNOWLEDGE_BASE.version
        assert kb.note("embedder") == "seeded"
        deleted = [change.id for change in kb.changes() if change.deleted]
        # Two entries each: a deleted example, an annotated one, and one whose id got its choices.
        assert len(deleted) == 6
        assert kb.verify(deep=True).problems == ()
    with opened(folder, "ward") as ward:
        assert [example.answer for example in ward] == ["cat"]
        assert ward.metadata(ward.ids()[0]).uses == 0


def test_knowledge_base_can_be_searched_and_written(folder: Path) -> None:
    with opened(folder) as kb:
        first = kb.get(kb.ids()[0])
        (found,) = kb.search(first.query, 1, include_self=True)
        assert found.example.answer == "cat" and found.score == pytest.approx(1, abs=1e-5)
        assert kb.search(Query("dog"), 1, by="answer")[0].example.answer == "dog"
        assert kb.add([first, Example(Query("new", first.query.images), "bird")]).new == 1
        kb.used([str(first.id)])
    with opened(folder) as kb:
        assert kb.search(Query("bird"), 1, by="answer")[0].example.answer == "bird"
        assert kb.metadata(str(first.id)).uses == 2
        assert kb.verify(deep=True).problems == ()


def test_later_answers_replace_stored_ones(folder: Path) -> None:
    with opened(folder) as kb:
        dog = next(example for example in kb if example.answer == "dog")
        kb.replace([Example(dog.query, "wolf", tags={"context": "earlier turns"})])
        assert sorted(example.answer for example in kb) == ["cat", "four", "red, blue", "wolf"]


def test_index_files_are_loaded(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, view in VIEWS.items():
        snapshot = load(folder / f"kb.db.{name}.index")
        assert snapshot is not None and snapshot.header.fingerprint == view.embed.fingerprint
    with opened(folder) as kb:
        kb.search(Query("cat"), 1)
        assert len(search_of(kb).current_index(None)) == 4
    assert not caplog.records  # such as "does not match its rows"


def test_late_interaction_folder_is_kept(folder: Path) -> None:
    embedded: list[Query] = []

    class RecordingEmbedder(WordEmbedder):
        def embed_documents(self, queries: Sequence[Query]) -> list[Vectors]:
            embedded.extend(queries)
            return super().embed_documents(queries)

    with (
        opened(folder) as kb,
        LateInteractionIndex(kb, RecordingEmbedder(), folder / "late") as index,
    ):
        (found,) = index.search(Query("two plus two"), 1)
        assert found.example.answer == "four" and found.score == pytest.approx(3, abs=0.01)
    # Choices are part of an id since format 6; all other tokens come from the folder.
    assert [query.choices for query in embedded] == [("cat", "dog")]


def test_late_interaction_folder_can_be_written(folder: Path) -> None:
    with opened(folder) as kb:
        kb.add([Example(Query("a new question"), "new")])
        for _ in range(2):
            with LateInteractionIndex(kb, WordEmbedder(), folder / "late") as index:
                assert index.search(Query("new"), 1)[0].example.answer == "new"
                assert len(index) == 5


def test_export_can_be_imported(folder: Path, tmp_path: Path) -> None:
    with KnowledgeBase.open(tmp_path / "copy.db", VIEWS) as kb:
        assert kb.import_from(folder / "export").new == 4
        check_contents(kb)


def test_file_is_migrated_once(folder: Path) -> None:
    with opened(folder):
        pass
    with closing(sqlite3.connect(folder / "kb.db")) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    assert version == KNOWLEDGE_BASE.version
