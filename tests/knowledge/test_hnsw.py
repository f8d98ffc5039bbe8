from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bottega.knowledge import KnowledgeBase
from bottega.knowledge.following import Follower
from bottega.knowledge.hnsw import HnswIndex, empty_graph, restored
from bottega.knowledge.index import FaissIndex, FlatIndex, Metric
from bottega.knowledge.ports import Change, Embedded
from bottega.knowledge.records import identity, with_id
from bottega.knowledge.rows import SqliteRows
from bottega.knowledge.snapshots import BLOCK, checksum_of
from bottega.protocols import Vectors
from bottega.types import Query
from tests.knowledge.doubles import SeededEmbedder, asked

WIDTH, ROWS = 16, 3000


def clustered(rows: int, seed: int = 0) -> Vectors:
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((40, WIDTH))
    around = centres[rng.integers(40, size=rows)] + 0.5 * rng.standard_normal((rows, WIDTH))
    return around.astype(np.float32)


def pair(vectors: Vectors, metric: Metric = "cosine") -> tuple[FlatIndex, HnswIndex]:
    exact = FlatIndex(WIDTH, metric)
    graph = HnswIndex(empty_graph(WIDTH, metric), metric)
    changes = [Change(key, key, vector) for key, vector in enumerate(vectors, 1)]
    exact.apply(changes)
    graph.apply(changes)
    return exact, graph


def recall(exact: FaissIndex, graph: FaissIndex, **options: object) -> float:
    queries = clustered(50, seed=1)
    truth = exact.search(queries, 10, **options)  # type: ignore[arg-type]
    found = graph.search(queries, 10, **options)  # type: ignore[arg-type]
    same = [len({h.key for h in a} & {h.key for h in b}) for a, b in zip(truth, found, strict=True)]
    return sum(same) / sum(map(len, truth))


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_a_graph_finds_what_comparing_every_row_finds(metric: Metric) -> None:
    exact, graph = pair(clustered(ROWS), metric)
    assert recall(exact, graph) >= 0.99
    scores = [hit.score for hit in graph.search(clustered(1), 5)[0]]
    assert scores == pytest.approx([hit.score for hit in exact.search(clustered(1), 5)[0]])


@pytest.mark.parametrize("one_in", [2, 5, 9, 20, 200])
def test_a_filter_costs_no_recall(one_in: int) -> None:
    exact, graph = pair(clustered(ROWS))
    assert recall(exact, graph, allowed=range(1, ROWS, one_in)) >= 0.99


def reached(exact: FaissIndex, graph: FaissIndex, k: int, **options: object) -> float:
    """The share of what is as near as the k nearest: of rows that are alike any will do."""
    queries = clustered(50, seed=1)
    truth = exact.search(queries, k, **options)  # type: ignore[arg-type]
    found = graph.search(queries, k, **options)  # type: ignore[arg-type]
    near = [
        sum(h.score >= t[-1].score - 1e-5 for h in f) for t, f in zip(truth, found, strict=True)
    ]
    return sum(near) / sum(map(len, truth))


