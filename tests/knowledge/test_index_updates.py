"""An index that follows its rows and becomes a graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from bottega.knowledge.index.hnsw import HnswIndex
from bottega.knowledge.index.vector_index import FlatIndex
from bottega.knowledge.sqlite import search
from bottega.knowledge.sqlite.rows import SqliteRows
from bottega.knowledge.sqlite.search import IndexFollower, StaleIndexError
from bottega.knowledge.sqlite.verification import index_file_problems
from tests.knowledge.indexed_rows import WIDTH, IndexedRows, settled


@pytest.fixture
def indexed_rows(tmp_path: Path) -> IndexedRows:
    return IndexedRows(tmp_path / "kb.db")


def test_index_becomes_a_graph_above_the_threshold(indexed_rows: IndexedRows) -> None:
    indexed_rows.add(90)
    follower = indexed_rows.follow()
    assert isinstance(settled(follower), FlatIndex)
    indexed_rows.add(90)
    assert len(follower.current()) == 180  # exact until the graph is there
    index = settled(follower)
    assert isinstance(index, HnswIndex)
    indexed_rows.add(5)
    assert follower.current() is index
    assert index.digest() == indexed_rows.truth().digest()
    follower.close()
    indexed_rows.rows.close()


def test_dead_rows_are_removed_in_the_background(indexed_rows: IndexedRows) -> None:
    indexed_rows.add(400)
    follower = indexed_rows.follow()
    before = settled(follower)
    indexed_rows.rows.delete(indexed_rows.rows.ids_where()[:150])
    old = follower.current()
    assert old is before
    after = settled(follower)
    assert after is not before
    assert isinstance(after, HnswIndex)
    assert after.dead_share == 0
    assert after.digest() == indexed_rows.truth().digest()
    indexed_rows.rows.delete(indexed_rows.rows.ids_where()[:200])
    assert isinstance(settled(follower), FlatIndex)
    follower.close()
    indexed_rows.rows.close()


@pytest.mark.parametrize("lag", [0, 1])
def test_index_is_rebuilt_only_if_the_log_lost_its_changes(
    indexed_rows: IndexedRows, lag: int
) -> None:
    indexed_rows.add(10)
    follower = indexed_rows.follow()
    before = follower.current()
    indexed_rows.add(5)
    with indexed_rows.rows.transaction() as connection:
        connection.execute(
            "INSERT OR REPLACE INTO meta VALUES ('pruned of ', ?)", [before.watermark + lag]
        )
    after = follower.current()
    assert (after is before) == (lag == 0)
    assert after.digest() == indexed_rows.truth().digest()
    follower.close()
    indexed_rows.rows.close()


def test_closing_does_not_wait_for_a_whole_graph(indexed_rows: IndexedRows) -> None:
    indexed_rows.add(3000)
    follower = indexed_rows.follow()
    follower.current()
    follower.close()
    indexed_rows.rows.close()


def test_short_process_builds_no_graph(
    indexed_rows: IndexedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    monkeypatch.setattr(search, "empty_graph", lambda *shape: begun.append(shape))
    indexed_rows.add(300)
    follower = indexed_rows.follow()
    follower.current()
    follower.close()
    assert begun == []
    indexed_rows.rows.close()


def test_vectors_read_by_a_short_process_are_loaded_by_the_next(
    indexed_rows: IndexedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexed_rows.add(300)
    follower = indexed_rows.follow()
    follower.current()
    follower.close()
    indexed_rows.rows.delete(indexed_rows.rows.ids_where()[:20])
    indexed_rows.add(30)
    pages = watch_pages(monkeypatch)
    again = indexed_rows.follow()
    index = again.current()
    assert isinstance(index, FlatIndex)
    assert index.digest() == indexed_rows.truth().digest()
    queries = np.eye(WIDTH, dtype=np.float32)
    assert index.search(queries, 9) == indexed_rows.truth().search(queries, 9)
    assert pages == []
    assert isinstance(settled(again), HnswIndex)  # which replaces the file
    again.close()
    last = indexed_rows.follow()
    assert isinstance(last.current(), HnswIndex)
    last.close()
    indexed_rows.rows.close()


def test_few_changes_do_not_rewrite_the_file(indexed_rows: IndexedRows) -> None:
    indexed_rows.add(300)
    for _ in range(2):
        follower = indexed_rows.follow()
        follower.current()
        follower.close()
        (file,) = Path(indexed_rows.rows.path).parent.glob("*.index")
        written = file.stat().st_mtime_ns
        indexed_rows.add(5)
    follower = indexed_rows.follow()
    follower.current()
    follower.close()
    assert file.stat().st_mtime_ns == written
    indexed_rows.rows.close()


@pytest.mark.parametrize(("added", "saved"), [(33, False), (34, True)])
def test_file_is_rewritten_when_a_tenth_is_missing(
    indexed_rows: IndexedRows, monkeypatch: pytest.MonkeyPatch, added: int, saved: bool
) -> None:
    monkeypatch.setattr(search, "SAVE_EVERY", 1)
    indexed_rows.add(300)
    follower = indexed_rows.follow()
    follower.current()
    follower.close()
    (file,) = Path(indexed_rows.rows.path).parent.glob("*.index")
    written = file.stat().st_mtime_ns
    indexed_rows.add(added)
    monkeypatch.setattr(search.IndexFollower, "_maintain", lambda self, index: None)
    follower = indexed_rows.follow()
    follower.current()
    follower.close()
    assert (file.stat().st_mtime_ns != written) == saved
    indexed_rows.rows.close()


def test_old_file_is_rewritten_in_the_background(
    indexed_rows: IndexedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SAVE_EVERY", 1)
    indexed_rows.add(300)
    follower = indexed_rows.follow()
    graph = settled(follower)
    (file,) = Path(indexed_rows.rows.path).parent.glob("*.index")
    for added, saved in ((20, False), (40, True)):
        written = file.stat().st_mtime_ns
        indexed_rows.add(added)
        assert settled(follower) is graph
        assert (file.stat().st_mtime_ns != written) == saved
    follower.close()
    indexed_rows.rows.close()


def test_follower_of_a_replaced_view_is_stale(indexed_rows: IndexedRows) -> None:
    indexed_rows.add(10)
    view = indexed_rows.rows.views()["default"]
    other = IndexFollower(indexed_rows.rows, replace(view, fingerprint="other"), "cosine", 100)
    with pytest.raises(StaleIndexError):
        other.current()
    follower = indexed_rows.follow()
    follower.current()
    indexed_rows.add(1)
    follower._view = replace(view, fingerprint="other")
    with pytest.raises(StaleIndexError):
        follower.current()
    follower.close()
    with pytest.raises(StaleIndexError):
        follower.current()
    indexed_rows.rows.close()


def test_small_index_is_not_kept(indexed_rows: IndexedRows) -> None:
    indexed_rows.add(50)
    follower = indexed_rows.follow()
    follower.current()
    follower.close()
    assert list(Path(indexed_rows.rows.path).parent.glob("*.index")) == []
    indexed_rows.rows.close()


def test_unfinished_graph_is_continued(
    indexed_rows: IndexedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SAVE_EVERY", 20)
    monkeypatch.setattr(search, "BUILD_BATCH", 16)
    monkeypatch.setattr(search, "BUILD_DELAY_SECONDS", 0.0)
    indexed_rows.add(300)
    follower = indexed_rows.follow()
    close_after(follower, pages=5, monkeypatch=monkeypatch)
    folder = Path(indexed_rows.rows.path).parent
    (unfinished,) = folder.glob("*.unfinished")
    assert wrong(indexed_rows) == []
    indexed_rows.rows.delete(indexed_rows.rows.ids_where()[:20])
    indexed_rows.add(30)
    pages = watch_pages(monkeypatch)
    again = indexed_rows.follow()
    index = settled(again)
    assert isinstance(index, HnswIndex)
    assert min(pages) > 20
    assert index.digest() == indexed_rows.truth().digest()
    assert not unfinished.exists()
    again.close()
    assert wrong(indexed_rows) == []
    indexed_rows.rows.close()


def test_unfinished_graph_of_other_rows_is_discarded(
    indexed_rows: IndexedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SAVE_EVERY", 20)
    monkeypatch.setattr(search, "BUILD_BATCH", 16)
    monkeypatch.setattr(search, "BUILD_DELAY_SECONDS", 0.0)
    indexed_rows.add(300)
    close_after(indexed_rows.follow(), pages=5, monkeypatch=monkeypatch)
    with indexed_rows.rows.transaction() as connection:  # no change tells of it
        connection.execute("DELETE FROM examples WHERE key = 3")
        connection.execute("DELETE FROM vectors WHERE key = 3")
    for kind in (FlatIndex, HnswIndex):  # the second one begins again
        again = indexed_rows.follow()
        assert isinstance(settled(again), kind)
        again.close()
    indexed_rows.rows.close()


def wrong(indexed_rows: IndexedRows) -> list[str]:
    return [what for what, _ in index_file_problems(indexed_rows.rows)]


def close_after(follower: IndexFollower, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close the follower while its graph has this many pages of rows."""
    filled = Event()
    append = HnswIndex._append
    count = 0

    def counted(self: HnswIndex, keys: object, vectors: object) -> None:
        nonlocal count
        append(self, keys, vectors)  # type: ignore[arg-type]
        count += 1
        if count == pages:
            filled.set()
            follower._stopping.wait(10)

    with monkeypatch.context() as patched:
        patched.setattr(HnswIndex, "_append", counted)
        follower.current()
        assert filled.wait(10)
        follower.close()


def watch_pages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the keys after which full pages of rows are read."""
    pages: list[int] = []
    read = SqliteRows.vectors_after

    def watched(self: SqliteRows, key: int, limit: int, view: int) -> object:
        pages.append(key)
        return read(self, key, limit, view)

    monkeypatch.setattr(SqliteRows, "vectors_after", watched)
    return pages
