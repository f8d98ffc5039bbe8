"""Vote of the nearest examples and the class means under a metric, and its exact leave-one-out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bottega.knowledge.metric import (
    MEAN_COUNT,
    Classes,
    FittedMetric,
    Matrix,
    Scatter,
    class_means,
)
from bottega.knowledge.records import unit
from bottega.protocols import Vectors

PLAIN_SCALE, FITTED_SCALE = 20.0, 10.0  # factors of cosines in the exponent of a vote
NEIGHBOURS = 10  # of the vote that is calibrated
FOLDS, MAX_CALIBRATED = 5, 1000
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95)  # confidences whose accuracy is reported
EXPONENTS = np.geomspace(0.2, 6.0, 60)
# Exponent where no fold can be evaluated; with two examples a class it was near the best one on
# three of five sets.
UNCALIBRATED = 0.4
NOISE = 0.02  # assumed share of wrong labels
TINY = 1e-12
NO_VOTE = -9.0  # similarity, below every cosine, of examples and means that may not vote


@dataclass(frozen=True)
class VoteRule:
    """Rule of a vote under the fitted metric with this `shrinkage`, None for the plain cosine. The
    nearest `neighbours` vote with the weights exp(scale x cosine), each class mean with the weight
    of `mean_count` examples of its cosine."""

    shrinkage: float | None
    neighbours: int
    mean_count: float = 0.0


@dataclass(frozen=True)
class Similarities:
    """Cosines of queries to the examples (n, examples) and to the class means (n, classes)."""

    examples: Vectors
    means: Vectors

    def shares(self, classes: Classes, rule: VoteRule) -> Vectors:
        """Return the shares of the vote (n, classes); `classes` are those of the examples."""
        scale = PLAIN_SCALE if rule.shrinkage is None else FITTED_SCALE
        k = min(rule.neighbours, self.examples.shape[1])
        nearest = np.argpartition(-self.examples, k - 1, axis=1)[:, :k]
        weights = np.exp(scale * (np.take_along_axis(self.examples, nearest, axis=1) - 1))
        shares = rule.mean_count * np.exp(scale * (self.means - 1))
        rows = np.repeat(np.arange(len(weights)), k)
        np.add.at(shares, (rows, classes[nearest].ravel()), weights.ravel())
        normalized: Vectors = shares / shares.sum(axis=1, keepdims=True)
        return normalized


def sharpened(shares: Vectors, exponent: float) -> Vectors:
    """Return the shares (n, classes) to this power, scaled to a sum of 1."""
    powers = np.maximum(shares, TINY) ** exponent
    normalized: Vectors = powers / powers.sum(axis=1, keepdims=True)
    return normalized


@dataclass(frozen=True)
class VoteCalibration:
    """Exponent that makes the shares of a vote probabilities, and the accuracy by confidence.

    `by_confidence` has rows (confidence, examples, correct ones): the examples whose vote has at
    least this confidence, and how many of them get their own label. The first confidence is 0."""

    exponent: float = 1.0
    by_confidence: tuple[tuple[float, int, int], ...] = ()


def calibrate(
    vectors: Vectors, classes: Classes, shrinkage: float, *, seed: int = 0
) -> VoteCalibration:
    """Return the exponent with the lowest log loss in five folds of at most `MAX_CALIBRATED`
    examples, each under a metric fitted to the other folds. It is `UNCALIBRATED` if no fold can be
    evaluated, as with two examples a class: without one of them, no class has two.

    `leave_one_out` has the right accuracy but the wrong shares: it does not reduce the vectors. The
    reduction shortens vectors of new examples before they are scaled to length one, so their votes
    are more decided.
    """
    losses = np.zeros(len(EXPONENTS))
    folds = list(_held_out_shares(vectors, classes, shrinkage, seed))
    if not folds:
        return VoteCalibration(UNCALIBRATED)
    for shares, gold in folds:
        rows = np.arange(len(shares))
        for index, exponent in enumerate(EXPONENTS):
            right = sharpened(shares, exponent)[rows, gold]
            # A few wrong labels must not flatten all confidences.
            losses[index] -= np.log((1 - NOISE) * right + NOISE / shares.shape[1]).sum()
    best = float(EXPONENTS[losses.argmin()])
    sure = np.concatenate([sharpened(shares, best).max(axis=1) for shares, _ in folds])
    correct = np.concatenate([shares.argmax(axis=1) == gold for shares, gold in folds])
    counts = (
        (least, int((sure >= least).sum()), int(correct[sure >= least].sum()))
        for least in (0.0, *THRESHOLDS)
    )
    return VoteCalibration(best, tuple(counts))


def _held_out_shares(
    vectors: Vectors, classes: Classes, shrinkage: float, seed: int
) -> Iterator[tuple[Vectors, Classes]]:
    """Yield for each fold the shares (n, classes) of its examples, and their own classes (n,)."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(classes))[:MAX_CALIBRATED]
    vectors, classes = vectors[rows], np.unique(classes[rows], return_inverse=True)[1]
    fold_of = np.zeros(len(rows), int)
    for label in range(classes.max() + 1):
        members = np.flatnonzero(classes == label)
        fold_of[members] = np.arange(len(members)) % FOLDS
    rule = VoteRule(shrinkage, NEIGHBOURS, MEAN_COUNT)
    for fold in range(FOLDS):
        inside = fold_of == fold
        known, own = np.unique(classes[~inside], return_inverse=True)
        inside &= np.isin(classes, known)
        if len(known) < 2 or not inside.any():
            continue
        rest = vectors[fold_of != fold]
        if (metric := FittedMetric.fit(rest, own, shrinkage=shrinkage)) is None:
            continue
        shares = similarities(metric, vectors[inside], rest, own).shares(own, rule)
        yield shares, np.searchsorted(known, classes[inside])


