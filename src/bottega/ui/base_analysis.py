"""Analysis of a knowledge base's vectors: map, near-duplicates and likely wrong labels.

Each analysis reads at most `SAMPLE` examples. It is computed in the background and cached until the
knowledge base changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from bottega._util.caching import LRUCache
from bottega.knowledge import KnowledgeBase
from bottega.protocols import Vectors
from bottega.ui.background import BackgroundComputations
from bottega.ui.bases import read_existing

SAMPLE = 2000  # examples
NEIGHBOURS = 6
BLOCK = 256  # examples whose neighbours are searched at once, while requests wait
MAX_CACHED = 16  # analyses
SUBSPACE, ITERATIONS = 10, 7
STYLES = (*("s0", "s1", "s2", "s3", "s4"), *("s5", "s6", "s8", "s9", "s7"))  # the last is grey
OTHER = "other labels"
WIDTH, HEIGHT, MARGIN = 720, 480, 12  # pixels

Points = NDArray[np.float64]
LabelsById = Mapping[str, tuple[str, ...]]
Analysis = TypeVar("Analysis")


@dataclass(frozen=True)
class MapPoint:
    """Example on the map. Coordinates are in pixels."""

    id: str
    x: float
    y: float
    style: str
    label: str


@dataclass(frozen=True)
class EmbeddingMap:
    """First two principal components of a sample's vectors. `legend` has the style, name and number
    of points of each colour; `explained` is their share of the variance, `total` the number of
    examples in the knowledge base."""

    points: Sequence[MapPoint]
    legend: Sequence[tuple[str, str, int]]
    explained: float
    total: int
    width: int = WIDTH
    height: int = HEIGHT


@dataclass(frozen=True)
class Neighbourhood:
    """Nearest examples of each example of a sample, as ids and cosines, best first."""

    nearest: Mapping[str, Sequence[tuple[str, float]]]
    labels: LabelsById
    total: int


@dataclass(frozen=True)
class WrongLabel:
    """Likely wrong label: of the `neighbours` nearest examples, `votes` have the label `suggested`,
    with the mean similarity `score`."""

    id: str
    label: str
    suggested: str
    votes: int
    neighbours: int
    score: float


@dataclass
class BaseAnalyses:
    """Cache of at most `MAX_CACHED` analyses, computed one at a time in the background. Methods
    return None during the computation."""

    background: BackgroundComputations = field(default_factory=BackgroundComputations)
    _cache: LRUCache[object, tuple[int, object]] = field(
        default_factory=lambda: LRUCache(MAX_CACHED)
    )

    def map(self, base: KnowledgeBase, namespace: str) -> EmbeddingMap | None:
        return self._current(base, namespace, embedding_map)

    def neighbourhood(self, base: KnowledgeBase, namespace: str) -> Neighbourhood | None:
        return self._current(base, namespace, neighbourhood)

    def _current(
        self, base: KnowledgeBase, namespace: str, analyse: Callable[[KnowledgeBase], Analysis]
    ) -> Analysis | None:
        key = (namespace, analyse, *(view.number for view in base.views().values()))
        found = self._cache.get(key)
        if found is not None and found[0] == base.last_change():
            return cast(Analysis, found[1])

        def compute() -> Analysis:
            change = base.last_change()  # read first: a concurrent change invalidates the result
            computed = analyse(base)
            self._cache.put(key, (change, computed))
            return computed

        return self.background.result(key, compute)


def labels_by_id(base: KnowledgeBase) -> dict[str, tuple[str, ...]]:
    """Return the labels of each example."""
    found: dict[str, tuple[str, ...]] = {}
    for label, ids in base.ids_by_label().items():
        for id in ids:
            found[id] = (*found.get(id, ()), label)
    return found


def embedding_map(base: KnowledgeBase) -> EmbeddingMap:
    """Return the map of at most `SAMPLE` examples; it has no points for fewer than three."""
    ids, vectors = read_existing(base, base.sample_ids(SAMPLE), partial(_vectors, base))
    total = len(base)
    if len(ids) < 3:
        return EmbeddingMap((), (), 0.0, total)
    positions, share = principal_components(vectors)
    rounding = 1e-5 * float(np.abs(vectors).max())
    positions[:, np.ptp(positions, axis=0) < rounding] = 0
    positions = _scaled(positions)
    labels = labels_by_id(base)
    named = [", ".join(labels.get(id, ())) for id in ids]
    counts = Counter(named)
    frequent = [label for label, _ in counts.most_common(len(STYLES))]
    if len(counts) > len(STYLES):
        frequent = frequent[:-1]
    style, rest = dict(zip(frequent, STYLES, strict=False)), STYLES[-1]
    points = [
        MapPoint(id, round(float(x), 1), round(float(y), 1), style.get(label, rest), label)
        for id, label, (x, y) in zip(ids, named, positions, strict=True)
    ]
    legend = [(style[label], label, counts[label]) for label in frequent]
    if others := len(ids) - sum(number for _, _, number in legend):
        legend.append((rest, OTHER, others))
    return EmbeddingMap(points, legend, share, total)


def _vectors(base: KnowledgeBase, ids: Sequence[str]) -> Vectors:
    return base.vectors(ids) if ids else np.empty((0, 0), np.float32)


def principal_components(vectors: Vectors) -> tuple[Points, float]:
    """Return the first two principal components (n, 2), and their share of the variance.

    Randomized subspace iteration: Halko, Martinsson and Tropp, SIAM Review 53 (2011).
    """
    centred = vectors - vectors.mean(axis=0)
    found = np.zeros((len(vectors), 2))
    variance = float((centred**2).sum())
    if not variance:
        return found, 0.0
    start = np.random.default_rng(0).normal(size=(centred.shape[1], SUBSPACE))
    basis, _ = np.linalg.qr(start.astype(np.float32))
    for _ in range(ITERATIONS):
        basis, _ = np.linalg.qr(centred.T @ (centred @ basis))
    left, lengths, _ = np.linalg.svd(centred @ basis, full_matrices=False)
    count = min(2, len(lengths))
    found[:, :count] = left[:, :count] * lengths[:count]
    return found, float((lengths[:count] ** 2).sum()) / variance


def _scaled(positions: Points) -> Points:
    """Scale points (n, 2) equally in both directions to fill the map."""
    low, high = positions.min(axis=0), positions.max(axis=0)
    room = np.array([WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN])
    lengths = high - low
    factor = min(room[lengths > 0] / lengths[lengths > 0], default=0.0)  # 0: equal vectors
    scaled: Points = (positions - (low + high) / 2) * factor + np.array([WIDTH, HEIGHT]) / 2
    return scaled


def neighbourhood(base: KnowledgeBase) -> Neighbourhood:
    """Return the neighbours of at most `SAMPLE` examples among all examples."""
    ids = base.sample_ids(SAMPLE)
    nearest: dict[str, Sequence[tuple[str, float]]] = {}
    near = partial(base.neighbours, k=NEIGHBOURS)
    for start in range(0, len(ids), BLOCK):
        block, found = read_existing(base, ids[start : start + BLOCK], near)
        nearest.update(zip(block, found, strict=True))
    return Neighbourhood(nearest, labels_by_id(base), len(base))


def near_duplicates(found: Neighbourhood, threshold: float) -> list[tuple[str, str, float]]:
    """Return pairs of ids with a cosine of at least `threshold`, the most similar first."""
    pairs = {
        (min(id, other), max(id, other)): score
        for id, nearest in found.nearest.items()
        for other, score in nearest
        if score >= threshold
    }
    ranked = sorted(pairs.items(), key=lambda pair: (-pair[1], pair[0]))
    return [(one, other, score) for (one, other), score in ranked]


def likely_wrong_labels(found: Neighbourhood) -> list[WrongLabel]:
    """Return the examples that lack a label which more than half of their neighbours share, ordered
    by the share of these neighbours."""
    wrong = []
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
        wrong.append(WrongLabel(id, label, suggested, count, len(nearest), mean))
    return sorted(wrong, key=lambda one: (-one.votes / one.neighbours, -one.score, one.id))
