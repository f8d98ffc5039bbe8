"""K-means, and the choice of the number of groups of a hashtag tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bottega.protocols import Vectors
from bottega.retrieval.ports import VectorLookup

Labels = NDArray[np.intp]


def kmeans(vectors: Vectors, groups: int, *, seed: int) -> Labels:
    """Return the group of each row, numbered from 0 without gaps; at most `groups` groups."""
    # More centres than different rows would leave empty groups.
    groups = min(groups, len(np.unique(vectors, axis=0)))
    if groups <= 1:
        return np.zeros(len(vectors), np.intp)
    from sklearn.cluster import KMeans  # slow to load

    fitted = KMeans(groups, n_init=1, random_state=seed, max_iter=50).fit(vectors)
    labels: Labels = np.unique(fitted.labels_, return_inverse=True)[1]
    return labels.astype(np.intp)


def distances(vectors: Vectors, centres: Vectors) -> Vectors:
    """Return Euclidean distances, (n, g)."""
    squares = (vectors**2).sum(1)[:, None] - 2 * vectors @ centres.T + (centres**2).sum(1)
    return np.asarray(np.sqrt(np.maximum(squares, 0)), np.float32)


def means(vectors: Vectors, labels: Labels) -> NDArray[np.float64]:
    """Return the mean of each group, (g, d), in double precision."""
    sums = np.zeros((labels.max(initial=-1) + 1, vectors.shape[1]))
    np.add.at(sums, labels, vectors)
    averages: NDArray[np.float64] = sums / np.bincount(labels)[:, None]
    return averages


def spread(vectors: Vectors, labels: Labels) -> float:
    """Return the mean distance of a row to the mean of the other rows in its group; 0 if all groups
    have one row.

    A row shifts its own mean. Without it the distance is m / (m - 1) times as long, which is
    comparable with a new entry of the same distribution.
    """
    sizes = np.bincount(labels)[labels]
    shared = sizes > 1
    if not shared.any():
        return 0.0
    distance = np.linalg.norm(vectors - means(vectors, labels)[labels], axis=1)
    return float((distance * sizes / np.maximum(sizes - 1, 1))[shared].mean())


# Larger values change the choice little and take much longer.
CANDIDATES, QUERIES = 2000, 400
LADDER = (2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64)
# In standard errors of the paired difference to no groups at all.
MIN_STANDARD_ERRORS = 2.0


class GroupCounter(Protocol):
    """Function that chooses the number of groups for entries, oldest first, by level-2 vectors."""

    def __call__(self, ids: Sequence[str], vectors: Vectors, /) -> int: ...


class LeaveOneOutGroupCount:
    """Group counter that maximizes the retrieval quality for the cache's own latest entries.

    Each of the latest entries is used as a query: its group is searched without it, in the order of
    the `order` vectors. The found entries should have similar responses, so the score is the cosine
    of the `responses` vectors, and no labels are needed. One group is kept unless a division is
    significantly better.
    """

    def __init__(
        self, order: VectorLookup, responses: VectorLookup, *, k: int = 8, seed: int = 0
    ) -> None:
        self._order = order
        self._responses = responses
        self._k = k
        self._seed = seed

    def __call__(self, ids: Sequence[str], vectors: Vectors, /) -> int:
        chosen = self._sample(len(ids))
        rows, names = vectors[chosen], [ids[place] for place in chosen]
        order, responses = _unit(self._order(names)), _unit(self._responses(names))
        queries = slice(max(0, len(chosen) - QUERIES), None)
        near, similarity = order[queries] @ order.T, responses[queries] @ responses.T
        itself = np.arange(len(near)), np.arange(len(chosen))[queries]
        near[itself] = -np.inf
        return self._best(rows, queries, near, similarity)

    def _sample(self, entries: int) -> NDArray[np.intp]:
        """Return the indices of the latest entries and a sample of the others, oldest first."""
        older = max(0, entries - QUERIES)
        rng = np.random.default_rng(self._seed)
        some = rng.choice(older, min(older, CANDIDATES - QUERIES), replace=False)
        return np.concatenate([np.sort(some), np.arange(older, entries)]).astype(np.intp)

    def _best(self, rows: Vectors, queries: slice, near: Vectors, similarity: Vectors) -> int:
        undivided = self._scores(near, similarity, np.ones(near.shape, bool))
        best, groups = 0.0, 1
        for count in LADDER:
            if count * self._k > len(rows):
                break
            labels = kmeans(rows, count, seed=self._seed)
            centres = np.asarray(means(rows, labels), np.float32)
            nearest = distances(rows[queries], centres).argmin(1)
            gain = self._scores(near, similarity, labels == nearest[:, None]) - undivided
            error = gain.std() / np.sqrt(len(gain))
            if gain.mean() > max(best, MIN_STANDARD_ERRORS * error):
                best, groups = float(gain.mean()), count
        return groups

    def _scores(self, near: Vectors, similarity: Vectors, inside: NDArray[np.bool_]) -> Vectors:
        """Return the mean similarity of the k nearest, (queries,), those in the group first."""
        k = min(self._k, near.shape[1] - 1)
        if k < 1:
            return np.zeros(len(near), np.float32)
        # Cosines differ by at most 2, so adding 3 puts the group before all other entries.
        first = np.argpartition(-(near + 3.0 * inside), k - 1, axis=1)[:, :k]
        scores: Vectors = np.take_along_axis(similarity, first, axis=1).mean(1)
        return scores


def _unit(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    rows: Vectors = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return rows
