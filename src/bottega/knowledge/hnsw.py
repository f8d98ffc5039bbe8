"""Approximate nearest neighbours for large knowledge bases: faiss's HNSW graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from bottega.knowledge.index import (
    LISTED_SHARE,
    NOWHERE,
    FaissIndex,
    Keys,
    Metric,
    Slots,
    listed,
    scan,
    selector,
)
from bottega.knowledge.records import TINY
from bottega.protocols import Vectors

if TYPE_CHECKING:
    import faiss
else:
    from bottega.knowledge import lazy_faiss as faiss

LINKS = 16
EFFORT_BUILDING = 100
EFFORT_SEARCHING = 128
MOST_EFFORT = 2048
# So many are found at least, to see whether they are alike.
LOOKED_AT = 16
ALIKE = 1e-6


class HnswIndex(FaissIndex):
    """Exact all the same while it holds `exact_up_to` rows or fewer, and for a search that is
    restricted to few of its rows. Deleted rows stay in the graph as waypoints until it is rebuilt.
    """

    def __init__(
        self,
        graph: faiss.IndexHNSWFlat,
        metric: Metric,
        *,
        exact_up_to: int = 0,
        slots: Slots | None = None,
        watermark: int = 0,
    ) -> None:
        super().__init__(metric, slots or Slots(), watermark)
        self._graph = graph
        self._rows = cast(faiss.IndexFlat, faiss.downcast_index(graph.storage))
        self._exact_up_to = exact_up_to

    @property
    def dead_share(self) -> float:
        return self._slots.dead / max(1, len(self._slots.keys))

    @property
    def _inner(self) -> faiss.Index:
        return self._graph

    @property
    def _width(self) -> int:
        return self._rows.d

    def _add(self, rows: Vectors) -> None:
        self._graph.add(rows)

    def _remove(self, slots: Keys) -> None:
        self._slots.kill(slots)

    def _stored(self, slot: int) -> Vectors:
        return cast(Vectors, self._rows.reconstruct(slot))

    def _nearest(self, queries: Vectors, k: int, chosen: Keys | None) -> tuple[Vectors, Keys]:
        if chosen is not None and len(chosen) < LISTED_SHARE * len(self._slots.keys):
            return listed(self._rows, queries, k, chosen)
        if len(self) <= self._exact_up_to:
            living = self._slots.living() if chosen is None else self._slots.bits(chosen)
            return scan(self._rows, queries, k, living)
        return self._walk(queries, k, chosen)

    def _walk(self, queries: Vectors, k: int, chosen: Keys | None) -> tuple[Vectors, Keys]:
        kept = len(self) if chosen is None else len(chosen)
        effort = max(EFFORT_SEARCHING, 2 * k) * len(self._slots.keys) / max(1, kept)
        # faiss's type stubs leave it out.
        options = faiss.SearchParametersHNSW(  # type: ignore[attr-defined]
            efSearch=int(min(effort, MOST_EFFORT + 2 * k))
        )
        bits = self._slots.living() if chosen is None else self._slots.bits(chosen)
        if chosen is not None or self._slots.dead:
            options.sel = selector(bits)
        looked_at = min(max(k, LOOKED_AT), kept)
        scores, slots = self._graph.search(queries, looked_at, params=options)
        doubtful = np.flatnonzero(_doubtful(scores, slots))
        if len(doubtful):
            exact = scan(self._rows, queries[doubtful], looked_at, bits)
            scores[doubtful], slots[doubtful] = exact
        return scores[:, :k], slots[:, :k]


def _doubtful(scores: Vectors, slots: Keys) -> NDArray[np.bool_]:
    """By query, whether the walk came to a dead end, or among rows of which most are alike: those
    link to one another and to nothing else, so that what is nearer may lie out of reach."""
    # Not np.isclose, which takes a good part of the time of a walk.
    steps = np.abs(np.diff(scores, axis=1))
    alike = (steps <= ALIKE * np.abs(scores[:, 1:]) + TINY).sum(axis=1)
    crowded = alike > (scores.shape[1] - 1) / 2
    doubtful: NDArray[np.bool_] = crowded | (slots == NOWHERE).any(axis=1)
    return doubtful


def empty_graph(dimension: int, metric: Metric) -> faiss.IndexHNSWFlat:
    kind = faiss.METRIC_INNER_PRODUCT if metric == "cosine" else faiss.METRIC_L2
    graph = faiss.IndexHNSWFlat(dimension, LINKS, kind)
    graph.hnsw.efConstruction = EFFORT_BUILDING
    return graph


def restored(
    index: faiss.Index, keys: Keys, metric: Metric, *, exact_up_to: int, watermark: int
) -> HnswIndex:
    """From what `copied` gave."""
    slots = Slots.marked(keys)
    graph = cast(faiss.IndexHNSWFlat, index)
    return HnswIndex(graph, metric, exact_up_to=exact_up_to, slots=slots, watermark=watermark)
