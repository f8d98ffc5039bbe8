"""Problems that verify finds and repairs."""

from __future__ import annotations

import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from bottega.errors import StoreError
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.knowledge.sqlite.rows import SqliteRows
from bottega.knowledge.sqlite.verification import find_damaged_images
from bottega.knowledge.stores import paged_keys
from bottega.protocols import Vectors
from bottega.types import Query
from tests.builders import solid_image
from tests.knowledge.doubles import (
    ImageOnlyEmbedder,
    SeededEmbedder,
    image_example,
    rows_of,
    text_example,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kb.db"


Spoil = tuple[str, str, bool]
SPOILED: list[Spoil] = [
    ("UPDATE images SET data = x'00' WHERE rowid = 1", "bytes of image", False),
    ("DELETE FROM images WHERE rowid = 1", "is missing", False),
    ("UPDATE examples SET answer = 'other' WHERE key = 2", "another question", False),
    ("DELETE FROM vectors WHERE key = 1", "1 vector ", True),
    ("UPDATE vectors SET vector = x'00ff' WHERE key = 2", "1 vector ", True),
    (f"UPDATE vectors SET vector = x'{'00' * 28}0000807f' WHERE key = 2", "1 vector ", True),
    ("INSERT INTO vectors VALUES (99, 1, zeroblob(32), 0)", "1 vector of no example", True),
    ("INSERT INTO uses (key) VALUES (99)", "1 use of no example", True),
    ("INSERT INTO images VALUES ('0', 'image/png', 1, 1, x'00')", "1 image of no example", True),
    ("INSERT INTO changes (op, key, id) VALUES ('put', 99, 'x')", "row whose delete", True),
    ("DELETE FROM changes WHERE key = 3", "row whose put", True),
]


@pytest.mark.parametrize(("statement", "messages", "repairable"), SPOILED)
def test_verify_repairs_derived_data(
    path: Path, statement: str, messages: str, repairable: bool
) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([image_example(1), image_example(2), text_example("three")])
        kb.search(Query("x"), 1)
        assert kb.verify().problems == ()
        with rows_of(kb).transaction() as connection:
            connection.execute(statement)
        found = kb.verify()
        assert not found.sound
        assert any(messages in problem.what for problem in found.problems)
        repaired = kb.verify(repair=True)
        assert repaired.sound == repairable
        assert kb.verify().sound == repairable
        if repairable:
            texts = {c.example.query.text for c in kb.search(Query("three"), 9)}
            assert texts == {"What?", "three"}
            assert kb.search(Query("three"), 1)[0].score == pytest.approx(1.0)


def test_verify_without_the_embedder_names_it(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("a")])
    with KnowledgeBase.open(path, None) as kb:
        with rows_of(kb).transaction() as connection:
            connection.execute("DELETE FROM vectors")
        found = kb.verify(repair=True)
        assert not found.sound
        assert "embedder" in found.problems[0].what


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def leave_unfinished(path: Path) -> None:
    """Of two incomplete files, one may still be in use."""
    for part, age in ((path.with_suffix(".part"), 7200), (path.with_suffix(".index.1-2.part"), 0)):
        part.touch()
        os.utime(part, (time.time() - age,) * 2)


@pytest.mark.parametrize("spoil", [flip, leave_unfinished])
def test_verify_checks_index_files(path: Path, spoil: Callable[[Path], None]) -> None:
    with KnowledgeBase.open(path, SeededEmbedder(), hnsw_above=5) as kb:
        kb.add([text_example(f"q{i}") for i in range(20)])
        kb.search(Query("x"), 1)
        kb.wait_for_indexes()
        assert kb.verify().snapshots == 1
        spoil(path.with_name("kb.db.default.index"))
        assert not kb.verify().sound
        assert kb.verify(repair=True).sound
        assert kb.verify().problems == ()
        assert len(kb.search(Query("x"), 20)) == 20


def test_verify_repairs_missing_views(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("a"), text_example("b")])
        with rows_of(kb).transaction() as connection:
            connection.execute("DELETE FROM views")
        messages = " ".join(problem.what for problem in kb.verify().problems)
        assert "2 vectors of no view" in messages
        assert "no vectors at all" in messages
        with pytest.raises(StoreError, match="have no vectors"):
            kb.add([text_example("c")])
        kb.verify(repair=True)
        assert kb.verify().problems == ()
        assert len(kb.search(Query("a"), 9)) == 2


