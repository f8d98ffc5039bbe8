"""Files of large indexes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bottega.knowledge import KnowledgeBase
from bottega.types import Query
from tests.knowledge.doubles import SeededEmbedder, text_example


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kb.db"


FILLED = """
import sys
from bottega.knowledge import KnowledgeBase
from tests.knowledge.doubles import SeededEmbedder, text_example
kb = KnowledgeBase.open(sys.argv[1], SeededEmbedder(), hnsw_above=5)
kb.add([text_example(f"q{i}") for i in range(20)])
kb.nearest(kb.vectors(kb.ids()[:1]), 1)
kb.wait_for_indexes()
"""


def test_exit_without_close_loses_nothing(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FILLED, path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    with KnowledgeBase.open(path, SeededEmbedder(), hnsw_above=5) as kb:
        assert len(kb.search(Query("x"), 99)) == 20
        assert kb.verify().problems == ()


def test_large_index_is_saved_on_closing(path: Path) -> None:
    """Otherwise the next start would replay every change since the graph was built."""
    file = path.with_name("kb.db.default.index")
    with KnowledgeBase.open(path, SeededEmbedder(), hnsw_above=5) as kb:
        kb.add([text_example(f"q{i}") for i in range(20)])
        kb.search(Query("x"), 1)
        kb.wait_for_indexes()
        kb.search(Query("x"), 1)
        built = file.read_bytes()
        kb.add([text_example(f"later {i}") for i in range(3)])
        assert len(kb.search(Query("x"), 99)) == 23
        assert file.read_bytes() == built
    assert file.read_bytes() != built


@pytest.mark.parametrize("put", [Path.mkdir, os.mkfifo])
def test_non_file_at_an_index_path_is_ignored(path: Path, put: Callable[[Path], None]) -> None:
    put(path.with_name("kb.db.default.index"))
    with KnowledgeBase.open(path, SeededEmbedder(), hnsw_above=5) as kb:
        kb.add([text_example(f"q{i}") for i in range(3)])
        assert len(kb.search(Query("x"), 9)) == 3
        found = kb.verify(repair=True)
        assert not found.sound
        assert "is not a file" in found.problems[0].what


def test_index_files_stay_beside_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with KnowledgeBase.open("kb.db", SeededEmbedder(), hnsw_above=5) as kb:
        kb.add([text_example(f"q{i}") for i in range(20)])
        monkeypatch.chdir(tmp_path / "elsewhere")
        kb.search(Query("x"), 1)
        kb.wait_for_indexes()
    assert (tmp_path / "kb.db.default.index").exists()
    assert not any((tmp_path / "elsewhere").iterdir())


def test_index_file_of_replaced_vectors_is_only_old(path: Path) -> None:
    with KnowledgeBase.open(path, SeededEmbedder(), hnsw_above=5) as kb:
        kb.add([text_example(f"q{i}") for i in range(20)])
        kb.search(Query("x"), 1)
        kb.wait_for_indexes()
    with KnowledgeBase.open(path, None) as kb:
        kb.reindex("default", SeededEmbedder("new"))
        found = kb.verify()
        assert (found.snapshots, found.problems) == (1, ())
    with KnowledgeBase.open(path, SeededEmbedder("new"), hnsw_above=5) as kb:
        assert kb.search(Query("q7"), 1)[0].example.query.text == "q7"
