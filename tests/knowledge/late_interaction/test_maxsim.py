from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.knowledge.late_interaction.maxsim import Positions, exact_scores
from bottega.knowledge.late_interaction.quantization import (
    CodeScan,
    fitting_scale,
    int8_scores,
    nearest_centroids,
    quantize,
    train_centroids,
)
from bottega.knowledge.late_interaction.token_search import SearchEffort, TokenCopies, nearest
from bottega.protocols import Vectors
from tests.knowledge.late_interaction.data import documents, near

torch = pytest.importorskip("torch")


def flat(matrices: list[Vectors]) -> tuple[Vectors, Positions]:
    offsets = np.cumsum([0, *map(len, matrices)], dtype=np.int64)
    return np.concatenate(matrices), offsets


def reference_scores(query: Vectors, matrices: list[Vectors]) -> list[float]:
    return [float((query @ matrix.T).max(axis=1).sum()) for matrix in matrices]


def copies(matrices: list[Vectors], *, coded: bool = False) -> TokenCopies:
    tokens, offsets = flat(matrices)
    scale = fitting_scale(tokens)
    search_bits = None
    if coded:
        centroids = train_centroids(tokens, seed=0)
        search_bits = CodeScan(centroids, nearest_centroids(tokens, centroids), offsets)
    return TokenCopies(
        offsets, tokens.astype(np.float16), quantize(tokens, scale), scale, search_bits
    )


def query_near(matrices: list[Vectors], seed: int) -> Vectors:
    """Return the tokens of one document with noise."""
    rng = np.random.default_rng(seed)
    return near(matrices[rng.integers(len(matrices))], rng, 0.5)


@settings(max_examples=30)
@given(count=st.integers(1, 60), seed=st.integers(0, 9999))
def test_exact_scores_follow_the_definition(count: int, seed: int) -> None:
    matrices = documents(count, seed=seed)
    query = query_near(matrices, seed)
    tokens, offsets = flat(matrices)
    assert exact_scores(query, tokens, offsets) == pytest.approx(
        reference_scores(query, matrices), abs=1e-4
    )
    chosen = np.arange(0, count, 2)
    some = exact_scores(query, tokens, offsets, chosen)
    assert some == pytest.approx(np.array(reference_scores(query, matrices))[chosen], abs=1e-4)


@settings(max_examples=30)
@given(count=st.integers(1, 60), seed=st.integers(0, 9999))
def test_int8_scores_are_close_to_the_reference(count: int, seed: int) -> None:
    matrices = documents(count, seed=seed)
    query = query_near(matrices, seed)
    stored = copies(matrices)
    all_rows = np.arange(count)
    approximate = int8_scores(query, stored.int8_rows, stored.scale, stored.offsets, all_rows)
    # int8 scores of dissimilar tokens stop at about -1/3; exact scores go down to -1.
    exact = [float(np.maximum((query @ m.T).max(axis=1), -64 / 191).sum()) for m in matrices]
    assert np.abs(approximate - exact).max() < 0.02 * len(query)


def test_without_torch_int8_scores_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = documents(30, seed=3)
    query, stored = query_near(matrices, 3), copies(matrices)
    all_rows = np.arange(30)
    fast = int8_scores(query, stored.int8_rows, stored.scale, stored.offsets, all_rows)
    monkeypatch.setitem(sys.modules, "torch", None)
    plain = int8_scores(query, stored.int8_rows, stored.scale, stored.offsets, all_rows)
    assert np.abs(fast - plain).max() < 0.01 * len(query)


def test_int8_scores_do_not_depend_on_the_default_dtype() -> None:
    matrices = documents(30, seed=3)
    query, stored = query_near(matrices, 3), copies(matrices)
    arguments = query, stored.int8_rows, stored.scale, stored.offsets, np.arange(30)
    wanted = int8_scores(*arguments)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert (int8_scores(*arguments) == wanted).all()
    finally:
        torch.set_default_dtype(torch.float32)


@settings(max_examples=20)
@given(seed=st.integers(0, 9999), k=st.integers(1, 20))
def test_int8_and_rescoring_match_the_reference(seed: int, k: int) -> None:
    matrices = documents(400, seed=seed)
    query, stored = query_near(matrices, seed), copies(matrices)
    found, scores = nearest(query, stored, np.arange(400), k, SearchEffort(shortlist=1))
    exact = exact_scores(query, stored.float16_rows, stored.offsets)
    best = np.sort(exact)[::-1][:k]
    assert len(set(found.tolist())) == k
    # Up to 5 % may be missed, so compare the scores with the k-th best.
    assert np.mean(scores >= best[-1] - 1e-5) >= 0.95
    assert scores[0] == pytest.approx(best[0], abs=1e-5)
    assert scores == pytest.approx(exact[found], abs=1e-5)


def test_centroids_leave_the_best_in_the_shortlist() -> None:
    matrices = documents(2000, seed=1, words=200, longest=30)
    stored = copies(matrices, coded=True)
    recalls = []
    for seed in range(20):
        query = query_near(matrices, seed)
        found, _ = nearest(
            query, stored, np.arange(2000), 20, SearchEffort(shortlist=0.2, small=64)
        )
        best = np.argsort(-exact_scores(query, stored.float16_rows, stored.offsets))[:20]
        recalls.append(len(set(found.tolist()) & set(best.tolist())) / 20)
    assert np.mean(recalls) >= 0.99


def test_codes_score_a_document_by_its_centroids() -> None:
    matrices = documents(100, seed=2)
    tokens, offsets = flat(matrices)
    centroids = train_centroids(tokens, seed=0)
    codes = nearest_centroids(tokens, centroids)
    query = query_near(matrices, 0)
    coarse, _ = flat([centroids[codes]])
    exact = exact_scores(query, coarse, offsets)
    assert np.abs(CodeScan(centroids, codes, offsets).scores(query) - exact).max() < 1
    assert np.array_equal(train_centroids(tokens, seed=0), centroids)


@pytest.mark.parametrize("wrong", [{"shortlist": 0.0}, {"shortlist": 1.5}, {"rescored": 0}])
def test_invalid_efforts_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingError):
        SearchEffort(**wrong)  # type: ignore[arg-type]
