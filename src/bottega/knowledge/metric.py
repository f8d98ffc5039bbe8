"""Metric fitted to labelled examples: vectors whitened by the covariance within classes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from bottega.knowledge.records import unit
from bottega.protocols import Vectors

SHRINKAGE = 0.7
DIMENSION = 256  # of transformed vectors, as many numbers as the photograph model reads
MAX_REDUCED = 2000  # examples from which the directions of the reduction are computed
MEAN_COUNT = 20  # votes of a class mean; an example has one
NO_SCATTER = 1e-9  # mean squared distance of unit vectors to their class mean

SearchMetric = Literal["stored", "fitted", "cosine", "l2"]
Matrix = NDArray[np.float64]
Classes = NDArray[np.int64]
RealNumber = TypeVar("RealNumber", np.float32, np.float64)


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
    """Deviations of examples from the means of their classes, from which the metric is fitted.

    `rows` (n, d) are the unit vectors minus their mean `centre` (d,), `means` (classes, d) the mean
    rows of the classes, `residuals` (n, d) the rows minus the mean of their class. `classes` (n,)
    numbers the class of each row, `counts` (classes,) the rows of each class, and `dimension` is d.
    If 2 n < d, rows, means and residuals have n coordinates along the orthonormal columns of
    `basis` (d, n): inner products are the same, and the work grows with n instead of d. Else
    `basis` is None.
    """

    centre: Matrix
    rows: Matrix
    residuals: Matrix
    means: Matrix
    classes: Classes
    counts: Classes
    dimension: int
    basis: Matrix | None

    @classmethod
    def of(cls, vectors: Vectors, classes: Classes) -> Self:
        """Scale vectors (n, d) to length one and compare them with the means of their classes (n,),
        which are numbered from 0 without gaps."""
        rows = unit(vectors).astype(np.float64)
        counts = np.bincount(classes)
        dimension = rows.shape[1]
        centre = rows.mean(axis=0)
        rows -= centre
        basis = None
        if 2 * len(rows) < dimension:
            basis = np.asarray(np.linalg.qr(rows.T)[0], np.float64)
            rows = rows @ basis
        means = class_means(rows, classes)
        residuals = rows - means[classes]
        return cls(centre, rows, residuals, means, classes, counts, dimension, basis)

    @cached_property
    def variance(self) -> float:
        """Mean squared distance of a row to the mean of its class."""
        return float(np.square(self.residuals).sum() / len(self.residuals))

    @property
    def has_no_scatter(self) -> bool:
        """Whether no class has two different vectors, so there is nothing to whiten by."""
        return self.variance < NO_SCATTER

    def whitening(self, shrinkage: float) -> Whitening:
        """Return the whitening by the covariance within classes, shrunk by a share of 0 to 1."""
        covariance = self._covariance * (1 - shrinkage)
        covariance[np.diag_indices(len(covariance))] += shrinkage * self.variance / self.dimension
        return Whitening(np.asarray(np.linalg.cholesky(covariance), np.float64))

    @cached_property
    def _covariance(self) -> Matrix:
        covariance: Matrix = self.residuals.T @ self.residuals / len(self.residuals)
        return covariance


@dataclass(frozen=True, eq=False)
class FittedMetric:
    """Cosine of vectors that are whitened by the shrunk covariance within the classes of a
    knowledge base and then reduced to at most `DIMENSION` numbers.

    `centre` is (d,), `projection` (d, at most `DIMENSION`), both float32.
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
        if scatter.has_no_scatter:
            return None
        whitening = scatter.whitening(shrinkage)
        chosen = np.random.default_rng(seed).permutation(len(vectors))[:MAX_REDUCED]
        projection = whitening.projection(_directions(whitening(scatter.rows[chosen])))
        if scatter.basis is not None:
            projection = scatter.basis @ projection
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
        """Return unit rows (n, dimension) of vectors (n, d) of any length."""
        return self.transform_means(unit(vectors))

    def transform_means(self, means: Vectors) -> Vectors:
        """Return unit rows (n, dimension) of means (n, d) of unit vectors, which keep their
        lengths until they are centred."""
        centred: Vectors = means - self.centre
        return unit(centred @ self.projection)


def class_means(rows: NDArray[RealNumber], classes: Classes) -> NDArray[RealNumber]:
    """Return the mean of the rows (n, d) of each class, numbered from 0."""
    means = np.zeros((int(classes.max()) + 1, rows.shape[1]), rows.dtype)
    np.add.at(means, classes, rows)
    counts = np.bincount(classes)[:, None].astype(rows.dtype)
    means /= counts
    return means


def _directions(whitened: Matrix) -> Matrix:
    """Return the directions (d, at most `DIMENSION`) with the largest sums of squares."""
    from scipy.linalg import eigh

    last = len(whitened) - 1
    largest = [max(0, last - DIMENSION + 1), last]
    values, vectors = eigh(whitened @ whitened.T, subset_by_index=largest, check_finite=False)
    kept = values > values[-1] * 1e-9
    directions: Matrix = whitened.T @ (vectors[:, kept] / np.sqrt(values[kept]))
    return directions
