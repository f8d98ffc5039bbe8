"""K-means and what is measured of its groups."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bottega.protocols import Vectors

Labels = NDArray[np.intp]


def kmeans(vectors: Vectors, groups: int, *, seed: int) -> Labels:
    """The group of each row, numbered from 0 without gaps; `groups` of them at most."""
    # More centres than different rows would leave some of them without any.
    groups = min(groups, len(np.unique(vectors, axis=0)))
    if groups <= 1:
        return np.zeros(len(vectors), np.intp)
    from sklearn.cluster import KMeans  # slow to load

    fitted = KMeans(groups, n_init=1, random_state=seed, max_iter=50).fit(vectors)
    labels: Labels = np.unique(fitted.labels_, return_inverse=True)[1]
    return labels.astype(np.intp)


def distances(vectors: Vectors, centres: Vectors) -> Vectors:
    """(n, g) Euclidean."""
    squares = (vectors**2).sum(1)[:, None] - 2 * vectors @ centres.T + (centres**2).sum(1)
    return np.asarray(np.sqrt(np.maximum(squares, 0)), np.float32)


def means(vectors: Vectors, labels: Labels) -> NDArray[np.float64]:
    """(g, d), in double precision."""
    sums = np.zeros((labels.max(initial=-1) + 1, vectors.shape[1]))
    np.add.at(sums, labels, vectors)
    averages: NDArray[np.float64] = sums / np.bincount(labels)[:, None]
    return averages


def spread(vectors: Vectors, labels: Labels) -> float:
    """The mean distance of a row to the mean of the others in its group; 0 if all are alone.

    A row pulls its own mean: without it the distance is m / (m - 1) times as long, which is what a
    newcomer from the same source may be compared with.
    """
    sizes = np.bincount(labels)[labels]
    together = sizes > 1
    if not together.any():
        return 0.0
    apart = np.linalg.norm(vectors - means(vectors, labels)[labels], axis=1)
    return float((apart * sizes / np.maximum(sizes - 1, 1))[together].mean())
