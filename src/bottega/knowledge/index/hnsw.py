"""Approximate nearest neighbours for large knowledge bases, with faiss's HNSW graph."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from bottega.knowledge.index import lazy_faiss as faiss
from bottega.knowledge.index.vector_index import (
    MISSING,
    SUBSET_SHARE,
    FaissIndex,
    Keys,
    Slots,
    VectorMetric,
    search_bits,
    search_slots,
    selector,
)
from bottega.knowledge.records import TINY
from bottega.protocols import Vectors

LINKS = 16
EF_CONSTRUCTION = 100
EF_SEARCH = 128
MAX_EF_SEARCH = 2048
# Results requested at least, to detect tied scores.
MIN_RESULTS = 16
TIE_TOLERANCE = 1e-6


class HnswIndex(FaissIndex):
    """Approximate index.

    It is exact up to `exact_up_to` rows and for a search restricted to a small share of its rows.
    Deleted rows stay in the graph as waypoints until it is rebuilt.
    """

    def __init__(
        self,
        graph: faiss.IndexHNSWFlat,
        metric: VectorMetric,
        *,
        exact_up_to: int = 0,
        slots: Slots | None = None,
        watermark: int = 0,
    ) -> None:
        super().__init__(metric, graph, slots, watermark)
        self._rows = cast(faiss.IndexFlat, faiss.downcast_index(graph.storage))
        self._exact_up_to = exact_up_to

    @property
    def dead_share(self) -> float:
        return self._slots.dead / max(1, len(self._slots.keys))

    def _remove(self, slots: Keys) -> None:
        self._slots.mark_dead(slots)

    def _row_at(self, slot: int) -> Vectors:
        return cast(Vectors, self._rows.reconstruct(slot))

    def _nearest(self, queries: Vectors, k: int, chosen: Keys | None) -> tuple[Vectors, Keys]:
        if chosen is not None and len(chosen) < SUBSET_SHARE * len(self._slots.keys):
            return search_slots(self._rows, queries, k, chosen)
        if len(self) <= self._exact_up_to:
            alive_bits = self._slots.alive_bits() if chosen is None else self._slots.bits(chosen)
            return search_bits(self._rows, queries, k, alive_bits)
        return self._search_graph(queries, k, chosen)

    def _search_graph(self, queries: Vectors, k: int, chosen: Keys | None) -> tuple[Vectors, Keys]:
        kept = len(self) if chosen is None else len(chosen)
        effort = max(EF_SEARCH, 2 * k) * len(self._slots.keys) / max(1, kept)
        # Missing in faiss's type stubs.
        options = faiss.SearchParametersHNSW(  # type: ignore[attr-defined]
            efSearch=int(min(effort, MAX_EF_SEARCH + 2 * k))
        )
        bits = self._slots.alive_bits() if chosen is None else self._slots.bits(chosen)
        if chosen is not None or self._slots.dead:
            options.sel = selector(bits)
        count = min(max(k, MIN_RESULTS), kept)
        scores, slots = self._index.search(queries, count, params=options)
        uncertain = np.flatnonzero(_is_doubtful(scores, slots))
        if len(uncertain):
            exact = search_bits(self._rows, queries[uncertain], count, bits)
            scores[uncertain], slots[uncertain] = exact
        return scores[:, :k], slots[:, :k]


def _is_doubtful(scores: Vectors, slots: Keys) -> NDArray[np.bool_]:
    """Return, per query, whether the graph search may have missed nearer rows.

    That happens at a dead end, or among rows of which most have equal scores: those link only to
    one another.
    """
    # np.isclose would take a large part of the search time.
    steps = np.abs(np.diff(scores, axis=1))
    ties = (steps <= TIE_TOLERANCE * np.abs(scores[:, 1:]) + TINY).sum(axis=1)
    crowded = ties > (scores.shape[1] - 1) / 2
    uncertain: NDArray[np.bool_] = crowded | (slots == MISSING).any(axis=1)
    return uncertain


def empty_graph(dimension: int, metric: VectorMetric) -> faiss.IndexHNSWFlat:
    kind = faiss.METRIC_INNER_PRODUCT if metric == "cosine" else faiss.METRIC_L2
    graph = faiss.IndexHNSWFlat(dimension, LINKS, kind)
    graph.hnsw.efConstruction = EF_CONSTRUCTION
    return graph


def restore_graph(
    index: faiss.Index, keys: Keys, metric: VectorMetric, *, exact_up_to: int, watermark: int
) -> HnswIndex:
    """Return an index from the values of `copy`."""
    slots = Slots.from_slot_keys(keys)
    graph = cast(faiss.IndexHNSWFlat, index)
    return HnswIndex(graph, metric, exact_up_to=exact_up_to, slots=slots, watermark=watermark)