@pytest.mark.parametrize(
    ("copies", "apart"), [(4, 0), (10, 0), (40, 0), (100, 0), (40, 1e-7), (40, 1e-3)]
)
def test_rows_that_repeat_cost_no_recall(copies: int, apart: float) -> None:
    noise = np.random.default_rng(2).standard_normal((ROWS, WIDTH)) * apart
    repeated = np.repeat(clustered(ROWS // copies), copies, axis=0) + noise
    exact, graph = pair(repeated.astype(np.float32))
    quarter = range(1, ROWS, 4)
    for k in (1, 10, 200):
        assert reached(exact, graph, k) >= 0.99
        assert reached(exact, graph, k, allowed=quarter) >= 0.99
    assert len(graph.search(clustered(1), ROWS)[0]) == ROWS
    assert len(graph.search(clustered(1), ROWS, allowed=quarter)[0]) == len(quarter)


def test_deleted_rows_cost_no_recall_and_are_not_found() -> None:
    exact, graph = pair(clustered(ROWS))
    gone = [Change(ROWS + i, key, None) for i, key in enumerate(range(1, ROWS, 8), 1)]
    for index in (exact, graph):
        index.apply(gone)
    assert len(graph) == len(exact)
    assert graph.digest() == exact.digest()
    assert graph.dead_share == pytest.approx(1 / 8, abs=0.01)
    assert recall(exact, graph) >= 0.99
    assert recall(exact, graph, allowed=range(1, ROWS, 50)) == 1
    everything = {hit.key for hit in graph.search(clustered(1), ROWS)[0]}
    assert everything.isdisjoint(range(1, ROWS, 8))


def test_a_small_graph_is_exact() -> None:
    vectors = clustered(200)
    exact, _ = pair(vectors)
    graph = HnswIndex(empty_graph(WIDTH, "cosine"), "cosine", exact_up_to=200)
    graph.apply([Change(key, key, vector) for key, vector in enumerate(vectors, 1)])
    assert recall(exact, graph) == 1
    assert recall(exact, graph, allowed=range(50, 150)) == 1


def test_a_row_with_another_vector_replaces_the_old_one() -> None:
    for index in pair(clustered(50)):
        other = np.ones(WIDTH, np.float32)
        index.apply([Change(60, 7, other)])
        index.apply([Change(60, 7, other)])
        (hits,) = index.search(other[None], 50)
        assert len(index) == len(hits) == 50
        assert hits[0].key == 7


def test_a_copy_has_the_same_rows() -> None:
    _, graph = pair(clustered(300))
    graph.apply([Change(301, 5, None)])
    copied, keys, watermark = graph.copied()
    again = restored(copied, keys, "cosine", exact_up_to=0, watermark=watermark)
    graph.apply([Change(302, 6, None)])
    assert (len(again), again.watermark, again.digest()[0]) == (299, 301, 299)
    again.apply([Change(302, 6, None)])
    assert again.digest() == graph.digest()


class Shelf:
    """A file with vectors of its own making, and the index that follows it."""

    def __init__(self, path: Path, above: int = 100) -> None:
        self.rows = SqliteRows(str(path))
        self.above = above
        self.added = self.rows.count()

    def add(self, number: int) -> None:
        examples = [asked(f"q{self.added + i}") for i in range(number)]
        named = [with_id(example, identity(example)) for example in examples]
        vectors = clustered(self.added + number)[self.added :]
        self.rows.put(named, {"default": Embedded("f", vectors)})
        self.added += number

    def follow(self) -> Follower:
        return Follower(self.rows, self.rows.views()["default"], "cosine", self.above)

    def truth(self) -> FaissIndex:
        index = FlatIndex(WIDTH, "cosine")
        index.apply(self.rows.changes_since(0, 1_000_000))
        return index


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "kb.db")


def settled(follower: Follower) -> FaissIndex:
    follower.current()
    follower.settle()
    return follower.current()


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


def test_a_snapshot_is_taken_up_and_caught_up(shelf: Shelf, tmp_path: Path) -> None:
    shelf.add(300)
    follower = shelf.follow()
    settled(follower)
    follower.close()
    assert (tmp_path / "kb.db.default.index").exists()
    assert not list(tmp_path.glob("*.part"))
    shelf.add(20)
    shelf.rows.delete(shelf.rows.ids_where()[:7])
    again = shelf.follow()
    index = again.current()
    assert isinstance(index, HnswIndex)  # at once: it was not built
    assert index.digest() == shelf.truth().digest()
    again.close()
    shelf.rows.close()


def spoil_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def spoil_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    "spoil", [spoil_middle, spoil_end, Path.unlink, lambda path: path.write_bytes(b"")]
)
def test_a_damaged_snapshot_is_made_again(shelf: Shelf, tmp_path: Path, spoil: object) -> None:
    shelf.add(300)
    follower = shelf.follow()
    settled(follower)
    follower.close()
    spoil(tmp_path / "kb.db.default.index")  # type: ignore[operator]
    again = shelf.follow()
    assert isinstance(again.current(), FlatIndex)
    index = settled(again)
    assert isinstance(index, HnswIndex)
    assert index.digest() == shelf.truth().digest()
    again.close()
    shelf.rows.close()


