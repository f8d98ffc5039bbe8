"""The current version reads a file of format 1."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import orjson
import pytest

from bottega.knowledge import KnowledgeBase
from bottega.knowledge.schema import KNOWLEDGE_BASE
from bottega.types import Query
from tests.knowledge.doubles import SeededEmbedder, rows_of, text_example, vector_of


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Return a file with three rows, of which the last was deleted."""
    path = tmp_path / "old.db"
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in str(KNOWLEDGE_BASE.migrations[0]).split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {KNOWLEDGE_BASE.application_id}")
    connection.execute("PRAGMA user_version = 1")
    connection.execute("INSERT INTO meta VALUES ('embedder', 'seeded-8'), ('dimension', '8')")
    for key, text in enumerate("abc", 1):
        row = (key, text * 16, text, "yes", "[]", None, None, orjson.dumps({"n": text}), "s", 1.0)
        connection.execute(f"INSERT INTO examples VALUES ({', '.join('?' * 10)})", row)
        vector = vector_of(Query(text)).tobytes()
        connection.execute("INSERT INTO vectors VALUES (?, ?)", (key, vector))
        connection.execute("INSERT INTO changes (op, key) VALUES ('put', ?)", (key,))
    connection.execute("DELETE FROM examples WHERE key = 3")
    connection.execute("DELETE FROM vectors WHERE key = 3")
    connection.execute("INSERT INTO changes (op, key) VALUES ('delete', 3)")
    connection.close()
    return path


def test_rows_vectors_and_numbers_are_kept(old: Path) -> None:
    with KnowledgeBase.open(old, SeededEmbedder()) as kb:
        assert [example.query.text for example in kb] == ["a", "b"]
        assert kb.search(Query("b"), 1)[0].score == pytest.approx(1.0)
        assert kb.stats().views == {"default": "seeded-8"}
        assert [change.id[0] for change in kb.changes()] == ["a", "b"]
        kb.add([text_example("d")])
        (id,) = set(kb.ids()) - {"a" * 16, "b" * 16}
        assert rows_of(kb).keys([id]) == {id: 4}  # keys are never reused
        assert kb.get("a" * 16).tags == {"n": "a"}


def test_changes_keep_their_numbers_and_are_marked(old: Path) -> None:
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.execute("DELETE FROM changes WHERE seq = 4")
    with KnowledgeBase.open(old, SeededEmbedder()) as kb:
        kb.add([text_example("d")])
        assert [change.seq for change in kb.changes()] == [1, 2, 5]
        assert len({rows_of(kb).mark(seq) for seq in (1, 2, 3, 5)}) == 4


def test_empty_file_accepts_any_embedder(tmp_path: Path) -> None:
    path = tmp_path / "kb.db"
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in str(KNOWLEDGE_BASE.migrations[0]).split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {KNOWLEDGE_BASE.application_id}")
    connection.execute("PRAGMA user_version = 1")
    connection.close()
    with KnowledgeBase.open(path, SeededEmbedder("any")) as kb:
        assert kb.add([text_example("a")]).new == 1


def test_old_rows_are_kept_and_later_answers_matched(old: Path) -> None:
    with KnowledgeBase.open(old, SeededEmbedder()) as kb:
        kb.replace([text_example("b", "no")])  # old rows have no question digest
        assert [example.answer for example in kb] == ["yes", "yes", "no"]
        kb.replace([text_example("b", "perhaps")])
        assert [example.answer for example in kb] == ["yes", "yes", "perhaps"]
