"""Graph files are loaded if they match the rows and rebuilt otherwise."""

from __future__ import annotations

import logging
import shutil
from contextlib import closing
from pathlib import Path

import faiss
import numpy as np
import pytest

from bottega.knowledge import KnowledgeBase
from bottega.knowledge.index.hnsw import HnswIndex
from bottega.knowledge.index.index_files import BLOCK, IndexSnapshot, checksum_of, load, save
from bottega.knowledge.index.vector_index import FlatIndex
from bottega.types import Query
from tests.knowledge.doubles import SeededEmbedder, text_example
from tests.knowledge.indexed_rows import WIDTH, IndexedRows, settled


@pytest.fixture
def indexed_rows(tmp_path: Path) -> IndexedRows:
    return IndexedRows(tmp_path / "kb.db")


def test_snapshot_is_loaded_and_updated(indexed_rows: IndexedRows, tmp_path: Path) -> None:
    indexed_rows.add(300)
    follower = indexed_rows.follow()
    settled(follower)
    follower.close()
    assert (tmp_path / "kb.db.default.index").exists()
    assert not list(tmp_path.glob("*.part"))
    indexed_rows.add(20)
    indexed_rows.rows.delete(indexed_rows.rows.ids_where()[:7])
    again = indexed_rows.follow()
    index = again.current()
    assert isinstance(index, HnswIndex)  # the snapshot was loaded, not rebuilt
    assert index.digest() == indexed_rows.truth().digest()
    again.close()
    indexed_rows.rows.close()


def spoil_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def spoil_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    "spoil", [spoil_middle, spoil_end, Path.unlink, lambda path: path.write_bytes(b"")]
)
def test_damaged_snapshot_is_rebuilt(
    indexed_rows: IndexedRows, tmp_path: Path, spoil: object
) -> None:
    indexed_rows.add(300)
    follower = indexed_rows.follow()
    settled(follower)
    follower.close()
    spoil(tmp_path / "kb.db.default.index")  # type: ignore[operator]
    again = indexed_rows.follow()
    assert isinstance(again.current(), FlatIndex)
    index = settled(again)
    assert isinstance(index, HnswIndex)
    assert index.digest() == indexed_rows.truth().digest()
    again.close()
    indexed_rows.rows.close()


def test_snapshot_that_is_replaced_while_it_is_read_is_read_again(
    indexed_rows: IndexedRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, newer = tmp_path / "kb.db.default.index", tmp_path / "newer"
    indexed_rows.add(300)
    with closing(indexed_rows.follow()) as follower:
        settled(follower)
    old = load(path)
    assert old is not None
    # The same rows in reverse order, as after rebuilding a graph.
    reordered = faiss.IndexHNSWFlat(WIDTH, 8)
    reordered.add(old.index.reconstruct_n(0, 300)[::-1])
    save(newer, IndexSnapshot(old.header, reordered, old.keys[::-1]))
    read = faiss.read_index

    def read_after_replacement(name: str) -> faiss.Index:
        if newer.exists():
            newer.replace(path)
        return read(name)

    monkeypatch.setattr("bottega.knowledge.index.lazy_faiss.read_index", read_after_replacement)
    found = load(path)
    assert found is not None
    assert found.keys[0] == old.keys[299]
    assert np.array_equal(found.index.reconstruct(0), old.index.reconstruct(299))
    indexed_rows.rows.close()


@pytest.mark.parametrize("size", [8, 512, 4096])
def test_checksum_detects_swapped_words(size: int) -> None:
    data = bytearray(np.random.default_rng(0).bytes(3 * BLOCK))
    before = checksum_of(memoryview(bytes(data)))
    data[:size], data[5 * size : 6 * size] = data[5 * size : 6 * size], data[:size]
    assert checksum_of(memoryview(bytes(data))) != before


def test_equal_last_change_does_not_mean_equal_history(tmp_path: Path) -> None:
    path, copy = tmp_path / "kb.db", tmp_path / "copy.db"

    def put(*texts: str) -> None:
        with KnowledgeBase.open(path, SeededEmbedder(), hnsw_above=5) as kb:
            kb.add([text_example(text) for text in texts])
            kb.search(Query("q1"), 1)
            kb.wait_for_indexes()

    put(*[f"q{i}" for i in range(200)])
    shutil.copy(path, copy)
    put("one", "last")
    path.unlink()
    copy.rename(path)
    index = (tmp_path / "kb.db.default.index").read_bytes()
    put("other", "last")
    (tmp_path / "kb.db.default.index").write_bytes(index)
    with KnowledgeBase.open(path, SeededEmbedder(), hnsw_above=5) as kb:
        assert not kb.verify().sound
        assert kb.search(Query("other"), 1)[0].example.query.text == "other"


def test_copy_with_equal_changes_has_other_marks(indexed_rows: IndexedRows, tmp_path: Path) -> None:
    indexed_rows.add(2)
    indexed_rows.rows._writer.execute(f"VACUUM INTO '{tmp_path / 'copy.db'}'")
    copy = IndexedRows(tmp_path / "copy.db")
    for one in (indexed_rows, copy):
        one.add(1)
    seq = indexed_rows.rows.last_seq()
    assert (seq, indexed_rows.rows.keys_digest()) == (copy.rows.last_seq(), copy.rows.keys_digest())
    assert indexed_rows.rows.mark(seq - 1) == copy.rows.mark(seq - 1)
    assert indexed_rows.rows.mark(seq) != copy.rows.mark(seq)
    indexed_rows.rows.close()
    copy.rows.close()


def test_snapshot_of_another_history_is_ignored(indexed_rows: IndexedRows, tmp_path: Path) -> None:
    """The database was restored from an older copy and changed differently."""
    indexed_rows.add(200)
    copy = tmp_path / "copy.db"
    indexed_rows.rows.read("SELECT 1")
    indexed_rows.rows._writer.execute(f"VACUUM INTO '{copy}'")
    indexed_rows.add(100)
    follower = indexed_rows.follow()
    settled(follower)
    follower.close()
    indexed_rows.rows.close()
    for left in tmp_path.glob("kb.db-*"):
        left.unlink()
    copy.rename(tmp_path / "kb.db")
    other = IndexedRows(tmp_path / "kb.db")
    other.added = 1000
    other.add(150)
    again = other.follow()
    assert isinstance(again.current(), FlatIndex)
    assert again.current().digest() == other.truth().digest()
    again.close()
    other.rows.close()


def test_read_only_folder_only_prevents_the_snapshot(
    indexed_rows: IndexedRows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    indexed_rows.add(200)
    (tmp_path / "kb.db.default.index").mkdir()  # even for a superuser
    follower = indexed_rows.follow()
    with caplog.at_level(logging.WARNING):
        assert isinstance(settled(follower), HnswIndex)
    assert "was not written" in caplog.text
    follower.close()
    indexed_rows.rows.close()
