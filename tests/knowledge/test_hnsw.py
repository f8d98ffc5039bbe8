from __future__ import annotations

import numpy as np
import pytest

from bottega.knowledge.index.hnsw import HnswIndex, empty_graph, restore_graph
from bottega.knowledge.index.vector_index import FaissIndex, FlatIndex, VectorMetric
from bottega.knowledge.records import Change
from bottega.protocols import Vectors
from tests.knowledge.indexed_rows import WIDTH, clustered

ROWS = 3000


def pair(vectors: Vectors, metric: VectorMetric = "cosine") -> tuple[FlatIndex, HnswIndex]:
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
def test_graph_matches_exact_search(metric: VectorMetric) -> None:
    exact, graph = pair(clustered(ROWS), metric)
    assert recall(exact, graph) >= 0.99
    scores = [hit.score for hit in graph.search(clustered(1), 5)[0]]
    assert scores == pytest.approx([hit.score for hit in exact.search(clustered(1), 5)[0]])


@pytest.mark.parametrize("one_in", [2, 5, 9, 20, 200])
def test_filter_keeps_recall(one_in: int) -> None:
    exact, graph = pair(clustered(ROWS))
    assert recall(exact, graph, allowed=range(1, ROWS, one_in)) >= 0.99


def reached(exact: FaissIndex, graph: FaissIndex, k: int, **options: object) -> float:
    """Return the recall at k; rows with equal scores are interchangeable."""
    queries = clustered(50, seed=1)
    truth = exact.search(queries, k, **options)  # type: ignore[arg-type]
    found = graph.search(queries, k, **options)  # type: ignore[arg-type]
    near = [
        sum(h.score >= t[-1].score - 1e-5 for h in f) for t, f in zip(truth, found, strict=True)
    ]
    return sum(near) / sum(map(len, truth))


@pytest.mark.parametrize(
    ("copies", "apart"),
    [
        (4, 0),
        (100, 0),
        (40, 1e-7),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((10, 0), (40, 0), (40, 1e-3))),
    ],
)
def test_repeated_rows_keep_recall(copies: int, apart: float) -> None:
    noise = np.random.default_rng(2).standard_normal((ROWS, WIDTH)) * apart
    repeated = np.repeat(clustered(ROWS // copies), copies, axis=0) + noise
    exact, graph = pair(repeated.astype(np.float32))
    quarter = range(1, ROWS, 4)
    for k in (1, 10, 200):
        assert reached(exact, graph, k) >= 0.99
        assert reached(exact, graph, k, allowed=quarter) >= 0.99
    assert len(graph.search(clustered(1), ROWS)[0]) == ROWS
    assert len(graph.search(clustered(1), ROWS, allowed=quarter)[0]) == len(quarter)


def test_deleted_rows_keep_recall_and_are_not_found() -> None:
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


def test_small_graph_is_exact() -> None:
    vectors = clustered(200)
    exact, _ = pair(vectors)
    graph = HnswIndex(empty_graph(WIDTH, "cosine"), "cosine", exact_up_to=200)
    graph.apply([Change(key, key, vector) for key, vector in enumerate(vectors, 1)])
    assert recall(exact, graph) == 1
    assert recall(exact, graph, allowed=range(50, 150)) == 1


def test_row_with_another_vector_replaces_the_old_one() -> None:
    for index in pair(clustered(50)):
        other = np.ones(WIDTH, np.float32)
        index.apply([Change(60, 7, other)])
        index.apply([Change(60, 7, other)])
        (hits,) = index.search(other[None], 50)
        assert len(index) == len(hits) == 50
        assert hits[0].key == 7


def test_copy_has_the_same_rows() -> None:
    _, graph = pair(clustered(300))
    graph.apply([Change(301, 5, None)])
    copy, keys, watermark = graph.copy()
    again = restore_graph(copy, keys, "cosine", exact_up_to=0, watermark=watermark)
    graph.apply([Change(302, 6, None)])
    assert (len(again), again.watermark, again.digest()[0]) == (299, 301, 299)
    again.apply([Change(302, 6, None)])
    assert again.digest() == graph.digest()
