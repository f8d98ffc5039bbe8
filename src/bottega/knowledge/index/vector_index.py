"""Exact nearest neighbours in memory, with faiss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Literal, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from bottega.errors import SettingError
from bottega.knowledge.index import lazy_faiss as faiss
from bottega.knowledge.records import Change, SearchHit, unit
from bottega.protocols import Vectors

Keys = NDArray[np.int64]
Bits = NDArray[np.uint8]
MISSING = -1
Scalar = TypeVar("Scalar", bound=np.generic)
VectorMetric = Literal["cosine", "l2"]
SUBSET_SHARE = 0.1


class Slots:
    """Mapping between keys and slots, as arrays: a dict would need as much memory as short vectors.

    A slot whose row was deleted is dead and keeps its number until the index is rebuilt.
    """

    def __init__(self) -> None:
        self._keys: Keys = np.empty(0, np.int64)
        self._alive: NDArray[np.bool_] = np.empty(0, bool)
        self._by_key: Keys = np.empty(0, np.int64)
        self._count = self._live = 0

    @classmethod
    def from_slot_keys(cls, keys: Keys) -> Slots:
        """Return slots from the values of `slot_keys`."""
        slots = cls()
        present = np.flatnonzero(keys != MISSING)
        slots._keys, slots._alive = keys.copy(), keys != MISSING
        slots._by_key = np.full(int(keys.max(initial=MISSING)) + 1, MISSING)
        slots._by_key[keys[present]] = present
        slots._count, slots._live = len(keys), len(present)
        return slots

    def __len__(self) -> int:
        """Return the number of slots with a row."""
        return self._live

    @property
    def dead(self) -> int:
        return self._count - self._live

    @property
    def keys(self) -> Keys:
        """Keys by slot, including dead slots."""
        return self._keys[: self._count]

    def of(self, keys: Collection[int] | Keys) -> Keys:
        """Return the slots of these keys, without the keys that have none."""
        wanted = keys if isinstance(keys, np.ndarray) else np.fromiter(keys, np.int64, len(keys))
        slots: Keys = self._by_key[wanted[(wanted >= 0) & (wanted < len(self._by_key))]]
        found: Keys = slots[slots != MISSING]
        return found

    def append(self, keys: Keys) -> None:
        start, end = self._count, self._count + len(keys)
        self._keys = _grow(self._keys, end, MISSING)
        self._alive = _grow(self._alive, end, False)
        self._by_key = _grow(self._by_key, int(keys.max(initial=-1)) + 1, MISSING)
        self._keys[start:end] = keys
        self._alive[start:end] = True
        self._by_key[keys] = np.arange(start, end)
        self._count, self._live = end, self._live + len(keys)

    def mark_dead(self, slots: Keys) -> None:
        self._alive[slots] = False
        self._by_key[self._keys[slots]] = MISSING
        self._live -= len(slots)

    def move(self, source: int, target: int) -> bool:
        """Move the row in slot `source` to the dead slot `target`. Return False if `source` is
        dead."""
        if not self._alive[source]:
            return False
        key = self._keys[source]
        self._keys[target], self._alive[target] = key, True
        self._alive[source] = False
        self._by_key[key] = target
        return True

    def alive_keys(self) -> Keys:
        return self.keys[self._alive[: self._count]]

    def slot_keys(self) -> Keys:
        """Return the keys by slot, `MISSING` for dead slots."""
        return np.where(self._alive[: self._count], self.keys, MISSING)

    def truncate(self) -> None:
        """Drop the slots after the live ones, which come first."""
        self._count = self._live

    def alive_bits(self) -> Bits:
        return np.packbits(self._alive[: self._count], bitorder="little")

    def bits(self, slots: Keys) -> Bits:
        chosen = np.zeros(self._count, bool)
        chosen[slots] = True
        return np.packbits(chosen, bitorder="little")

    def to_keys(self, slots: Keys) -> Keys:
        """Return the keys of slots; `MISSING`, faiss's filler for too few results, stays."""
        if not self._count:
            return slots
        keys = self._keys[slots]
        keys[slots == MISSING] = MISSING
        return keys