def test_verify_checks_its_repairs(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("a"), text_example("b")])
        with rows_of(kb).transaction() as connection:
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
def test_verify_continues_after_unreadable_rows(path: Path, statement: str) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([image_example(1), text_example("two"), text_example("three")])
        with rows_of(kb).transaction() as connection:
            connection.execute(statement)
            connection.execute("INSERT INTO changes (op, key, id) VALUES ('put', 99, 'x')")
        found = kb.verify(repair=True)
        assert sorted(problem.repaired for problem in found.problems) == [False, True]


def test_verify_keeps_other_files(path: Path) -> None:
    mine = [path.with_name(f"kb.db.{name}") for name in ("old.index", "1.part", "notes.index")]
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("a")])
        for name in mine:
            name.write_text("mine")
        assert kb.verify(repair=True).problems == ()
        assert all(name.read_text() == "mine" for name in mine)


ZEROS = "UPDATE vectors SET vector = zeroblob(32) WHERE key = 2"
ANOTHERS = "UPDATE vectors SET vector = (SELECT vector FROM vectors WHERE key = 1) WHERE key = 2"
HUGE = "UPDATE vectors SET vector = substr(vector, 1, 28) || x'00a981fe' WHERE key = 2"  # -8.6e37
SIGN = "UPDATE vectors SET vector = x'00000080' || substr(vector, 5) WHERE key = 2"
# The last number is as large as those of a unit vector are.
TURNED = "UPDATE vectors SET vector = substr(vector, 1, 28) || x'0000003f' WHERE key = 2"


def set_checksums(connection: sqlite3.Connection) -> None:
    blobs = connection.execute("SELECT key, CAST(vector AS BLOB) FROM vectors").fetchall()
    for key, vector in blobs:
        checksum = zlib.crc32(vector)
        connection.execute("UPDATE vectors SET checksum = ? WHERE key = ?", (checksum, key))


@pytest.mark.parametrize("exact_up_to", [2, 100])
@pytest.mark.parametrize("statement", [ZEROS, ANOTHERS, TURNED, HUGE, SIGN])
def test_changed_vector_is_found_without_embedding(
    path: Path, statement: str, exact_up_to: int
) -> None:
    with KnowledgeBase.open(path, SeededEmbedder(), hnsw_above=exact_up_to) as kb:
        kb.add([image_example(1), text_example("two"), text_example("three")])
        kb.search(Query("x"), 1)
        kb.wait_for_indexes()
        with rows_of(kb).transaction() as connection:
            connection.execute(statement)
        whole = kb.ids()[1]
    with KnowledgeBase.open(path, None) as kb:
        problem, *of_index = kb.verify().problems
        assert problem.what.startswith("1 vector 'default' missing or damaged: of")
        assert whole in problem.what
        assert len(of_index) == (exact_up_to == 2)
    with KnowledgeBase.open(path, SeededEmbedder(), hnsw_above=exact_up_to) as kb:
        assert kb.verify(repair=True).sound
        assert kb.verify(deep=True).problems == ()
        assert kb.search(Query("two"), 1)[0].score == pytest.approx(1.0)


def test_zero_vector_is_valid(path: Path) -> None:
    with KnowledgeBase.open(path, Rounding()) as kb:
        kb.add([text_example("nothing"), text_example("something")])
        assert kb.verify().problems == ()


@pytest.mark.parametrize("statement", [ANOTHERS, TURNED])
def test_deep_verify_finds_wrong_vectors(path: Path, statement: str) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([image_example(1), text_example("two"), text_example("three")])
        assert kb.verify(deep=True).problems == ()
        with rows_of(kb).transaction() as connection:
            connection.execute(statement)
            set_checksums(connection)
        assert kb.verify().problems == ()
        (problem,) = kb.verify(deep=True).problems
        assert problem.what.startswith("1 vector 'default' unlike those of the embedder: of")
        assert kb.ids()[1] in problem.what
        assert kb.verify(deep=True, repair=True).sound
        assert kb.verify(deep=True).problems == ()
        assert kb.search(Query("two"), 1)[0].score == pytest.approx(1.0)


def test_first_wrong_vectors_are_named(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example(f"q{i}") for i in range(5)])
        with rows_of(kb).transaction() as connection:
            connection.execute("DELETE FROM vectors")
        (problem,) = kb.verify().problems
        assert problem.what.endswith(f": of {', '.join(kb.ids()[:3])} and 2 more")
        assert kb.verify(repair=True).sound


class Rounding(SeededEmbedder):
    """Embedder with other last bits, like another machine; zeros stay zeros."""

    def embed(self, queries: Sequence[Query]) -> Vectors:
        vectors = super().embed(queries)
        vectors[[query.text == "nothing" for query in queries]] = 0
        noise = np.random.default_rng(self.embedded).standard_normal(vectors.shape)
        return (vectors * (1 + 1e-3 * noise)).astype(np.float32)


