"""The vote of examples and class means under a fitted metric, and its exact leave-one-out."""

from __future__ import annotations

import numpy as np
import pytest

from bottega.knowledge.fitted_vote import (
    NO_VOTE,
    Similarities,
    VoteRule,
    calibrate,
    leave_one_out,
    plain_leave_one_out,
    sharpened,
    similarities,
)
from bottega.knowledge.metric import FittedMetric, Scatter
from tests.knowledge.test_metric import noisy_classes


def brute_force(scatter: Scatter, shrinkage: float, item: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosines of one example to all examples and class means, with the covariance
    computed again without it."""
    rows, classes = scatter.rows, scatter.classes
    others = np.flatnonzero(np.arange(len(rows)) != item)
    means = np.zeros_like(scatter.means)
    for label in range(len(means)):
        members = others[classes[others] == label]
        if len(members):
            means[label] = rows[members].mean(axis=0)
    residuals = rows[others] - means[classes[others]]
    covariance = (1 - shrinkage) * residuals.T @ residuals / len(rows)
    covariance += shrinkage * scatter.variance / scatter.dimension * np.eye(rows.shape[1])
    inverse = np.linalg.inv(covariance)

    def cosines(to: np.ndarray) -> np.ndarray:
        lengths = np.sqrt(np.einsum("ij,jk,ik->i", to, inverse, to))
        own = np.sqrt(rows[item] @ inverse @ rows[item])
        return np.asarray((to @ inverse @ rows[item]) / np.maximum(lengths, 1e-300) / own)

    return cosines(rows), cosines(means)


@pytest.mark.parametrize("shrinkage", [0.5, 0.7, 0.9])
def test_leave_one_out_equals_fitting_without_the_example(shrinkage: float) -> None:
    vectors, classes = noisy_classes()
    classes = classes.copy()
    classes[-1] = classes.max() + 1  # a class of one
    scatter = Scatter.of(vectors, classes)
    found = leave_one_out(scatter, shrinkage, np.zeros((len(vectors), len(vectors)), bool))
    for item in range(len(vectors)):
        examples, means = brute_force(scatter, shrinkage, item)
        others = np.arange(len(vectors)) != item
        assert np.allclose(found.examples[item][others], examples[others], atol=1e-6)
        present = np.arange(len(means)) != (classes[-1] if item == len(vectors) - 1 else -1)
        assert np.allclose(found.means[item][present], means[present], atol=1e-6)
    assert found.means[-1, -1] == NO_VOTE
    assert (np.diag(found.examples) == NO_VOTE).all()


def test_leave_one_out_of_labels_without_meaning_is_chance() -> None:
    """The scores with the example inside the metric would look right."""
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(60, 200)).astype(np.float32)
    classes = np.arange(60) % 3
    scatter, none = Scatter.of(vectors, classes), np.zeros((60, 60), bool)
    honest = leave_one_out(scatter, 0.1, none).shares(classes, VoteRule(0.1, 10))
    rows = scatter.whitening(0.1)(scatter.rows)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = rows @ rows.T
    np.fill_diagonal(cosines, NO_VOTE)
    means = np.full((60, 3), NO_VOTE, np.float32)
    naive = Similarities(cosines.astype(np.float32), means).shares(classes, VoteRule(0.1, 10))
    assert (naive.argmax(axis=1) == classes).mean() > 0.8
    assert (honest.argmax(axis=1) == classes).mean() < 0.55


@pytest.mark.parametrize("seed", range(3))
def test_calibrated_shares_are_close_to_the_accuracy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(5, 40)) * 0.6
    classes = np.repeat(np.arange(5), 40)
    noisy = means[classes] + rng.normal(size=(200, 40))
    new = means[classes] + rng.normal(size=(200, 40))
    vectors, queries = noisy.astype(np.float32), new.astype(np.float32)
    metric = FittedMetric.fit(vectors, classes)
    shares = similarities(metric, queries, vectors, classes).shares(classes, VoteRule(0.7, 10, 20))
    right = (shares.argmax(axis=1) == classes).mean()
    calibrated = sharpened(shares, calibrate(vectors, classes, 0.7).exponent).max(axis=1).mean()
    assert abs(calibrated - right) < 0.1
    assert abs(calibrated - right) < abs(shares.max(axis=1).mean() - right) + 0.03


def test_without_a_fold_to_evaluate_shares_are_flattened() -> None:
    vectors = np.eye(4, dtype=np.float32)
    assert calibrate(vectors, np.arange(4), 0.7).exponent < 1.0


def test_excluded_examples_do_not_vote() -> None:
    vectors, classes = noisy_classes()
    excluded = np.zeros((len(vectors), len(vectors)), bool)
    excluded[0, 1:] = True
    excluded[0, 5] = False
    scatter = Scatter.of(vectors, classes)
    for found in (
        leave_one_out(scatter, 0.7, excluded),
        plain_leave_one_out(vectors, classes, excluded),
    ):
        shares = found.shares(classes, VoteRule(None, 10))
        assert shares[0, classes[5]] == pytest.approx(1.0)


def test_shares_sum_to_one_and_a_mean_counts_as_several_examples() -> None:
    vectors, classes = noisy_classes()
    metric = FittedMetric.fit(vectors, classes)
    found = similarities(metric, vectors[:3], vectors, classes)
    for count in (0.0, 10.0):
        shares = found.shares(classes, VoteRule(0.7, 10, count))
        assert np.allclose(shares.sum(axis=1), 1, atol=1e-5)
    one = Similarities(np.array([[0.5, 0.5]], np.float32), np.array([[NO_VOTE, 0.5]], np.float32))
    [shares] = one.shares(np.array([0, 0]), VoteRule(0.7, 2, 6.0))
    assert shares[0] == pytest.approx(2 / 8, abs=1e-6)