def plain_leave_one_out(
    vectors: Vectors, classes: Classes, excluded: NDArray[np.bool_]
) -> Similarities:
    """Return the plain cosines of each example to the others. Class means do not vote; `excluded`
    is the one of `leave_one_out`."""
    rows = unit(vectors)
    means = np.full((len(rows), int(classes.max()) + 1), NO_VOTE)
    return _masked((rows @ rows.T).astype(np.float64), means, excluded)


def leave_one_out(scatter: Scatter, shrinkage: float, excluded: NDArray[np.bool_]) -> Similarities:
    """Return the cosines of each example to the others, and to the class means without it, under
    the metric that is fitted without it but not reduced.

    Without example i, the shrunk covariance loses the rank-one term (1 - a) c / (c - 1) / n z z',
    where z is the residual of i in its class of c examples. The inverse without i therefore follows
    from the inverse with it (Sherman and Morrison). Centre and mean variance still include i. Row i
    of `excluded` (n, n) marks the examples that may not vote for i, such as copies of its image; i
    itself never votes. Marked examples still take part in the metric.
    """
    whitening = scatter.whitening(shrinkage)
    rows, own, means = map(whitening, (scatter.rows, scatter.residuals, scatter.means))
    counts = scatter.counts[scatter.classes].astype(float)
    others = np.maximum(counts - 1, 1)
    lost = np.where(counts > 1, (1 - shrinkage) * counts / others / len(rows), 0.0)
    lengths = np.einsum("ij,ij->i", own, own)
    gain = lost / (1 - lost * lengths)
    along = own @ rows.T  # (i, j): of row j on the difference of i
    self_along = np.diag(along)
    square = np.einsum("ij,ij->i", rows, rows)
    own_square = square + gain * self_along**2
    cosines = rows @ rows.T + (gain * self_along)[:, None] * along
    cosines /= np.sqrt(own_square[:, None] * (square + gain[:, None] * along**2))
    mean_along, mean_square = own @ means.T, np.einsum("ij,ij->i", means, means)
    products, squares = rows @ means.T, np.repeat(mean_square[None], len(rows), axis=0)
    index = np.arange(len(rows)), scatter.classes
    squares[index] += (lengths / others - 2 * mean_along[index]) / others
    products[index] -= self_along / others
    mean_along[index] -= lengths / others
    products += (gain * self_along)[:, None] * mean_along
    squares += gain[:, None] * mean_along**2
    to_means = products / np.sqrt(np.maximum(own_square[:, None] * squares, 1e-30))
    to_means[index] = np.where(counts > 1, to_means[index], NO_VOTE)
    return _masked(cosines, to_means, excluded)


def _masked(cosines: Matrix, means: Matrix, excluded: NDArray[np.bool_]) -> Similarities:
    cosines[excluded] = NO_VOTE
    np.fill_diagonal(cosines, NO_VOTE)
    return Similarities(cosines.astype(np.float32), means.astype(np.float32))


def similarities(
    metric: FittedMetric | None, queries: Vectors, examples: Vectors, classes: Classes
) -> Similarities:
    """Return the cosines of queries (n, d) to examples (m, d) under a metric; None is the plain
    cosine, under which class means do not vote."""
    if metric is None:
        no_means = np.full((len(queries), int(classes.max()) + 1), NO_VOTE, np.float32)
        return Similarities(unit(queries) @ unit(examples).T, no_means)
    means = metric.transform_means(class_means(unit(examples), classes))
    rows = metric.transform(queries)
    return Similarities(rows @ metric.transform(examples).T, rows @ means.T)
