"""Hashtag tree: entries in groups, in one vector space (Cache-of-Thought, 4.3.2)."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bottega.errors import check_count
from bottega.protocols import Vectors
from bottega.retrieval.sources import VectorLookup

Labels = NDArray[np.intp]
# Larger values change the choice little and take much longer.
CANDIDATES, QUERIES = 2000, 400
GROUP_COUNTS = (2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64)
# In standard errors of the paired difference to no groups at all.
MIN_STANDARD_ERRORS = 2.0
COLD_START = 64
# A re-fit is due if the tree has grown or shrunk by this factor since the last fit...
GROWTH = 2.0
# ...or if new entries are farther from their centres than the fitted entries by this factor,
DRIFT = 1.1
# once there are enough of them for a reliable mean and for a low total cost of all re-fits.
NEW_ENTRIES, NEW_ENTRIES_SHARE = 32, 0.25
# Limit of groups: outliers must not make a search visit group after group.
MAX_GROUPS = 64


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
        rows, names = vectors[chosen], [ids[index] for index in chosen]
        order, responses = unit_rows(self._order(names)), unit_rows(self._responses(names))
        queries = slice(max(0, len(chosen) - QUERIES), None)
        near, similarity = order[queries] @ order.T, responses[queries] @ responses.T
        itself = np.arange(len(near)), np.arange(len(chosen))[queries]
        near[itself] = -np.inf
        return self._best(rows, queries, near, similarity)

    def _sample(self, entries: int) -> NDArray[np.intp]:
        """Return the indices of the latest entries and a sample of the others, oldest first."""
        older = max(0, entries - QUERIES)
        rng = np.random.default_rng(self._seed)
        sampled = rng.choice(older, min(older, CANDIDATES - QUERIES), replace=False)
        return np.concatenate([np.sort(sampled), np.arange(older, entries)]).astype(np.intp)

    def _best(self, rows: Vectors, queries: slice, near: Vectors, similarity: Vectors) -> int:
        undivided = self._scores(near, similarity, np.ones(near.shape, bool))
        best, groups = 0.0, 1
        for count in GROUP_COUNTS:
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


def unit_rows(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    rows: Vectors = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return rows


@dataclass(frozen=True)
class RefitReport:
    """Result of a re-fit. A spread is the mean distance of an entry to its group's mean."""

    entries: int
    groups: int
    seconds: float
    spread_before: float
    spread_after: float


@dataclass(eq=False)
class _Group:
    """Members and their sum, in double precision to avoid accumulated rounding errors."""

    total: NDArray[np.float64]
    members: dict[str, None] = field(default_factory=dict)

    @property
    def centre(self) -> NDArray[np.float64]:
        return self.total / len(self.members)

    def add(self, id: str, vector: Vectors) -> None:
        self.members[id] = None
        self.total += vector

    def remove(self, id: str, vector: Vectors) -> None:
        del self.members[id]
        self.total -= vector


