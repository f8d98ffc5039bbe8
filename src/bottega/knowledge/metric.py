"""Metric fitted to labelled examples: vectors whitened by the covariance within classes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from bottega.knowledge.records import unit
from bottega.protocols import Vectors

SHRINKAGE = 0.7
DIMENSION = 256  # of transformed vectors, as many numbers as the photograph model reads
MAX_DIRECTIONS = 2000  # rows from which the directions of the reduction are computed
MEAN_COUNT = 20  # examples as which the mean of a class counts in a vote
NO_SCATTER = 1e-9  # mean squared distance of unit vectors to their class mean

SearchMetric = Literal["stored", "fitted", "cosine", "l2"]
Matrix = NDArray[np.float64]
Classes = NDArray[np.int64]


def metric_name(shrinkage: float | None) -> str:
    """Return how a metric is shown; None is the plain cosine."""
    return "cosine" if shrinkage is None else f"fitted, shrinkage {shrinkage:g}"


@dataclass(frozen=True)
class Whitening:
    """Map to coordinates in which the shrunk covariance (1 - a) S + a (tr S / d) I, with the
    Cholesky factor `lower` (d, d), is the identity."""

    lower: Matrix

    def __call__(self, rows: Matrix) -> Matrix:
        """Return whitened rows (n, d)."""
        from scipy.linalg import solve_triangular  # takes a fifth of a second to import

        whitened: Matrix = solve_triangular(self.lower, rows.T, lower=True, check_finite=False).T
        return whitened

    def projection(self, directions: Matrix) -> Matrix:
        """Return the matrix (d, k) whose products with rows are the coordinates of whitened rows
        along the directions (d, k)."""
        from scipy.linalg import solve_triangular

        matrix: Matrix = solve_triangular(
            self.lower, directions, trans="T", lower=True, check_finite=False
        )
        return matrix


@dataclass(frozen=True)
class Scatter:
    """Unit vectors (n, d) of examples with their class, centred; `residuals` are their differences
    to the mean of their class, `means` (classes, d) those means, centred."""

    centre: Matrix
    rows: Matrix
    residuals: Matrix
    means: Matrix
    classes: Classes
    counts: Classes

    @classmethod
    def of(cls, vectors: Vectors, classes: Classes) -> Self:
        """`classes` (n,) numbers the class of each row, from 0 without gaps."""
        rows = unit(vectors).astype(np.float64)
        counts = np.bincount(classes)
        centre = rows.mean(axis=0)
        rows -= centre
        means = np.zeros((len(counts), rows.shape[1]))
        np.add.at(means, classes, rows)
        means /= counts[:, None]
        return cls(centre, rows, rows - means[classes], means, classes, counts)

    @cached_property
    def variance(self) -> float:
        """Mean squared distance of a row to the mean of its class."""
        return float(np.square(self.residuals).sum() / len(self.residuals))

    @property
    def is_nothing(self) -> bool:
        """Whether no class has two different vectors, so there is nothing to whiten by."""
        return self.variance < NO_SCATTER

    def whitening(self, shrinkage: float) -> Whitening:
        dimension = self.rows.shape[1]
        covariance = self._covariance * (1 - shrinkage)
        covariance[np.diag_indices(dimension)] += shrinkage * self.variance / dimension
        return Whitening(np.asarray(np.linalg.cholesky(covariance), np.float64))

    @cached_property
    def _covariance(self) -> Matrix:
        covariance: Matrix = self.residuals.T @ self.residuals / len(self.residuals)
        return covariance


@dataclass(frozen=True, eq=False)
class FittedMetric:
    """Cosine of vectors that were whitened by the covariance within the classes of a knowledge
    base, strongly shrunk, and then reduced.

    `centre` is (d,), `projection` (d, at most `DIMENSION`), both float32. The metric needs labels
    that repeat.
    """

    centre: Vectors
    projection: Vectors
    shrinkage: float

    @classmethod
    def fit(
        cls, vectors: Vectors, classes: Classes, *, shrinkage: float = SHRINKAGE, seed: int = 0
    ) -> Self | None:
        """Fit the metric to vectors (n, d) and their classes (n,), numbered from 0. Return None
        if no class has two different vectors."""
        scatter = Scatter.of(vectors, classes)
        if scatter.is_nothing:
            return None
        whitening = scatter.whitening(shrinkage)
        chosen = np.random.default_rng(seed).permutation(len(vectors))[:MAX_DIRECTIONS]
        projection = whitening.projection(_directions(whitening(scatter.rows[chosen])))
        return cls(
            scatter.centre.astype(np.float32), projection.astype(np.float32), float(shrinkage)
        )

    @cached_property
    def version(self) -> str:
        """Digest of the numbers: equal versions transform equally."""
        digest = hashlib.sha256(self.centre.tobytes() + self.projection.tobytes())
        return digest.hexdigest()[:12]

    @property
    def dimension(self) -> int:
        return int(self.projection.shape[1])

    def transform(self, vectors: Vectors) -> Vectors:
        """Return unit rows (n, dimension)."""
        return self.transform_means(unit(vectors))

    def transform_means(self, means: Vectors) -> Vectors:
        """Return unit rows (n, dimension) of means of unit vectors (n, d)."""
        centred: Vectors = means - self.centre
        return unit(centred @ self.projection)


def _directions(whitened: Matrix) -> Matrix:
    """Return the directions (d, at most `DIMENSION`) with the largest sums of squares."""
    from scipy.linalg import eigh

    last = len(whitened) - 1
    largest = [max(0, last - DIMENSION + 1), last]
    values, vectors = eigh(whitened @ whitened.T, subset_by_index=largest, check_finite=False)
    kept = values > values[-1] * 1e-9
    directions: Matrix = whitened.T @ (vectors[:, kept] / np.sqrt(values[kept]))
    return directions
