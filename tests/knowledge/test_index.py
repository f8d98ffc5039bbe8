from __future__ import annotations

from typing import Literal

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bottega.knowledge.index.vector_index import FlatIndex, Keys, Slots
from bottega.knowledge.records import Change, SearchHit
from bottega.protocols import Vectors

Metric = Literal["cosine", "l2"]
WIDTH = 4

whole_numbers = st.integers(-9, 9).map(float)
tables = st.integers(1, 12).flatmap(
    lambda rows: arrays(np.float32, (rows, WIDTH), elements=whole_numbers)
)


def filled(vectors: Vectors, metric: Metric = "cosine") -> FlatIndex:
    index = FlatIndex(vectors.shape[1], metric)
    index.apply([Change(key, key, vector) for key, vector in enumerate(vectors, 1)])
    return index


def brute_force(vectors: Vectors, query: Vectors, metric: Metric) -> dict[int, float]:
    if metric == "l2":
        scores = -np.linalg.norm(vectors - query, axis=1)
    else:
        lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(query)
        scores = vectors @ query / np.maximum(lengths, 1e-30)
    return {key: float(score) for key, score in enumerate(scores, 1)}


def assert_best(hits: list[SearchHit], truth: dict[int, float], k: int) -> None:
    best = sorted(truth.values(), reverse=True)[:k]
    assert [hit.score for hit in hits] == pytest.approx(best, abs=1e-4)
    assert [truth[hit.key] for hit in hits] == pytest.approx(best, abs=1e-4)
    assert len({hit.key for hit in hits}) == len(hits)


@pytest.mark.parametrize("metric", ["cosine", "l2"])
@pytest.mark.parametrize("share", [1, 4, 5, 40])
def test_few_allowed_rows_of_many_are_found_in_order(metric: Metric, share: int) -> None:
    """Below a tenth of the rows the index compares them one by one, above it scans."""
    rng = np.random.default_rng(share)
    vectors = rng.standard_normal((50, WIDTH)).astype(np.float32)
    queries = rng.standard_normal((3, WIDTH)).astype(np.float32)
    allowed = {int(key) for key in rng.choice(50, share, replace=False) + 1}
    found = filled(vectors, metric).search(queries, 3, allowed=allowed)
    for query, hits in zip(queries, found, strict=True):
        truth = brute_force(vectors, query, metric)
        assert_best(hits, {key: truth[key] for key in allowed}, 3)
        assert {hit.key for hit in hits} <= allowed


@given(tables, arrays(np.float32, WIDTH, elements=whole_numbers), st.integers(1, 15), st.data())
@settings(max_examples=60)
def test_search_agrees_with_brute_force(
    vectors: Vectors, query: Vectors, k: int, data: st.DataObject
) -> None:
    metric: Metric = data.draw(st.sampled_from(["cosine", "l2"]))
    keys = st.sets(st.integers(1, len(vectors)))
    allowed, excluded = data.draw(st.none() | keys), data.draw(keys)
    truth = {
        key: score
        for key, score in brute_force(vectors, query, metric).items()
        if key not in excluded and (allowed is None or key in allowed)
    }
    index = filled(vectors, metric)
    (hits,) = index.search(query[None], k, allowed=allowed, excluded=[excluded])
    assert_best(hits, truth, k)


def test_each_vector_of_a_batch_has_its_own_exclusions() -> None:
    index = filled(np.eye(4, dtype=np.float32))
    first, second = index.search(np.eye(4, dtype=np.float32)[:2], 1, excluded=[{1}, set()])
    assert first[0].key != 1
    assert second == [SearchHit(2, 1.0)]


def test_deleted_rows_are_not_found() -> None:
    index = filled(np.eye(4, dtype=np.float32))
    index.apply([Change(5, 2, None), Change(6, 9, None)])
    (hits,) = index.search(np.eye(4, dtype=np.float32)[1:2], 9)
    assert {hit.key for hit in hits} == {1, 3, 4}
    assert len(index) == 3
    assert index.watermark == 6


def test_applying_changes_twice_changes_nothing() -> None:
    index = filled(np.eye(4, dtype=np.float32))
    row = np.ones(4, np.float32)
    for _ in range(2):
        index.apply([Change(5, 5, row), Change(6, 1, None)])
    (hits,) = index.search(row[None], 9)
    assert sorted(hit.key for hit in hits) == [2, 3, 4, 5]
    assert hits[0].key == 5
    assert hits[0].score == pytest.approx(1.0)


def test_empty_index_finds_nothing() -> None:
    assert FlatIndex(4, "l2").search(np.zeros((2, 4), np.float32), 3) == [[], []]


def test_a_single_query_uses_one_thread() -> None:
    seen = []

    class Counting(FlatIndex):
        def _nearest(self, queries: Vectors, k: int, chosen: Keys | None) -> tuple[Vectors, Keys]:
            seen.append(faiss.omp_get_max_threads())
            return super()._nearest(queries, k, chosen)

    index = Counting(WIDTH, "cosine")
    index.apply([Change(1, 1, np.ones(WIDTH, np.float32))])
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(3)
    try:
        index.search(np.ones((1, WIDTH), np.float32), 1)
        index.search(np.ones((2, WIDTH), np.float32), 1)
        assert faiss.omp_get_max_threads() == 3
    finally:
        faiss.omp_set_num_threads(before)
    assert seen == [1, 3]


def test_no_key_has_a_slot_in_an_empty_index() -> None:
    assert len(Slots().of([-1, 0, 1])) == len(Slots()) == 0
