"""A file in a read-only folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bottega.knowledge import KnowledgeBase
from tests.knowledge.doubles import SeededEmbedder, text_example

# Another user's: a superuser may write everywhere.
READER = """
import os, sys
import faiss  # at first use the other user may not be able to read it
from bottega.errors import StoreError
from bottega.knowledge import KnowledgeBase
from bottega.types import Query
from tests.knowledge.doubles import SeededEmbedder
embedder = SeededEmbedder()
embedder.embed([Query("x")])  # imports what the other user may not read
if os.getuid() == 0:
    os.setuid(65534)
try:
    kb = KnowledgeBase.open(sys.argv[1], embedder, hnsw_above=20)
except StoreError as error:
    sys.exit(f"{error}; {error.hint}")
for _ in sys.stdin:
    print(len(kb.search(Query("x"), 99)), flush=True)
    kb.wait_for_indexes()
kb.close()
"""


@pytest.fixture
def path(public_folder: Path) -> Path:
    return public_folder / "kb.db"


@pytest.fixture
def kb(path: Path) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(path, SeededEmbedder()) as opened:
        opened.add([text_example(f"q{i}") for i in range(50)])
        yield opened


def read(path: Path, meanwhile: Callable[[], object] = lambda: None) -> tuple[list[str], str]:
    """Return the results of another user, before and after, and the error output."""
    for file in path.parent.iterdir():
        file.chmod(0o444)
    path.parent.chmod(0o555)
    command = [sys.executable, "-c", READER, str(path)]
    with subprocess.Popen(
        command,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        reader.stdin.write("before\n")
        reader.stdin.flush()
        first = reader.stdout.readline()
        meanwhile()
        rest, errors = reader.communicate("after\n" if first else "")
    return [*first.split(), *rest.split()], errors


def test_file_without_a_writer_is_searched(kb: KnowledgeBase, path: Path) -> None:
    kb.close()
    assert [file.name for file in path.parent.iterdir()] == ["kb.db"]
    found, errors = read(path)
    assert found == ["50", "50"], errors
    assert [file.name for file in path.parent.iterdir()] == ["kb.db"]


def test_concurrent_writes_are_found(kb: KnowledgeBase, path: Path) -> None:
    found, errors = read(path, lambda: kb.add([text_example("new")]))
    assert found == ["50", "51"], errors


def test_file_of_a_killed_writer_has_a_hint(kb: KnowledgeBase, path: Path) -> None:
    copy = path.parent / "copy.db"
    for end in ("", "-wal"):
        shutil.copy(f"{path}{end}", f"{copy}{end}")
    found, errors = read(copy)
    assert found == []
    assert "was not closed" in errors
    assert "open and close it once" in errors
    copy.parent.chmod(0o755)
    for file in copy.parent.iterdir():
        file.chmod(0o644)
    KnowledgeBase.open(copy, None).close()
    assert read(copy)[0] == ["50", "50"]
