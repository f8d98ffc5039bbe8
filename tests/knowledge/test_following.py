"""An index that follows its rows, and becomes a graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.knowledge.hnsw import HnswIndex
from bottega.knowledge.index import FlatIndex
from tests.knowledge.shelf import Shelf, settled


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


def test_closing_does_not_wait_for_a_whole_graph(shelf: Shelf) -> None:
    shelf.add(3000)
    follower = shelf.follow()
    follower.current()
    follower.close()
    shelf.rows.close()
