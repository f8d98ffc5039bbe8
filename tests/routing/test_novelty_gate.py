from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.routing import NoveltyGate
from bottega.types import Candidate
from tests.builders import example


def candidates(*scores: float) -> list[Candidate]:
    return [Candidate(example(str(i), i), score) for i, score in enumerate(scores)]


def gate(n: int = 100, quantile: float = 0.02) -> NoveltyGate:
    """Return a gate whose examples have means of 0.01, 0.02, ... up to n / 100."""
    means = np.arange(1, n + 1, dtype=np.float32)[:, None] / 100
    rows = means + np.array([[0.02, 0.0, -0.02]])
    return NoveltyGate(rows.astype(np.float32), quantile)


def test_dissimilar_queries_get_no_demonstrations() -> None:
    assert gate().shows(candidates(0.5, 0.5, 0.5))
    assert not gate().shows(candidates(0.02, 0.01, 0.01))
    assert not gate(quantile=0.6).shows(candidates(0.5, 0.5, 0.5))


def test_the_mean_of_the_first_candidates_decides() -> None:
    few = candidates(0.2, 0.0, -0.3)
    assert not gate().shows(few)
    assert gate().shows(few[:1])
    assert gate().shows(candidates(0.3, 0.3, 0.3, *[-1.0] * 40))


def test_no_candidates_and_few_examples_are_never_novel() -> None:
    assert gate().shows([])
    assert gate(49).shows(candidates(-1.0, -1.0, -1.0))


@pytest.mark.parametrize("quantile", [0.02, 0.1, 0.5])
def test_the_quantile_is_the_share_of_rejected_examples(quantile: float) -> None:
    rows = np.random.default_rng(0).normal(0.5, 0.1, (1000, 5)).astype(np.float32)
    made = NoveltyGate(-np.sort(-rows, axis=1), quantile)
    rejected = np.mean([not made.shows(candidates(*row.tolist())) for row in rows])
    assert rejected == pytest.approx(quantile, abs=0.002)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=12), st.floats(0, 1))
def test_more_similar_candidates_are_never_novel_instead(scores: list[float], more: float) -> None:
    if gate().shows(candidates(*scores)):
        assert gate().shows(candidates(*(score + more for score in scores)))
