"""How many groups a hashtag tree should have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bottega.protocols import Vectors
from bottega.retrieval.grouping import distances, kmeans, means
from bottega.retrieval.ports import VectorsOf

# More move the choice little, and its time much.
CANDIDATES, ASKED = 2000, 400
LADDER = (2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64)
# In standard errors of the paired difference to no groups at all.
SURE = 2.0


class Count(Protocol):
    """The number of groups for these entries, oldest first, with one level-2 vector each."""

    def __call__(self, ids: Sequence[str], vectors: Vectors, /) -> int: ...


class LeaveOneOut:
    """The number with which the cache would answer its own latest entries best.

    Each of the latest entries is searched for as if it were a query: in its group, in the order of
    the `order` vectors, without itself. What is found should say what the entry itself says, so the
    cosine of the `responses` vectors is the score: nobody has to know what is right. One group, all
    entries in the order of `order`, is kept unless a division is better by more than chance.
    """

    def __init__(
        self, order: VectorsOf, responses: VectorsOf, *, k: int = 8, seed: int = 0
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