def _grow(array: NDArray[Scalar], size: int, fill: int) -> NDArray[Scalar]:
    """Return the array with at least `size` items. Growth by half keeps single appends cheap."""
    if size <= len(array):
        return array
    grown = np.full(size + size // 2, fill, array.dtype)
    grown[: len(array)] = array
    return grown


class FaissIndex(ABC):
    """Base of exact and approximate indexes: keys, exclusions and scores.

    The score is the cosine, or the negative L2 distance. Methods are safe to call from several
    threads.
    """

    def __init__(
        self,
        metric: VectorMetric,
        index: faiss.Index,
        slots: Slots | None = None,
        watermark: int = 0,
    ) -> None:
        self._metric = metric
        self._index = index
        self._slots = slots or Slots()
        self._watermark = watermark
        self._lock = Lock()

    @property
    def watermark(self) -> int:
        return self._watermark

    def __len__(self) -> int:
        return len(self._slots)

    def apply(self, changes: Sequence[Change]) -> None:
        """Insert, replace and delete rows according to the changes."""
        if not changes:
            return
        latest = {change.key: change.vector for change in changes}
        with self._lock:
            present = self._slots.keys[self._slots.of(list(latest))].tolist()
            # Skip rows that already have their vector: replacing them would waste slots.
            same = {key for key in present if self._has_row(key, latest[key])}
            self._remove(self._slots.of([key for key in present if key not in same]))
            kept = {k: v for k, v in latest.items() if v is not None and k not in same}
            if kept:
                self._append(np.fromiter(kept, np.int64, len(kept)), np.stack(list(kept.values())))
            self._watermark = max(self._watermark, changes[-1].seq)

    def fill(self, pages: Iterable[Sequence[tuple[int, Vectors]]], watermark: int) -> None:
        """Add pages of rows to an empty index; they are as of change `watermark` or later."""
        for page in pages:
            with self._lock:
                self._append(np.array([key for key, _ in page]), np.stack([v for _, v in page]))
        self._watermark = watermark

    def search(
        self,
        vectors: Vectors,
        k: int,
        *,
        allowed: Collection[int] | Keys | None = None,
        excluded: Sequence[Collection[int]] | None = None,
    ) -> list[list[SearchHit]]:
        """Return the `k` best hits of each vector (n, dimension), best first; fewer only if there
        are fewer.

        `allowed` restricts all vectors to these keys; `excluded` has the keys to leave out for each
        vector.
        """
        if vectors.shape[1:] != (self._index.d,):
            raise SettingError(
                f"vectors must have the shape (n, {self._index.d}), got {vectors.shape}",
                hint="use the embedder of this knowledge base",
            )
        if not np.isfinite(vectors).all():  # faiss would silently return nothing
            raise SettingError("vectors contain NaN or infinite numbers", hint="check the embedder")
        barred = excluded or [()] * len(vectors)
        # Search for as many more as exclusion may drop, so the rest is exact.
        wanted = k + max(map(len, barred), default=0)
        queries = self._scaled(vectors)
        with self._lock:
            wanted = min(wanted, len(self))
            if wanted == 0:
                return [[] for _ in vectors]
            chosen = None if allowed is None else self._slots.of(allowed)
            if chosen is not None and not len(chosen):
                return [[] for _ in vectors]
            with one_thread() if len(queries) == 1 else nullcontext():
                scores, slots = self._nearest(queries, wanted, chosen)
            keys = self._slots.to_keys(slots)
        if self._metric == "l2":
            scores = -np.sqrt(np.maximum(scores, 0.0))
        return [_hits(*found)[:k] for found in zip(keys, scores, barred, strict=True)]

    def digest(self) -> tuple[int, int]:
        """Return the number and the sum of the keys."""
        with self._lock:
            return len(self._slots), int(self._slots.alive_keys().sum())

    def last_key(self) -> int:
        """Return the highest key, or 0 if the index is empty."""
        with self._lock:
            return int(self._slots.alive_keys().max(initial=0))

    def copy(self) -> tuple[faiss.Index, Keys, int]:
        """Return a consistent copy: the faiss index, the keys by slot (`MISSING` for dead ones) and
        the watermark."""
        with self._lock:
            return faiss.clone_index(self._index), self._slots.slot_keys(), self._watermark

    @abstractmethod
    def _remove(self, slots: Keys) -> None: ...

    @abstractmethod
    def _row_at(self, slot: int) -> Vectors: ...

    @abstractmethod
    def _nearest(self, queries: Vectors, k: int, chosen: Keys | None) -> tuple[Vectors, Keys]: ...

    def _append(self, keys: Keys, vectors: Vectors) -> None:
        self._index.add(self._scaled(vectors))
        self._slots.append(keys)

    def _has_row(self, key: int, vector: Vectors | None) -> bool:
        # A build and the log may both report one change.
        (slot,) = self._slots.of([key]).tolist()
        return vector is not None and np.array_equal(
            self._row_at(slot), self._scaled(vector[None])[0]
        )

    def _scaled(self, vectors: Vectors) -> Vectors:
        return unit(vectors) if self._metric == "cosine" else np.ascontiguousarray(vectors)


class FlatIndex(FaissIndex):
    """Exact index that compares a query with every row."""

    _index: faiss.IndexFlat

    def __init__(self, dimension: int, metric: VectorMetric) -> None:
        flat = faiss.IndexFlatIP if metric == "cosine" else faiss.IndexFlatL2
        super().__init__(metric, flat(dimension))

    @classmethod
    def restore(
        cls, flat: faiss.IndexFlat, keys: Keys, metric: VectorMetric, watermark: int
    ) -> Self:
        """Return an index from the values of `copy`."""
        index = cls(flat.d, metric)
        index._index, index._slots, index._watermark = flat, Slots.from_slot_keys(keys), watermark
        return index

    def _remove(self, slots: Keys) -> None:
        """Remove rows and fill the gaps with the last rows. faiss would move every row after the
        first gap."""
        if not len(slots):
            return
        rows = _rows(self._index)
        self._slots.mark_dead(slots)
        left, source = len(self._slots), len(rows) - 1
        for target in np.sort(slots[slots < left]).tolist():
            while not self._slots.move(source, target):
                source -= 1
            rows[target] = rows[source]
        self._index.remove_ids(faiss.IDSelectorRange(left, len(rows)))
        self._slots.truncate()

    def _row_at(self, slot: int) -> Vectors:
        return cast(Vectors, _rows(self._index)[slot])

    def _nearest(self, queries: Vectors, k: int, chosen: Keys | None) -> tuple[Vectors, Keys]:
        if chosen is None:
            found: tuple[Vectors, Keys] = self._index.search(queries, k)
            return found
        if len(chosen) < SUBSET_SHARE * len(self._slots.keys):
            return search_slots(self._index, queries, k, chosen)
        return search_bits(self._index, queries, k, self._slots.bits(chosen))


@contextmanager
def one_thread() -> Iterator[None]:
    """Run faiss in the calling thread only. For a single query, several threads would each search a
    part of the rows, which takes longer and more CPU time than one thread."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # for calls of this thread
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)


def search_slots(
    flat: faiss.IndexFlat, queries: Vectors, k: int, slots: Keys
) -> tuple[Vectors, Keys]:
    """Compare with the rows in these slots. For few rows this is several times faster than
    `search_bits`, which tests a bit for every row."""
    distances = np.empty((len(queries), len(slots)), np.float32)
    for query, row in zip(queries, distances, strict=True):
        pointers = faiss.swig_ptr(row), faiss.swig_ptr(slots)
        # Missing in faiss's type stubs.
        flat.compute_distance_subset(  # type: ignore[attr-defined]
            1, faiss.swig_ptr(query), len(slots), *pointers
        )
    sign = -1 if flat.metric_type == faiss.METRIC_INNER_PRODUCT else 1
    best = np.argsort(sign * distances, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(distances, best, axis=1), slots[best]


def search_bits(
    flat: faiss.IndexFlat, queries: Vectors, k: int, bits: Bits
) -> tuple[Vectors, Keys]:
    """Compare only with the rows whose bit is set."""
    options = faiss.SearchParameters(sel=selector(bits))  # type: ignore[call-arg]
    found: tuple[Vectors, Keys] = flat.search(queries, k, params=options)
    return found


def selector(bits: Bits) -> faiss.IDSelectorBitmap:
    """Return a bitmap selector, which is several times faster here than faiss's hash set."""
    # faiss's type stubs have the C++ signature, not that of the Python wrapper.
    return faiss.IDSelectorBitmap(bits)  # type: ignore[call-arg, arg-type]


def _rows(flat: faiss.IndexFlat) -> Vectors:
    """Return a view of faiss's memory, valid until the next addition or removal."""
    numbers = faiss.rev_swig_ptr(flat.get_xb(), flat.ntotal * flat.d)
    return cast(Vectors, numbers.reshape(flat.ntotal, flat.d))


def _hits(keys: Keys, scores: Vectors, barred: Collection[int]) -> list[SearchHit]:
    found = map(SearchHit, keys.tolist(), scores.tolist())
    return [hit for hit in found if hit.key != MISSING and hit.key not in barred]
