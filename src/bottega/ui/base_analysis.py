"""Analysis of a knowledge base's vectors: map, near-duplicates and likely wrong labels.

Each looks at a sample of fixed size and is computed once for each state of the knowledge base.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA

from bottega._util.caching import LRUCache
from bottega.knowledge import KnowledgeBase
from bottega.openai_api.errors import ApiError

SAMPLE = 2000
NEIGHBOURS = 6
KEPT = 16
WAIT_SECONDS = 20.0
COLOURS = 8
OTHER = "other labels"
WIDTH, HEIGHT, MARGIN = 720, 480, 12

Points = NDArray[np.float64]
LabelsById = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class MapPoint:
    """Entry on the map, in pixels."""

    id: str
    x: float
    y: float
    style: str
    label: str


@dataclass(frozen=True)
class EmbeddingMap:
    """The first two principal components of a sample's vectors. `legend` has the style, name and
    number of points of each label with its own colour, `explained` the share of the variance."""

    points: Sequence[MapPoint]
    legend: Sequence[tuple[str, str, int]]
    explained: float
    total: int
    width: int = WIDTH
    height: int = HEIGHT


@dataclass(frozen=True)
class Neighbourhood:
    """The nearest entries of each entry of a sample, as ids and cosines, best first."""

    nearest: Mapping[str, Sequence[tuple[str, float]]]
    labels: LabelsById
    total: int


@dataclass(frozen=True)
class Suspect:
    """Entry of which `votes` of `neighbours` nearest entries have the label `suggested`."""

    id: str
    label: str
    suggested: str
    votes: int
    neighbours: int
    score: float


@dataclass
class BaseAnalyses:
    """Computed analyses, at most `KEPT`; one is computed at a time."""

    _kept: LRUCache[tuple[str, str, str], tuple[int, object]] = field(
        default_factory=lambda: LRUCache(KEPT)
    )
    _lock: Lock = field(default_factory=Lock)

    def map(self, base: KnowledgeBase, namespace: str) -> EmbeddingMap:
        found = self._current(base, namespace, "map")
        assert isinstance(found, EmbeddingMap)
        return found

    def neighbourhood(self, base: KnowledgeBase, namespace: str) -> Neighbourhood:
        found = self._current(base, namespace, "neighbours")
        assert isinstance(found, Neighbourhood)
        return found

    def _current(self, base: KnowledgeBase, namespace: str, kind: str) -> object:
        key = (namespace, kind, ",".join(str(view.number) for view in base.views().values()))
        change = base.last_change()  # read first: a later change computes it again
        found = self._kept.get(key)
        if found is not None and found[0] == change:
            return found[1]
        if not self._lock.acquire(timeout=WAIT_SECONDS):
            raise ApiError(
                "another analysis is being computed", status=503, hint="reload in a moment"
            )
        try:
            found = self._kept.get(key)
            if found is None or found[0] != change:
                made = embedding_map(base) if kind == "map" else neighbourhood(base)
                self._kept.put(key, found := (change, made))
            return found[1]
        finally:
            self._lock.release()


def labels_by_id(base: KnowledgeBase) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for label, ids in base.ids_by_label().items():
        for id in ids:
            found[id] = (*found.get(id, ()), label)
    return found


def embedding_map(base: KnowledgeBase) -> EmbeddingMap:
    """Return the map of at most `SAMPLE` entries."""
    ids, total = base.sample_ids(SAMPLE), len(base)
    if len(ids) < 3:
        return EmbeddingMap((), (), 0.0, total)
    vectors = base.vectors(ids)
    components = min(2, vectors.shape[1])
    analysis = PCA(components, svd_solver="randomized", random_state=0)
    places = np.zeros((len(ids), 2))
    with np.errstate(all="ignore"):  # equal vectors have no variance
        places[:, :components] = analysis.fit_transform(vectors)
        share = float(np.nan_to_num(analysis.explained_variance_ratio_).sum())
    rounding = 1e-5 * float(np.abs(vectors).max())
    places[:, np.ptp(places, axis=0) < rounding] = 0
    places = _scaled(np.nan_to_num(places))
    labels = labels_by_id(base)
    named = [", ".join(labels.get(id, ())) for id in ids]
    counts = Counter(named)
    frequent = [label for label, _ in counts.most_common(COLOURS)]
    if len(counts) > COLOURS:
        frequent = frequent[: COLOURS - 1]
    style = {label: f"s{number}" for number, label in enumerate(frequent)}
    rest = f"s{COLOURS - 1}"
    points = [
        MapPoint(id, round(float(x), 1), round(float(y), 1), style.get(label, rest), label)
        for id, label, (x, y) in zip(ids, named, places, strict=True)
    ]
    legend = [(style[label], label, counts[label]) for label in frequent]
    if others := len(ids) - sum(number for _, _, number in legend):
        legend.append((rest, OTHER, others))
    return EmbeddingMap(points, legend, share, total)


def _scaled(places: Points) -> Points:
    """Return the points scaled equally in both directions to fill the map."""
    low, high = places.min(axis=0), places.max(axis=0)
    room = np.array([WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN])
    lengths = high - low
    factor = min(room[lengths > 0] / lengths[lengths > 0], default=0.0)  # 0: equal vectors
    scaled: Points = (places - (low + high) / 2) * factor + np.array([WIDTH, HEIGHT]) / 2
    return scaled


def neighbourhood(base: KnowledgeBase) -> Neighbourhood:
    """Return the neighbours of at most `SAMPLE` entries among all entries."""
    ids = base.sample_ids(SAMPLE)
    found = base.neighbours(ids, NEIGHBOURS)
    nearest = dict(zip(ids, found, strict=True))
    return Neighbourhood(nearest, labels_by_id(base), len(base))


def near_duplicates(found: Neighbourhood, threshold: float) -> list[tuple[str, str, float]]:
    """Return pairs of entries with at least this cosine, the nearest first."""
    pairs = {
        (min(id, other), max(id, other)): score
        for id, nearest in found.nearest.items()
        for other, score in nearest
        if score >= threshold
    }
    ranked = sorted(pairs.items(), key=lambda pair: (-pair[1], pair[0]))
    return [(one, other, score) for (one, other), score in ranked]


def suspects(found: Neighbourhood) -> list[Suspect]:
    """Return the entries of whose neighbours more than half share one label that the entry does not
    have, the clearest first."""
    suspected = []
    for id, nearest in found.nearest.items():
        own = found.labels.get(id, ())
        votes = Counter(label for other, _ in nearest for label in found.labels.get(other, ()))
        if not votes:
            continue
        suggested, count = min(votes.items(), key=lambda vote: (-vote[1], vote[0]))
        if suggested in own or 2 * count <= len(nearest):
            continue
        scores = [score for other, score in nearest if suggested in found.labels.get(other, ())]
        mean = sum(scores) / len(scores)
        label = ", ".join(own)
        suspected.append(Suspect(id, label, suggested, count, len(nearest), mean))
    return sorted(suspected, key=lambda one: (-one.votes / one.neighbours, -one.score, one.id))