@pytest.mark.parametrize("size", [8, 512, 4096])
def test_a_checksum_sees_what_changed_places(size: int) -> None:
    data = bytearray(np.random.default_rng(0).bytes(3 * BLOCK))
    before = checksum_of(memoryview(bytes(data)))
    data[:size], data[5 * size : 6 * size] = data[5 * size : 6 * size], data[:size]
    assert checksum_of(memoryview(bytes(data))) != before


def test_a_history_with_the_same_last_change_is_another_one(tmp_path: Path) -> None:
    path, copy = tmp_path / "kb.db", tmp_path / "copy.db"

    def put(*texts: str) -> None:
        with KnowledgeBase.open(path, SeededEmbedder(), hnsw_above=5) as kb:
            kb.add([asked(text) for text in texts])
            kb.search(Query("q1"), 1)
            kb.settle()

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


def test_a_copy_that_does_the_same_does_it_as_another(shelf: Shelf, tmp_path: Path) -> None:
    shelf.add(2)
    shelf.rows._writer.execute(f"VACUUM INTO '{tmp_path / 'copy.db'}'")
    copy = Shelf(tmp_path / "copy.db")
    for one in (shelf, copy):
        one.add(1)
    seq = shelf.rows.last_seq()
    assert (seq, shelf.rows.keys_digest()) == (copy.rows.last_seq(), copy.rows.keys_digest())
    assert shelf.rows.mark(seq - 1) == copy.rows.mark(seq - 1)
    assert shelf.rows.mark(seq) != copy.rows.mark(seq)
    shelf.rows.close()
    copy.rows.close()


def test_a_snapshot_of_another_history_is_not_believed(shelf: Shelf, tmp_path: Path) -> None:
    """The database was put back to an older copy and went another way."""
    shelf.add(200)
    copy = tmp_path / "copy.db"
    shelf.rows.read("SELECT 1")
    shelf.rows._writer.execute(f"VACUUM INTO '{copy}'")
    shelf.add(100)
    follower = shelf.follow()
    settled(follower)
    follower.close()
    shelf.rows.close()
    for left in tmp_path.glob("kb.db-*"):
        left.unlink()
    copy.rename(tmp_path / "kb.db")
    other = Shelf(tmp_path / "kb.db")
    other.added = 1000
    other.add(150)
    again = other.follow()
    assert isinstance(again.current(), FlatIndex)
    assert again.current().digest() == other.truth().digest()
    again.close()
    other.rows.close()


def test_a_folder_that_may_not_be_written_costs_only_the_snapshot(
    shelf: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.add(200)
    (tmp_path / "kb.db.default.index").mkdir()  # even for a superuser
    follower = shelf.follow()
    with caplog.at_level(logging.WARNING):
        assert isinstance(settled(follower), HnswIndex)
    assert "was not written" in caplog.text
    follower.close()
    shelf.rows.close()


def test_closing_does_not_wait_for_a_whole_graph(shelf: Shelf) -> None:
    shelf.add(3000)
    follower = shelf.follow()
    follower.current()
    follower.close()
    shelf.rows.close()


READER = """
import os, sys
from bottega.knowledge import KnowledgeBase
from bottega.types import Query
from tests.knowledge.doubles import SeededEmbedder
embedder = SeededEmbedder()
embedder.embed([Query("x")])  # imports what the other user may not read
os.chmod(sys.argv[1], 0o444)
os.chmod(os.path.dirname(sys.argv[1]), 0o555)
if os.getuid() == 0:
    os.setuid(65534)
kb = KnowledgeBase.open(sys.argv[1], embedder, hnsw_above=20)
for _ in range(2):
    assert len(kb.search(Query("x"), 99)) == 50
    kb.settle()
kb.close()
print("read")
"""


def test_a_read_only_folder_is_searched_all_the_same(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with KnowledgeBase.open(shelf / "kb.db", SeededEmbedder()) as kb:
        kb.add([asked(f"q{i}") for i in range(50)])
    command = [sys.executable, "-c", READER, str(shelf / "kb.db")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    shelf.chmod(0o755)
    assert done.stdout == "read\n", done.stderr
    assert not list(shelf.glob("*.index*"))
