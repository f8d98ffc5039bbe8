from __future__ import annotations

import numpy as np
import pytest

from bottega.retrieval.hashtag_tree import means, spread


def test_the_spread_is_the_distance_to_the_others_of_a_group() -> None:
    vectors = np.array([[0, 0], [4, 0], [0, 9], [3, 9], [6, 9], [70, 70]], np.float32)
    labels = np.array([0, 0, 1, 1, 1, 2])
    assert means(vectors, labels).tolist() == [[2, 0], [3, 9], [70, 70]]
    # Pairs lie 4 apart; of the three the outer ones lie 4.5 from the mean of the others.
    assert spread(vectors, labels) == pytest.approx((4 + 4 + 4.5 + 0 + 4.5) / 5)
    assert spread(vectors[:2], np.array([0, 0])) == pytest.approx(4)


def test_groups_of_one_entry_have_no_spread() -> None:
    assert spread(np.eye(3, dtype=np.float32), np.arange(3)) == 0.0