class HashtagTree:
    """Tree of entries (level 2) in groups (level 1), whose centre is the mean of their vectors.

    The first `cold_start` entries form one group; K-means then divides them. A new entry joins the
    group of the nearest centre and moves that centre. A group without entries is removed. `groups`
    is the number of groups, or a function that chooses it at each re-fit (`LeaveOneOutGroupCount`).
    A re-fit is due if the tree has doubled or halved, or if new entries are far from the centres.
    With chosen groups, a new entry that is `novel` times as far from every centre as usual forms a
    new group; use 2.0 if the order inside a group does not separate topics (docs/benchmarks.md),
    else the default, never. `HashtagTree(10, adapt=False)` is the paper's tree: a fixed number of
    groups, fitted once.

    Safe for several threads. `refit` works on a copy and may run concurrently with other calls.
    """

    def __init__(
        self,
        groups: int | GroupCounter,
        *,
        adapt: bool = True,
        cold_start: int = COLD_START,
        novel: float = math.inf,
        seed: int = 0,
    ) -> None:
        if isinstance(groups, int):
            check_count("groups", groups)
        check_count("cold_start", cold_start)
        self._group_count = groups
        self._adapt = adapt
        self._cold_start = cold_start
        self._novel = novel
        self._seed = seed
        self._vectors: dict[str, Vectors] = {}
        self._groups: list[_Group] = []
        self._group_of: dict[str, _Group] = {}
        self._fitted = 0
        self._spread = 0.0
        self._new_distances: deque[float] = deque(maxlen=NEW_ENTRIES)
        self._new_entries = 0
        self._lock = Lock()
        self._fitting = Lock()
        self.refits: deque[RefitReport] = deque(maxlen=1000)

    def __len__(self) -> int:
        return len(self._vectors)

    def __contains__(self, id: object) -> bool:
        return id in self._vectors

    @property
    def centres(self) -> Vectors:
        """Return the centres, (groups, d)."""
        with self._lock:
            return self._centres()

    @property
    def groups(self) -> list[list[str]]:
        """Return the ids of each group, in the order of `centres`."""
        with self._lock:
            return [list(group.members) for group in self._groups]

    def add(self, ids: Sequence[str], vectors: Vectors) -> None:
        """Add entries. An existing id gets the new vector."""
        with self._lock:
            for id, vector in zip(ids, vectors, strict=True):
                self._remove(id)
                self._add(id, np.array(vector, np.float32))

    def oldest_entry(self, excluded: Collection[str]) -> tuple[str, Vectors] | None:
        """Return the oldest entry except these ids, with its vector."""
        with self._lock:
            snapshot = ((id, vector) for id, vector in self._vectors.items() if id not in excluded)
            return next(snapshot, None)

    def remove(self, ids: Sequence[str]) -> None:
        """Remove entries. Unknown ids are ignored."""
        with self._lock:
            for id in ids:
                self._remove(id)

    def near(self, vector: Vectors, min_ids: int, *, margin: float = 0.0) -> list[list[str]]:
        """Return the ids of the nearest group, then of the next, until there are `min_ids` ids.

        Groups at most `margin` farther than the nearest (0.1: 10 %) are merged with it.
        """
        with self._lock:
            if not self._groups:
                return []
            distance = distances(vector[None], self._centres())[0]
            order = np.argsort(distance, kind="stable").tolist()
            close = sum(distance[index] <= distance[order[0]] * (1 + margin) for index in order[1:])
            taken = [[id for index in order[: 1 + close] for id in self._groups[index].members]]
            for index in order[1 + close :]:
                if sum(map(len, taken)) >= min_ids:
                    break
                taken.append(list(self._groups[index].members))
            return taken

    def due(self) -> bool:
        """Return whether `refit` would help."""
        with self._lock:
            entries = len(self._vectors)
            if not self._fitted or not self._adapt:
                return not self._fitted and entries >= self._cold_start
            if entries < self._cold_start:
                return False
            if not self._fitted / GROWTH < entries < self._fitted * GROWTH:
                return True
            # Only the latest entries: earlier ones would dilute a change of topic.
            enough = self._new_entries >= max(NEW_ENTRIES, NEW_ENTRIES_SHARE * self._fitted)
            return enough and float(np.mean(self._new_distances)) > DRIFT * self._spread

    def refit(self) -> RefitReport | None:
        """Divide all entries again. Return None if a re-fit is running or the tree is empty.

        Concurrent additions and removals are kept.
        """
        if not self._fitting.acquire(blocking=False):
            return None
        try:
            return self._refit()
        finally:
            self._fitting.release()

    def _refit(self) -> RefitReport | None:
        started = time.perf_counter()
        with self._lock:
            snapshot, old = dict(self._vectors), dict(self._group_of)
        if not snapshot:
            return None
        # Fit without the lock; `_install` applies the additions and removals since the snapshot.
        rows = np.stack(list(snapshot.values()))
        numbers = {group: number for number, group in enumerate(dict.fromkeys(old.values()))}
        before = np.array([numbers[old[id]] for id in snapshot])
        group_count = self._group_count
        groups = group_count if isinstance(group_count, int) else group_count(list(snapshot), rows)
        labels = kmeans(rows, groups, seed=self._seed)
        group_of = _groups(snapshot, rows, labels)
        spread_before, spread_after = spread(rows, before), spread(rows, labels)
        with self._lock:
            self._install(snapshot, group_of)
            self._fitted = len(snapshot) if self._vectors else 0
            self._spread, self._new_entries = spread_after, 0
            seconds = time.perf_counter() - started
            done = RefitReport(
                len(snapshot), len(self._groups), seconds, spread_before, spread_after
            )
            self.refits.append(done)
            return done

    def _install(self, snapshot: Mapping[str, Vectors], group_of: dict[str, _Group]) -> None:
        """Install the new groups and apply the additions and removals since the snapshot."""
        present = self._vectors
        for id, vector in snapshot.items():
            if present.get(id) is not vector:  # removed, or added again with another vector
                group_of.pop(id).remove(id, vector)
        self._group_of = group_of
        self._groups = [group for group in dict.fromkeys(group_of.values()) if group.members]
        for id in [id for id in present if id not in group_of]:
            self._add(id, present[id])

    def _add(self, id: str, vector: Vectors) -> None:
        if not self._groups:
            self._join(self._add_group(len(vector)), id, vector)
            return
        distance = distances(vector[None], self._centres())[0]
        nearest = int(distance.argmin())
        self._new_distances.append(float(distance[nearest]))
        self._new_entries += 1
        # No new group if their number is fixed, or if one group was best.
        counted = self._adapt and self._fitted > 0 and not isinstance(self._group_count, int)
        may_add = counted and 1 < len(self._groups) < MAX_GROUPS
        novel = may_add and distance[nearest] > self._novel * self._spread
        group = self._add_group(len(vector)) if novel else self._groups[nearest]
        self._join(group, id, vector)

    def _add_group(self, dimension: int) -> _Group:
        self._groups.append(_Group(np.zeros(dimension)))
        return self._groups[-1]

    def _join(self, group: _Group, id: str, vector: Vectors) -> None:
        self._vectors[id] = vector
        self._group_of[id] = group
        group.add(id, vector)

    def _remove(self, id: str) -> None:
        vector = self._vectors.pop(id, None)
        if vector is None:
            return
        group = self._group_of.pop(id)
        group.remove(id, vector)
        if not group.members:
            self._groups.remove(group)
        if not self._vectors:
            self._fitted = 0  # a cold start again

    def _centres(self) -> Vectors:
        if not self._groups:
            return np.empty((0, 0), np.float32)
        return np.stack([group.centre for group in self._groups]).astype(np.float32)


def _groups(snapshot: Mapping[str, Vectors], rows: Vectors, labels: Labels) -> dict[str, _Group]:
    """Return the group of each id. Slow, so callers do not hold the lock."""
    sums = means(rows, labels) * np.bincount(labels)[:, None]
    groups = [_Group(total) for total in sums]
    for id, label in zip(snapshot, labels.tolist(), strict=True):
        groups[label].members[id] = None
    return {id: groups[label] for id, label in zip(snapshot, labels.tolist(), strict=True)}
