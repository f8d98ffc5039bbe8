"""K-means, and the number of clusters of a hashtag tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bottega.protocols import Vectors
from bottega.retrieval.ports import VectorLookup

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


# More move the choice little, and its time much.
CANDIDATES, ASKED = 2000, 400
LADDER = (2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64)
# In standard errors of the paired difference to no groups at all.
SURE = 2.0


class GroupCounter(Protocol):
    """The number of groups for these entries, oldest first, with one level-2 vector each."""

    def __call__(self, ids: Sequence[str], vectors: Vectors, /) -> int: ...


class LeaveOneOutGroupCount:
    """The number with which the cache would answer its own latest entries best.

    Each of the latest entries is searched for as if it were a query: in its group, in the order of
    the `order` vectors, without itself. What is found should say what the entry itself says, so the
    cosine of the `responses` vectors is the score: nobody has to know what is right. One group, all
    entries in the order of `order`, is kept unless a division is better by more than chance.
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
        asked = slice(max(0, len(chosen) - ASKED), None)
        near, alike = order[asked] @ order.T, responses[asked] @ responses.T
        itself = np.arange(len(near)), np.arange(len(chosen))[asked]
        near[itself] = -np.inf
        return self._best(rows, asked, near, alike)

    def _sample(self, entries: int) -> NDArray[np.intp]:
        """The latest, and some of the others, oldest first."""
        older = max(0, entries - ASKED)
        rng = np.random.default_rng(self._seed)
        some = rng.choice(older, min(older, CANDIDATES - ASKED), replace=False)
        return np.concatenate([np.sort(some), np.arange(older, entries)]).astype(np.intp)

    def _best(self, rows: Vectors, asked: slice, near: Vectors, alike: Vectors) -> int:
        undivided = self._scores(near, alike, np.ones(near.shape, bool))
        best, groups = 0.0, 1
        for count in LADDER:
            if count * self._k > len(rows):
                break
            labels = kmeans(rows, count, seed=self._seed)
            centres = np.asarray(means(rows, labels), np.float32)
            nearest = distances(rows[asked], centres).argmin(1)
            gain = self._scores(near, alike, labels == nearest[:, None]) - undivided
            error = gain.std() / np.sqrt(len(gain))
            if gain.mean() > max(best, SURE * error):
                best, groups = float(gain.mean()), count
        return groups

    def _scores(self, near: Vectors, alike: Vectors, inside: NDArray[np.bool_]) -> Vectors:
        """(asked,) the mean likeness of the k nearest, those in the group before all others."""
        k = min(self._k, near.shape[1] - 1)
        if k < 1:
            return np.zeros(len(near), np.float32)
        # Cosines differ by 2 at most, so that the group comes first and the rest fills it up.
        first = np.argpartition(-(near + 3.0 * inside), k - 1, axis=1)[:, :k]
        scores: Vectors = np.take_along_axis(alike, first, axis=1).mean(1)
        return scores


def _unit(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    rows: Vectors = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return rows
