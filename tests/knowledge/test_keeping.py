"""What keeps a file in order: reindex, verify, export and import."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.errors import EmbedderMismatchError, EmbeddingError, LoadError, StoreError
from bottega.knowledge import Added, KnowledgeBase, View, load_jsonl
from bottega.protocols import Vectors
from bottega.types import Example, Query
from tests.builders import picture
from tests.knowledge.doubles import Bad, OnlyImages, SeededEmbedder, asked, shown, vector_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kb.db"


class Stopping(SeededEmbedder):
    """Breaks off after some batches, as a process that is killed."""

    def __init__(self, batches: int) -> None:
        super().__init__("new")
        self.left = batches

    def embed(self, queries: Sequence[Query]) -> Vectors:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return -super().embed(queries)


def test_reindexing_goes_on_where_it_stopped(path: Path) -> None:
    told: list[int] = []
    with KnowledgeBase.open(path, SeededEmbedder("old")) as kb:
        kb.add([asked(f"q{i}") for i in range(10)])
        with pytest.raises(KeyboardInterrupt):
            kb.reindex("default", Stopping(2), batch_size=2)
        assert kb.search(Query("q3"), 1)[0].score == pytest.approx(1.0)  # by the old vectors
        assert kb.stats().views == {"default": "old"}
        kb.add([asked("later")])
        rest = Stopping(99)
        assert kb.reindex("default", rest, batch_size=2, progress=told.append) == 7
        assert (rest.embedded, sum(told)) == (7, 7)
        assert kb.search(Query("q3"), 1)[0].example.query.text == "q3"
        assert kb.vectors(kb.ids()[:1]) == pytest.approx(-vector_of(Query("q0"))[None])
        assert kb.reindex("default", rest) == 0
        assert kb.verify().problems == ()
    with pytest.raises(EmbedderMismatchError, match=r"'new'.*'old'"):
        KnowledgeBase.open(path, SeededEmbedder("old"))


def test_a_handle_whose_vectors_were_replaced_is_told(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder("old")) as kb:
        kb.add([asked("a")])
        assert kb.search(Query("a"), 1)
        with KnowledgeBase.open(path, None) as other:
            assert other.reindex("default", SeededEmbedder("new")) == 1
        for use in (lambda: kb.search(Query("a"), 1), lambda: kb.add([asked("b")])):
            with pytest.raises(EmbedderMismatchError, match=r"'new'.*'old'"):
                use()


def test_a_view_can_join_later_in_every_namespace(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder(), namespace="one") as one:
        one.add([asked("a", "first")])
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([asked("b", "second"), asked("c", "third")])
        answers = View(SeededEmbedder("a"), lambda example: Query(example.answer))
        assert kb.reindex("answers", answers) == 3
    both = {"default": View(SeededEmbedder()), "answers": answers}
    with KnowledgeBase.open(path, both) as kb:
        assert kb.search(Query("third"), 1, by="answers")[0].example.query.text == "c"
        kb.add([asked("d", "fourth")])
    with KnowledgeBase.open(path, both, namespace="one") as one:
        assert one.search(Query("first"), 1, by="answers")[0].score == pytest.approx(1.0)


def test_an_example_that_the_new_embedder_cannot_read_is_named(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([shown(1), asked("no image"), shown(2)])
        with pytest.raises(EmbeddingError, match=kb.ids()[1]):
            kb.reindex("default", OnlyImages("images"))
        kb.delete([kb.ids()[1]])
        kb.reindex("default", OnlyImages("images"))
        assert len(kb.search(shown(3).query, 9)) == 2


Spoil = tuple[str, str, bool]
SPOILED: list[Spoil] = [
    ("UPDATE images SET data = x'00' WHERE rowid = 1", "bytes of image", False),
    ("DELETE FROM images WHERE rowid = 1", "is missing", False),
    ("UPDATE examples SET answer = 'other' WHERE key = 2", "another question", False),
    ("DELETE FROM vectors WHERE key = 1", "1 vectors", True),
    ("UPDATE vectors SET vector = x'00ff' WHERE key = 2", "1 vectors", True),
    (f"UPDATE vectors SET vector = x'{'00' * 28}0000807f' WHERE key = 2", "1 vectors", True),
    ("INSERT INTO vectors VALUES (99, 1, zeroblob(32))", "1 vectors of no example", True),
    ("INSERT INTO uses (key) VALUES (99)", "1 uses of no example", True),
    ("INSERT INTO images VALUES ('0', 'image/png', 1, 1, x'00')", "images of no example", True),
    ("INSERT INTO changes (op, key, id) VALUES ('put', 99, 'x')", "rows whose delete", True),
    ("DELETE FROM changes WHERE key = 3", "rows whose put", True),
]


@pytest.mark.parametrize(("statement", "told", "repairable"), SPOILED)
def test_verify_finds_and_repairs_what_is_derived(
    path: Path, statement: str, told: str, repairable: bool
) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([shown(1), shown(2), asked("three")])
        kb.search(Query("x"), 1)
        assert kb.verify().problems == ()
        with kb._file.transaction() as connection:
            connection.execute(statement)
        found = kb.verify()
        assert not found.sound
        assert any(told in problem.what for problem in found.problems)
        repaired = kb.verify(repair=True)
        assert repaired.sound == repairable
        assert kb.verify().sound == repairable
        if repairable:
            texts = {c.example.query.text for c in kb.search(Query("three"), 9)}
            assert texts == {"What?", "three"}
            assert kb.search(Query("three"), 1)[0].score == pytest.approx(1.0)


def test_verify_without_the_embedder_says_what_is_needed(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([asked("a")])
    with KnowledgeBase.open(path, None) as kb:
        with kb._file.transaction() as connection:
            connection.execute("DELETE FROM vectors")
        found = kb.verify(repair=True)
        assert not found.sound
        assert "embedder" in found.problems[0].what


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def leave_unfinished(path: Path) -> None:
    """Of two that are not finished, one may still be written."""
    for part, age in ((path.with_suffix(".part"), 7200), (path.with_suffix(".index.1-2.part"), 0)):
        part.touch()
        os.utime(part, (time.time() - age,) * 2)


@pytest.mark.parametrize("spoil", [flip, leave_unfinished])
def test_verify_looks_at_index_files(path: Path, spoil: Callable[[Path], None]) -> None:
    with KnowledgeBase.open(path, SeededEmbedder(), hnsw_above=5) as kb:
        kb.add([asked(f"q{i}") for i in range(20)])
        kb.search(Query("x"), 1)
        kb.settle()
        assert kb.verify().snapshots == 1
        spoil(path.with_name("kb.db.default.index"))
        assert not kb.verify().sound
        assert kb.verify(repair=True).sound
        assert kb.verify().problems == ()
        assert len(kb.search(Query("x"), 20)) == 20


def test_what_is_exported_is_imported_whole(path: Path, tmp_path: Path) -> None:
    whole = Example(
        Query("Où?", (picture(1), replace(picture(2), source="here.png")), ("a", "b")),
        "a, b",
        labels=("a", "b"),
        rationale="because",
        tags={"hue": "röd"},
        source="there",
    )
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([whole, asked("none", "", labels=()), shown(1)])
        kb.pin(kb.ids()[:1])
        kb.used(kb.ids()[:2], saved_usd=0.5)
        before = list(kb)
        sources = [image.source for example in before for image in example.query.images]
        assert kb.export_to(tmp_path / "out") == 3
        standings = kb._file.standings([1, 2, 3])
    assert len(list((tmp_path / "out" / "images").iterdir())) == 2
    assert len(list(load_jsonl(tmp_path / "out" / "examples.jsonl", on_bad=Bad()))) == 2
    with KnowledgeBase.open(tmp_path / "new.db", SeededEmbedder()) as kb:
        assert kb.import_from(tmp_path / "out") == Added(new=3)
        assert list(kb) == before
        assert [i.source for e in kb for i in e.query.images] == sources
        assert kb._file.standings([1, 2, 3]) == standings
        kb.unpin(kb.ids()[:1])
        assert kb.import_from(tmp_path / "out") == Added(duplicates=3)
        assert kb.stats().pinned == 0  # what was there is left as it is


def test_lines_that_cannot_be_imported_are_named(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([shown(i) for i in range(4)])
        kb.export_to(folder)
        with pytest.raises(StoreError, match="not empty"):
            kb.export_to(folder)
    lines = (folder / "examples.jsonl").read_text("utf-8").splitlines()
    lines[1] = lines[1][:40]
    lines[2] = lines[2].replace("images/", "../")
    lines[3] = '{"question": 5}'
    (folder / "examples.jsonl").write_text("\n".join(lines))
    bad = Bad()
    with KnowledgeBase.open(tmp_path / "new.db", SeededEmbedder()) as kb:
        assert kb.import_from(folder, on_bad=bad) == Added(new=1)
        assert [f"line {n}" in str(error) for n, error in enumerate(bad, 2)] == [True] * 3
        with pytest.raises(LoadError, match="line 2"):
            kb.import_from(folder)
        with pytest.raises(LoadError, match="cannot be read"):
            kb.import_from(tmp_path / "nowhere")


FILLED = """
import sys
from bottega.knowledge import KnowledgeBase
from tests.knowledge.doubles import SeededEmbedder, asked
kb = KnowledgeBase.open(sys.argv[1], SeededEmbedder(), hnsw_above=5)
kb.add([asked(f"q{i}") for i in range(20)])
kb.nearest(kb.vectors(kb.ids()[:1]), 1)
kb.settle()
"""


def test_leaving_without_closing_loses_nothing(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FILLED, path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    with KnowledgeBase.open(path, SeededEmbedder(), hnsw_above=5) as kb:
        assert len(kb.search(Query("x"), 99)) == 20
        assert kb.verify().problems == ()


class Overtaken(SeededEmbedder):
    """While it embeds for the first time, something else happens to the file."""

    def __init__(self, fingerprint: str, meanwhile: Callable[[], object]) -> None:
        super().__init__(fingerprint)
        self.meanwhile = [meanwhile]

    def embed(self, queries: Sequence[Query]) -> Vectors:
        if self.meanwhile:
            self.meanwhile.pop()()
        return super().embed(queries)


@pytest.mark.parametrize("stopped", [False, True])
def test_of_two_reindexings_at_once_one_raises_and_nothing_is_lost(
    path: Path, stopped: bool
) -> None:
    def second() -> None:
        with KnowledgeBase.open(path, None) as other:
            if not stopped:
                other.reindex("default", SeededEmbedder("C"))
                return
            with pytest.raises(KeyboardInterrupt):
                other.reindex("default", Stopping(1), batch_size=2)

    with KnowledgeBase.open(path, SeededEmbedder("A")) as kb:
        kb.add([asked(f"q{i}") for i in range(6)])
        with pytest.raises(StoreError, match="another process began to reindex"):
            kb.reindex("default", Overtaken("B", second), batch_size=2)
    with KnowledgeBase.open(path, SeededEmbedder("A" if stopped else "C")) as kb:
        assert len(kb.search(Query("q1"), 9)) == 6
        assert kb.verify().problems == ()


def test_verify_misses_views_and_repairs_them(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([asked("a"), asked("b")])
        with kb._file.transaction() as connection:
            connection.execute("DELETE FROM views")
        told = " ".join(problem.what for problem in kb.verify().problems)
        assert "2 vectors of no view" in told
        assert "no vectors at all" in told
        with pytest.raises(StoreError, match="have no vectors"):
            kb.add([asked("c")])
        kb.verify(repair=True)
        assert kb.verify().problems == ()
        assert len(kb.search(Query("a"), 9)) == 2


def test_reindexing_fills_what_a_complete_view_lacks(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([asked("a"), asked("b")])
        with kb._file.transaction() as connection:
            connection.execute("DELETE FROM vectors WHERE key = 2")
        with KnowledgeBase.open(path, SeededEmbedder()) as other:
            assert len(other.search(Query("b"), 9)) == 1
            assert kb.reindex("default", SeededEmbedder()) == 1
            assert len(other.search(Query("b"), 9)) == 2
        assert kb.verify().problems == ()


def test_what_is_imported_under_a_capacity_keeps_its_pins(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([asked(f"q{i}") for i in range(40)])
        kb.pin(pinned := kb.ids()[:3])
        kb.export_to(folder)
    with KnowledgeBase.open(tmp_path / "new.db", SeededEmbedder(), capacity=5) as kb:
        assert kb.import_from(folder, batch_size=8).new == 40
        assert (kb.stats().pinned, len(kb)) == (3, 5)
        assert set(pinned) <= set(kb.ids())


def test_an_import_that_was_stopped_has_kept_pins(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([asked(f"q{i}") for i in range(4)])
        kb.pin(kb.ids())
        kb.export_to(folder)

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with KnowledgeBase.open(tmp_path / "new.db", SeededEmbedder()) as kb:
        with pytest.raises(KeyboardInterrupt):
            kb.import_from(folder, batch_size=2, progress=stop)
        assert kb.import_from(folder) == Added(new=2, duplicates=2)
        assert kb.stats().pinned == 4


def test_an_export_that_was_changed_is_told(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([shown(1), asked("three"), asked("four"), asked("fine")])
        kb.export_to(folder)
    (image,) = (folder / "images").iterdir()
    image.write_bytes(picture(9).data)
    lines = (folder / "examples.jsonl").read_text("utf-8").splitlines()
    lines[1] = lines[1].replace("three", "drei")
    lines[2] = lines[2].replace('"uses":0', '"uses":"0"')
    (folder / "examples.jsonl").write_text("\n".join(lines), "utf-8")
    bad = Bad()
    with KnowledgeBase.open(tmp_path / "new.db", SeededEmbedder()) as kb:
        assert kb.import_from(folder, on_bad=bad) == Added(new=1)
    told = ("other bytes", "its id", "numbers")
    assert [part in str(error) for part, error in zip(told, bad, strict=True)] == [True] * 3


def test_verify_repairs_only_what_it_finds_sound_afterwards(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([asked("a"), asked("b")])
        with kb._file.transaction() as connection:
            connection.execute("UPDATE views SET dimension = 3")
        found = kb.verify(repair=True)
        assert not found.sound
        assert [problem.repaired for problem in found.problems] == [False]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE examples SET choices = 'no json' WHERE key = 2",
        "UPDATE examples SET question = x'ff' WHERE key = 2",
        "UPDATE images SET data = 5",
    ],
)
def test_verify_goes_on_after_what_cannot_be_read(path: Path, statement: str) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([shown(1), asked("two"), asked("three")])
        with kb._file.transaction() as connection:
            connection.execute(statement)
            connection.execute("INSERT INTO changes (op, key, id) VALUES ('put', 99, 'x')")
        found = kb.verify(repair=True)
        assert sorted(problem.repaired for problem in found.problems) == [False, True]


def test_verify_leaves_what_is_not_its_own(path: Path) -> None:
    mine = [path.with_name(f"kb.db.{name}") for name in ("old.index", "1.part", "notes.index")]
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([asked("a")])
        for name in mine:
            name.write_text("mine")
        assert kb.verify(repair=True).problems == ()
        assert all(name.read_text() == "mine" for name in mine)


@pytest.mark.parametrize("put", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_in_the_place_of_an_index_is_left_out(
    path: Path, put: Callable[[Path], None]
) -> None:
    put(path.with_name("kb.db.default.index"))
    with KnowledgeBase.open(path, SeededEmbedder(), hnsw_above=5) as kb:
        kb.add([asked(f"q{i}") for i in range(3)])
        assert len(kb.search(Query("x"), 9)) == 3
        found = kb.verify(repair=True)
        assert not found.sound
        assert "should be a file" in found.problems[0].what


def test_index_files_lie_beside_the_database_wherever_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with KnowledgeBase.open("kb.db", SeededEmbedder(), hnsw_above=5) as kb:
        kb.add([asked(f"q{i}") for i in range(20)])
        monkeypatch.chdir(tmp_path / "elsewhere")
        kb.search(Query("x"), 1)
        kb.settle()
    assert (tmp_path / "kb.db.default.index").exists()
    assert not any((tmp_path / "elsewhere").iterdir())


def test_what_is_no_folder_of_an_export_is_told(path: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "examples.jsonl")
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        with pytest.raises(LoadError, match="not a regular file"):
            kb.import_from(tmp_path)
        for use in (kb.import_from, kb.export_to):
            with pytest.raises(StoreError, match="not a folder's name"):
                use("a\0b")
