"""The hashtag tree: entries below groups, both in one space (Cache-of-Thought, 4.3.2)."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from bottega.errors import SettingError
from bottega.protocols import Vectors
from bottega.retrieval.clustering import GroupCounter, Labels, distances, kmeans, means, spread

COLD_START = 64
# A re-fit is due when the tree has this much more or less than it was fitted to...
GROWTH = 2.0
# ...or when newcomers lie this much farther from their centres than the fitted entries did,
DRIFT = 1.1
# once they are enough to tell, and enough for all re-fits together to cost little.
NEWCOMERS, NEWCOMERS_SHARE = 32, 0.25
# Strays must not make a search go through group after group.
MOST_GROUPS = 64


@dataclass(frozen=True)
class RefitReport:
    """`spread` is the mean distance of an entry to its group's mean, before and after."""

    entries: int
    groups: int
    seconds: float
    spread_before: float
    spread_after: float


class _Group:
    """Members and their sum, in double precision: coming and going leaves no error behind."""

    def __init__(self, dimension: int) -> None:
        self.members: dict[str, None] = {}
        self.total: NDArray[np.float64] = np.zeros(dimension)

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
    """Entries (level 2) in groups (level 1) whose centre is the mean of their vectors.

    The first `cold_start` entries are one group; K-means then divides them. A new entry joins the
    nearest centre, which moves at once; a group whose last entry goes is gone. `groups` is their
    number, or counts them at each re-fit (`LeaveOneOutGroupCount`). A re-fit is due when the tree
    has doubled or halved, or when newcomers lie far off. Where groups are counted and help, a
    newcomer `novel` times as far from every centre as usual founds one of its own; 2.0 is worth it
    where the order inside a group cannot tell topics apart (docs/benchmarks.md), else leave it at
    never. `HashtagTree(10, adapt=False)` is the paper's: a fixed number, fitted once.

    Safe for several threads; `refit` works on a copy and may run beside everything else.
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
        if isinstance(groups, int) and groups < 1:
            raise SettingError(f"a tree of {groups} groups", hint="use 1 or more")
        if cold_start < 1:
            raise SettingError(f"cold_start is {cold_start}", hint="set it to 1 or more")
        self._wanted = groups
        self._adapt = adapt
        self._cold_start = cold_start
        self._novel = novel
        self._seed = seed
        self._vectors: dict[str, Vectors] = {}
        self._groups: list[_Group] = []
        self._group_of: dict[str, _Group] = {}
        self._fitted = 0
        self._spread = 0.0
        self._apart: deque[float] = deque(maxlen=NEWCOMERS)
        self._newcomers = 0
        self._lock = Lock()
        self._fitting = Lock()
        self.refits: deque[RefitReport] = deque(maxlen=1000)

    def __len__(self) -> int:
        return len(self._vectors)

    def __contains__(self, id: object) -> bool:
        return id in self._vectors

    @property
    def centres(self) -> Vectors:
        """(groups, d)"""
        with self._lock:
            return self._centres()

    @property
    def groups(self) -> list[list[str]]:
        """The ids of each group, in the order of `centres`."""
        with self._lock:
            return [list(group.members) for group in self._groups]

    def add(self, ids: Sequence[str], vectors: Vectors) -> None:
        """An id that is there already gets its new vector."""
        with self._lock:
            for id, vector in zip(ids, vectors, strict=True):
                self._remove(id)
                self._add(id, np.array(vector, np.float32))

    def held(self, but: Collection[str]) -> tuple[str, Vectors] | None:
        """The oldest entry that is not one of these, and its vector."""
        with self._lock:
            known = ((id, vector) for id, vector in self._vectors.items() if id not in but)
            return next(known, None)

    def remove(self, ids: Sequence[str]) -> None:
        """Ids that are not there are ignored."""
        with self._lock:
            for id in ids:
                self._remove(id)

    def near(self, vector: Vectors, least: int, *, margin: float = 0.0) -> list[list[str]]:
        """The ids of the nearest group, then of the next, until there are `least` ids.

        Groups at most `margin` farther than the nearest (0.1: a tenth) count as one with it.
        """
        with self._lock:
            if not self._groups:
                return []
            apart = distances(vector[None], self._centres())[0]
            order = np.argsort(apart, kind="stable").tolist()
            close = sum(apart[place] <= apart[order[0]] * (1 + margin) for place in order[1:])
            taken = [[id for place in order[: 1 + close] for id in self._groups[place].members]]
            for place in order[1 + close :]:
                if sum(map(len, taken)) >= least:
                    break
                taken.append(list(self._groups[place].members))
            return taken

    def due(self) -> bool:
        """Whether `refit` would help."""
        with self._lock:
            entries = len(self._vectors)
            if not self._fitted or not self._adapt:
                return not self._fitted and entries >= self._cold_start
            if entries < self._cold_start:
                return False
            resized = not self._fitted / GROWTH < entries < self._fitted * GROWTH
            return resized or self._drifted()

    def refit(self) -> RefitReport | None:
        """Divides all entries anew; None if that is being done already, or there are none.

        What is added or removed meanwhile stays added or removed.
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
            known, old = dict(self._vectors), dict(self._group_of)
        if not known:
            return None
        rows = np.stack(list(known.values()))
        numbers = {group: number for number, group in enumerate(dict.fromkeys(old.values()))}
        before = np.array([numbers[old[id]] for id in known])
        groups = self._groups_for(list(known), rows)
        labels = kmeans(rows, groups, seed=self._seed)
        group_of = _groups(known, rows, labels)
        loose, tight = spread(rows, before), spread(rows, labels)
        with self._lock:
            self._install(known, group_of)
            self._fitted = len(known) if self._vectors else 0
            self._spread, self._newcomers = tight, 0
            seconds = time.perf_counter() - started
            done = RefitReport(len(known), len(self._groups), seconds, loose, tight)
            self.refits.append(done)
            return done

    def _groups_for(self, ids: Sequence[str], rows: Vectors) -> int:
        return self._wanted if isinstance(self._wanted, int) else self._wanted(ids, rows)

    def _install(self, known: Mapping[str, Vectors], group_of: dict[str, _Group]) -> None:
        """The new groups, less what has gone since `known` was read, with what has come."""
        present = self._vectors
        for id, vector in known.items():
            if present.get(id) is not vector:
                group_of.pop(id).remove(id, vector)
        self._group_of = group_of
        self._groups = [group for group in dict.fromkeys(group_of.values()) if group.members]
        for id in [id for id in present if id not in group_of]:
            self._add(id, present[id])

    def _drifted(self) -> bool:
        # The last ones only: a change of topic must not be diluted by the time before it.
        enough = self._newcomers >= max(NEWCOMERS, NEWCOMERS_SHARE * self._fitted)
        return enough and float(np.mean(self._apart)) > DRIFT * self._spread

    def _add(self, id: str, vector: Vectors) -> None:
        if not self._groups:
            self._join(self._founded(len(vector)), id, vector)
            return
        apart = distances(vector[None], self._centres())[0]
        nearest = int(apart.argmin())
        self._apart.append(float(apart[nearest]))
        self._newcomers += 1
        novel = self._may_found() and apart[nearest] > self._novel * self._spread
        group = self._founded(len(vector)) if novel else self._groups[nearest]
        self._join(group, id, vector)

    def _may_found(self) -> bool:
        """Not where the number is fixed, nor where one group was found to be best."""
        counted = self._adapt and self._fitted > 0 and not isinstance(self._wanted, int)
        return counted and 1 < len(self._groups) < MOST_GROUPS

    def _founded(self, dimension: int) -> _Group:
        self._groups.append(_Group(dimension))
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


def _groups(known: Mapping[str, Vectors], rows: Vectors, labels: Labels) -> dict[str, _Group]:
    """The group of each id, made of all rows at once: it takes long enough to be done unlocked."""
    groups = [_Group(rows.shape[1]) for _ in range(labels.max() + 1)]
    for group, mean, size in zip(groups, means(rows, labels), np.bincount(labels), strict=True):
        group.total = mean * size
    for id, label in zip(known, labels.tolist(), strict=True):
        groups[label].members[id] = None
    return {id: groups[label] for id, label in zip(known, labels.tolist(), strict=True)}
