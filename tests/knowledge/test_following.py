"""An index that follows its rows, and becomes a graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from bottega.knowledge import index_follower
from bottega.knowledge.hnsw import HnswIndex
from bottega.knowledge.index import FlatIndex
from bottega.knowledge.index_files import wrong_index_files
from bottega.knowledge.index_follower import Follower, OutOfDate
from bottega.knowledge.rows import SqliteRows
from tests.knowledge.shelf import WIDTH, Shelf, settled


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "kb.db")


def test_the_index_becomes_a_graph_above_the_threshold(shelf: Shelf) -> None:
    shelf.add(90)
    follower = shelf.follow()
    assert isinstance(settled(follower), FlatIndex)
    shelf.add(90)
    assert len(follower.current()) == 180  # exact until the graph is there
    index = settled(follower)
    assert isinstance(index, HnswIndex)
    shelf.add(5)
    assert follower.current() is index
    assert index.digest() == shelf.truth().digest()
    follower.close()
    shelf.rows.close()


def test_dead_rows_are_cleared_away_in_the_background(shelf: Shelf) -> None:
    shelf.add(400)
    follower = shelf.follow()
    before = settled(follower)
    shelf.rows.delete(shelf.rows.ids_where()[:150])
    old = follower.current()
    assert old is before
    after = settled(follower)
    assert after is not before
    assert isinstance(after, HnswIndex)
    assert after.dead_share == 0
    assert after.digest() == shelf.truth().digest()
    shelf.rows.delete(shelf.rows.ids_where()[:200])
    assert isinstance(settled(follower), FlatIndex)
    follower.close()
    shelf.rows.close()


@pytest.mark.parametrize("behind", [0, 1])
def test_an_index_is_built_again_only_if_the_log_lost_changes_that_it_lacks(
    shelf: Shelf, behind: int
) -> None:
    shelf.add(10)
    follower = shelf.follow()
    before = follower.current()
    shelf.add(5)
    with shelf.rows.transaction() as connection:
        connection.execute(
            "INSERT OR REPLACE INTO meta VALUES ('pruned of ', ?)", [before.watermark + behind]
        )
    after = follower.current()
    assert (after is before) == (behind == 0)
    assert after.digest() == shelf.truth().digest()
    follower.close()
    shelf.rows.close()


def test_closing_does_not_wait_for_a_whole_graph(shelf: Shelf) -> None:
    shelf.add(3000)
    follower = shelf.follow()
    follower.current()
    follower.close()
    shelf.rows.close()


def test_a_short_process_begins_no_graph(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    monkeypatch.setattr(index_follower, "empty_graph", lambda *shape: begun.append(shape))
    shelf.add(300)
    follower = shelf.follow()
    follower.current()
    follower.close()
    assert begun == []
    shelf.rows.close()


def test_vectors_read_by_a_short_process_are_loaded_by_the_next(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.add(300)
    follower = shelf.follow()
    follower.current()
    follower.close()
    shelf.rows.delete(shelf.rows.ids_where()[:20])
    shelf.add(30)
    pages = watch_pages(monkeypatch)
    again = shelf.follow()
    index = again.current()
    assert isinstance(index, FlatIndex)
    assert index.digest() == shelf.truth().digest()
    queries = np.eye(WIDTH, dtype=np.float32)
    assert index.search(queries, 9) == shelf.truth().search(queries, 9)
    assert pages == []
    assert isinstance(settled(again), HnswIndex)  # which takes the place of the file
    again.close()
    last = shelf.follow()
    assert isinstance(last.current(), HnswIndex)
    last.close()
    shelf.rows.close()


def test_few_changes_do_not_write_the_file_again(shelf: Shelf) -> None:
    shelf.add(300)
    for _ in range(2):
        follower = shelf.follow()
        follower.current()
        follower.close()
        (file,) = Path(shelf.rows.path).parent.glob("*.index")
        written = file.stat().st_mtime_ns
        shelf.add(5)
    follower = shelf.follow()
    follower.current()
    follower.close()
    assert file.stat().st_mtime_ns == written
    shelf.rows.close()


@pytest.mark.parametrize(("added", "saved"), [(33, False), (34, True)])
def test_the_file_is_written_again_when_it_lacks_more_than_a_tenth(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, added: int, saved: bool
) -> None:
    monkeypatch.setattr(index_follower, "SAVED_EVERY", 1)
    shelf.add(300)
    follower = shelf.follow()
    follower.current()
    follower.close()
    (file,) = Path(shelf.rows.path).parent.glob("*.index")
    written = file.stat().st_mtime_ns
    shelf.add(added)
    monkeypatch.setattr(index_follower.Follower, "_maintain", lambda self, index: None)
    follower = shelf.follow()
    follower.current()
    follower.close()
    assert (file.stat().st_mtime_ns != written) == saved
    shelf.rows.close()


def test_a_graph_far_ahead_of_its_file_is_saved_in_the_background(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_follower, "SAVED_EVERY", 1)
    shelf.add(300)
    follower = shelf.follow()
    graph = settled(follower)
    (file,) = Path(shelf.rows.path).parent.glob("*.index")
    for added, saved in ((20, False), (40, True)):
        written = file.stat().st_mtime_ns
        shelf.add(added)
        assert settled(follower) is graph
        assert (file.stat().st_mtime_ns != written) == saved
    follower.close()
    shelf.rows.close()


def test_a_follower_of_a_replaced_view_is_out_of_date(shelf: Shelf) -> None:
    shelf.add(10)
    view = shelf.rows.views()["default"]
    other = Follower(shelf.rows, replace(view, fingerprint="other"), "cosine", 100)
    with pytest.raises(OutOfDate):
        other.current()
    follower = shelf.follow()
    follower.current()
    shelf.add(1)
    follower._view = replace(view, fingerprint="other")
    with pytest.raises(OutOfDate):
        follower.current()
    follower.close()
    with pytest.raises(OutOfDate):
        follower.current()
    shelf.rows.close()


def test_a_small_index_is_not_kept(shelf: Shelf) -> None:
    shelf.add(50)
    follower = shelf.follow()
    follower.current()
    follower.close()
    assert list(Path(shelf.rows.path).parent.glob("*.index")) == []
    shelf.rows.close()


def test_an_unfinished_graph_is_continued(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_follower, "SAVED_EVERY", 20)
    monkeypatch.setattr(index_follower, "BUILT_AT_ONCE", 16)
    monkeypatch.setattr(index_follower, "BUILD_AFTER_SECONDS", 0.0)
    shelf.add(300)
    follower = shelf.follow()
    close_after(follower, pages=5, monkeypatch=monkeypatch)
    folder = Path(shelf.rows.path).parent
    (unfinished,) = folder.glob("*.unfinished")
    assert wrong(shelf) == []
    shelf.rows.delete(shelf.rows.ids_where()[:20])
    shelf.add(30)
    pages = watch_pages(monkeypatch)
    again = shelf.follow()
    index = settled(again)
    assert isinstance(index, HnswIndex)
    assert min(pages) > 20
    assert index.digest() == shelf.truth().digest()
    assert not unfinished.exists()
    again.close()
    assert wrong(shelf) == []
    shelf.rows.close()


def test_an_unfinished_graph_of_other_rows_is_forgotten(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_follower, "SAVED_EVERY", 20)
    monkeypatch.setattr(index_follower, "BUILT_AT_ONCE", 16)
    monkeypatch.setattr(index_follower, "BUILD_AFTER_SECONDS", 0.0)
    shelf.add(300)
    close_after(shelf.follow(), pages=5, monkeypatch=monkeypatch)
    with shelf.rows.transaction() as connection:  # no change tells of it
        connection.execute("DELETE FROM examples WHERE key = 3")
        connection.execute("DELETE FROM vectors WHERE key = 3")
    for kind in (FlatIndex, HnswIndex):  # the second one begins again
        again = shelf.follow()
        assert isinstance(settled(again), kind)
        again.close()
    shelf.rows.close()


def wrong(shelf: Shelf) -> list[str]:
    return [what for what, _ in wrong_index_files(shelf.rows)]


def close_after(follower: Follower, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """The keys after which whole pages of rows are read from now on."""
    pages: list[int] = []
    read = SqliteRows.vectors_after

    def watched(self: SqliteRows, key: int, limit: int, view: int) -> object:
        pages.append(key)
        return read(self, key, limit, view)

    monkeypatch.setattr(SqliteRows, "vectors_after", watched)
    return pages
