"""Export and import of a knowledge base."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.errors import LoadError, StoreError
from bottega.knowledge import AddResult, KnowledgeBase, load_jsonl
from bottega.types import Example, Query
from tests.builders import solid_image
from tests.knowledge.doubles import ErrorList, SeededEmbedder, image_example, rows_of, text_example


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kb.db"


def test_import_restores_an_export(path: Path, tmp_path: Path) -> None:
    whole = Example(
        Query("Où?", (solid_image(1), replace(solid_image(2), source="here.png")), ("a", "b")),
        "a, b",
        labels=("a", "b"),
        rationale="because",
        tags={"hue": "röd"},
        source="there",
    )
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([whole, text_example("none", "", labels=()), image_example(1)])
        kb.pin(kb.ids()[:1])
        kb.used(kb.ids()[:2], saved_usd=0.5)
        before = list(kb)
        sources = [image.source for example in before for image in example.query.images]
        written: list[int] = []
        assert kb.export_to(tmp_path / "out", progress=written.append) == 3
        assert written == [1, 1, 1]
        metadata_by_id = rows_of(kb).metadata_by_id([1, 2, 3])
    assert len(list((tmp_path / "out" / "images").iterdir())) == 2
    assert len(list(load_jsonl(tmp_path / "out" / "examples.jsonl", on_error=ErrorList()))) == 2
    with KnowledgeBase.open(tmp_path / "new.db", SeededEmbedder()) as kb:
        assert kb.import_from(tmp_path / "out") == AddResult(new=3)
        assert list(kb) == before
        assert [i.source for e in kb for i in e.query.images] == sources
        assert rows_of(kb).metadata_by_id([1, 2, 3]) == metadata_by_id
        kb.unpin(kb.ids()[:1])
        assert kb.import_from(tmp_path / "out") == AddResult(duplicates=3)
        assert kb.stats().pinned == 0  # existing examples stay unchanged


def test_unreadable_lines_are_reported_by_number(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([image_example(i) for i in range(4)])
        kb.export_to(folder)
        with pytest.raises(StoreError, match="not empty"):
            kb.export_to(folder)
    lines = (folder / "examples.jsonl").read_text("utf-8").splitlines()
    lines[1] = lines[1][:40]
    lines[2] = lines[2].replace("images/", "../")
    lines[3] = '{"question": 5}'
    (folder / "examples.jsonl").write_text("\n".join(lines))
    bad = ErrorList()
    with KnowledgeBase.open(tmp_path / "new.db", SeededEmbedder()) as kb:
        assert kb.import_from(folder, on_error=bad) == AddResult(new=1)
        assert [f"line {n}" in str(error) for n, error in enumerate(bad, 2)] == [True] * 3
        with pytest.raises(LoadError, match="line 2"):
            kb.import_from(folder)
        with pytest.raises(LoadError, match="cannot be read"):
            kb.import_from(tmp_path / "nowhere")


def test_import_under_a_capacity_keeps_pins(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example(f"q{i}") for i in range(40)])
        kb.pin(pinned := kb.ids()[:3])
        kb.export_to(folder)
    with KnowledgeBase.open(tmp_path / "new.db", SeededEmbedder(), capacity=5) as kb:
        assert kb.import_from(folder, batch_size=8).new == 40
        assert (kb.stats().pinned, len(kb)) == (3, 5)
        assert set(pinned) <= set(kb.ids())


def test_interrupted_import_keeps_pins(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example(f"q{i}") for i in range(4)])
        kb.pin(kb.ids())
        kb.export_to(folder)

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with KnowledgeBase.open(tmp_path / "new.db", SeededEmbedder()) as kb:
        with pytest.raises(KeyboardInterrupt):
            kb.import_from(folder, batch_size=2, progress=stop)
        assert kb.import_from(folder) == AddResult(new=2, duplicates=2)
        assert kb.stats().pinned == 4


def test_changed_export_is_an_error(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add(
            [image_example(1), text_example("three"), text_example("four"), text_example("fine")]
        )
        kb.export_to(folder)
    (image,) = (folder / "images").iterdir()
    image.write_bytes(solid_image(9).data)
    lines = (folder / "examples.jsonl").read_text("utf-8").splitlines()
    lines[1] = lines[1].replace("three", "drei")
    lines[2] = lines[2].replace('"uses":0', '"uses":"0"')
    (folder / "examples.jsonl").write_text("\n".join(lines), "utf-8")
    bad = ErrorList()
    with KnowledgeBase.open(tmp_path / "new.db", SeededEmbedder()) as kb:
        assert kb.import_from(folder, on_error=bad) == AddResult(new=1)
    messages = ("has changed", "id does not match", "numbers")
    assert [part in str(error) for part, error in zip(messages, bad, strict=True)] == [True] * 3


def test_folder_without_export_is_an_error(path: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "examples.jsonl")
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        with pytest.raises(LoadError, match="not a regular file"):
            kb.import_from(tmp_path)
        for use in (kb.import_from, kb.export_to):
            for name in ("a\0b", "\ud83d"):
                with pytest.raises(StoreError, match="folder name contains"):
                    use(name)


@pytest.mark.parametrize(
    ("statement", "messages"),
    [
        ("UPDATE images SET data = x'00' WHERE rowid = 1", "the bytes of image"),
        ("UPDATE images SET data = 5 WHERE rowid = 1", "the bytes of image"),
        ("DELETE FROM images WHERE rowid = 1", "another question, answer or image"),
        ("UPDATE examples SET answer = 'dog' WHERE key = 1", "another question, answer or image"),
        ("UPDATE examples SET choices = 'no json' WHERE key = 1", "cannot be read"),
        ("UPDATE examples SET choices = '\"ab\"' WHERE key = 1", "cannot be read"),
        ("UPDATE examples SET labels = '[5]' WHERE key = 1", "cannot be read"),
        ("UPDATE examples SET tags = '[5]' WHERE key = 1", "cannot be read"),
        ("UPDATE examples SET tags = '{\"a\": 5}' WHERE key = 1", "cannot be read"),
        ("UPDATE examples SET rationale = x'41' WHERE key = 1", "cannot be read"),
        ("UPDATE examples SET source = x'41' WHERE key = 1", "cannot be read"),
        ("UPDATE examples SET created = 9e999 WHERE key = 1", "must be numbers"),
        ("UPDATE examples SET created = 'now' WHERE key = 1", "must be numbers"),
    ],
)
def test_export_reports_a_damaged_example_and_writes_the_others(
    path: Path, tmp_path: Path, statement: str, messages: str
) -> None:
    bad = ErrorList()
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([image_example(1), image_example(2), text_example("three")])
        first, *others = kb.ids()
        with rows_of(kb).transaction() as connection:
            connection.execute(statement)
        with pytest.raises(StoreError, match=f"example {first}.* {messages}"):
            kb.export_to(tmp_path / "stopped")
        assert kb.export_to(tmp_path / "out", on_error=bad) == 2
        assert [first in str(error) and "restore" in error.hint for error in bad] == [True]
    with KnowledgeBase.open(tmp_path / "new.db", SeededEmbedder()) as kb:
        kb.import_from(tmp_path / "out")
        assert kb.ids() == others


def test_export_skips_an_example_with_a_damaged_id(path: Path, tmp_path: Path) -> None:
    bad = ErrorList()
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("one"), text_example("two")])
        with rows_of(kb).transaction() as connection:
            connection.execute("UPDATE examples SET id = CAST(id AS BLOB) WHERE key = 1")
        assert kb.export_to(tmp_path / "out", on_error=bad) == 1
        assert ["id" in str(error) for error in bad] == [True]
