"""Exact nearest neighbours in memory, over faiss."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from threading import Lock
from typing import Literal

import faiss
import numpy as np
from numpy.typing import NDArray

from bottega.knowledge.ports import Change, Hit
from bottega.knowledge.vectors import unit
from bottega.protocols import Vectors

Metric = Literal["cosine", "l2"]
Keys = NDArray[np.int64]
NO_HIT = -1


class FlatIndex:
    """Compares a query with every row. The score is the cosine, or minus the L2 distance."""

    def __init__(self, dimension: int, metric: Metric) -> None:
        flat = faiss.IndexFlatIP if metric == "cosine" else faiss.IndexFlatL2
        self._faiss = faiss.IndexIDMap2(flat(dimension))
        self._metric = metric
        self._present: set[int] = set()
        self._watermark = 0
        self._lock = Lock()

    @property
    def watermark(self) -> int:
        return self._watermark

    def __len__(self) -> int:
        return len(self._present)

    def apply(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        latest = {change.key: change.vector for change in changes}
        kept = {key: vector for key, vector in latest.items() if vector is not None}
        rows = self._scaled(np.stack(list(kept.values()))) if kept else None
        with self._lock:
            self._remove(self._present & latest.keys())
            if rows is not None:
                self._faiss.add_with_ids(rows, _keys(kept))
                self._present |= kept.keys()
            self._watermark = max(self._watermark, changes[-1].seq)

    def search(
        self,
        vectors: Vectors,
        k: int,
        *,
        allowed: Collection[int] | None = None,
        excluded: Sequence[Collection[int]] | None = None,
    ) -> list[list[Hit]]:
        barred = excluded or [()] * len(vectors)
        # As many more as may be dropped again: what is left is exact.
        wanted = k + max(map(len, barred), default=0)
        queries = self._scaled(vectors)
        options = None if allowed is None else _only(allowed)
        with self._lock:
            wanted = min(wanted, len(self))
            if wanted == 0:
                return [[] for _ in vectors]
            scores, keys = self._faiss.search(queries, wanted, params=options)
        if self._metric == "l2":
            scores = -np.sqrt(np.maximum(scores, 0.0))
        return [_hits(*found)[:k] for found in zip(keys, scores, barred, strict=True)]

    def _scaled(self, vectors: Vectors) -> Vectors:
        return unit(vectors) if self._metric == "cosine" else np.ascontiguousarray(vectors)

    def _remove(self, keys: set[int]) -> None:
        if keys:
            self._faiss.remove_ids(faiss.IDSelectorBatch(_keys(keys)))
            self._present -= keys


def _keys(keys: Collection[int]) -> Keys:
    return np.fromiter(keys, np.int64, len(keys))


def _only(allowed: Collection[int]) -> faiss.SearchParameters:
    """A bitmap: several times faster here than faiss's hash set."""
    keys = _keys(allowed)
    bits = np.zeros(int(keys.max(initial=0)) + 1, bool)
    bits[keys] = True
    # faiss's type stubs know the C++ signatures, not those of its Python wrappers.
    bitmap = faiss.IDSelectorBitmap(np.packbits(bits, bitorder="little"))  # type: ignore[call-arg, arg-type]
    return faiss.SearchParameters(sel=bitmap)  # type: ignore[call-arg]


def _hits(keys: Keys, scores: Vectors, barred: Collection[int]) -> list[Hit]:
    pairs = zip(keys.tolist(), scores.tolist(), strict=True)
    return [Hit(key, score) for key, score in pairs if key != NO_HIT and key not in barred]