def test_deep_verify_tolerates_rounding(path: Path) -> None:
    with KnowledgeBase.open(path, Rounding()) as kb:
        kb.add([text_example("nothing"), *(text_example(f"q{i}") for i in range(100))])
        assert kb.verify(deep=True).problems == ()


def test_deep_verify_reports_embedding_errors(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([image_example(1), text_example("no image"), image_example(2)])
        with rows_of(kb).transaction() as connection:
            connection.execute(ANOTHERS.replace("key = 2", "key = 3"))
            set_checksums(connection)
    with KnowledgeBase.open(path, ImageOnlyEmbedder()) as kb:
        messages = [problem.what for problem in kb.verify(deep=True, repair=True).problems]
        assert messages[0].startswith("1 vector 'default' unlike")
        assert messages[1].startswith("1 vector 'default' not comparable: ")
    with KnowledgeBase.open(path, None) as kb:
        messages = [problem.what for problem in kb.verify(deep=True).problems]
        assert messages == ["vectors 'default' cannot be compared without their embedder"]


def test_damaged_image_does_not_make_vectors(path: Path) -> None:
    other = solid_image(200)
    with KnowledgeBase.open(path, PixelEmbedder()) as kb:
        kb.add([image_example(1)])
        before = kb.vectors(kb.ids())
        with rows_of(kb).transaction() as connection:
            connection.execute("UPDATE images SET data = ?", [other.data])
        (problem,) = kb.verify(deep=True, repair=True).problems
        assert "bytes of image" in problem.what
        assert (kb.vectors(kb.ids()) == before).all()


@pytest.mark.parametrize(
    "statement", ["UPDATE images SET data = x'00' WHERE rowid = 1", "DELETE FROM images"]
)
def test_advice_for_a_damaged_image_restores_it(path: Path, statement: str) -> None:
    one, two = image_example(1), image_example(1, question="Other?")
    with (
        KnowledgeBase.open(path, SeededEmbedder()) as kb,
        KnowledgeBase.open(path, SeededEmbedder(), namespace="there") as there,
    ):
        kb.add([one, two])
        there.add([one])
        with rows_of(kb).transaction() as connection:
            connection.execute(statement)
        (what,) = (p.what for p in kb.verify().problems if "image " in p.what and "; " in p.what)
        ids = kb.ids()
        assert f"delete examples {ids[0]}, {ids[1]}, {ids[0]} of namespace 'there'" in what
        assert "add again, or restore the file from a copy" in what
        kb.delete(ids)
        there.delete(ids[:1])
        kb.add([one, two])
        there.add([one])
        assert kb.verify(deep=True).problems == ()


@pytest.mark.parametrize(
    "meanwhile",
    [
        lambda kb: kb.delete(kb.ids()),
        lambda kb: kb.reindex("default", SeededEmbedder("new")),
    ],
)
@pytest.mark.parametrize("repair", [False, True])
def test_concurrent_deletion_is_not_a_problem(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[[KnowledgeBase], object],
    repair: bool,
) -> None:
    def then(rows: SqliteRows, size: int = 1) -> Iterator[list[int]]:
        keys = list(paged_keys(rows, size))
        with KnowledgeBase.open(path, None) as other:
            meanwhile(other)
        yield from keys

    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([image_example(1), image_example(2)])
        monkeypatch.setattr("bottega.knowledge.stores.paged_keys", then)
        assert kb.verify(repair=repair).problems == ()


def test_concurrently_deleted_image_is_not_missing(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([image_example(1), image_example(2)])
        with rows_of(kb).transaction() as connection:
            connection.execute("UPDATE images SET data = x'00'")
        found = find_damaged_images(rows_of(kb))
        assert "bytes of image" in next(found)[0]
        kb.delete(kb.ids())
        assert list(found) == []


def test_embedder_with_another_dimension_repairs_nothing(path: Path) -> None:
    class Wider(SeededEmbedder):
        dimension = 16

        def __init__(self) -> None:
            self.fingerprint = "seeded-8"

        def embed(self, queries: Sequence[Query]) -> Vectors:
            return np.ones((len(queries), 16), np.float32)

    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        kb.add([text_example("a"), text_example("b")])
        with rows_of(kb).transaction() as connection:
            connection.execute("DELETE FROM vectors WHERE key = 1")
    with KnowledgeBase.open(path, Wider()) as wider:
        for deep in (False, True):
            found = wider.verify(deep=deep, repair=True)
            assert [problem.repaired for problem in found.problems] == [False] * (1 + deep)
    with KnowledgeBase.open(path, SeededEmbedder()) as kb:
        assert kb.verify(repair=True).sound
        assert kb.search(Query("b"), 1)[0].example.query.text == "b"
