"""Search of the rows of a file: an index in memory per view, and cached filters."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

import numpy as np

from bottega._util.caching import LRUCache
from bottega.errors import BottegaError, StoreError
from bottega.knowledge.filters import Filter
from bottega.knowledge.index import lazy_faiss as faiss
from bottega.knowledge.index.hnsw import HnswIndex, empty_graph, restore_graph
from bottega.knowledge.index.index_files import (
    IndexSnapshot,
    SnapshotHeader,
    load,
    save,
    snapshot_path,
    unfinished_path,
)
from bottega.knowledge.index.vector_index import FaissIndex, FlatIndex, Keys, VectorMetric
from bottega.knowledge.records import SearchHit, StoredView, View, Views
from bottega.knowledge.search import MAX_DELETED, SPARE, ExampleCache, empty_error, stacked
from bottega.knowledge.stores import SearchScope
from bottega.protocols import Vectors
from bottega.types import Candidate, Query

if TYPE_CHECKING:
    from bottega.knowledge.sqlite.rows import SqliteRows

log = logging.getLogger(__name__)
PAGE = 4096
BUILD_BATCH = 256
# Changes that a new index may lack when it replaces the old one: milliseconds of work.
MAX_LAG = 64
MAX_DEAD_SHARE = 0.2
SAVE_EVERY = 5000
# Delay before a graph is built: a process that ends sooner would discard it.
BUILD_DELAY_SECONDS = 2.0
HNSW_ABOVE = 50_000
MAX_FILTERS = 64


@dataclass
class ResolvedFilter:
    """Keys that match a filter among the rows up to change `seq` and key `last`."""

    seq: int = -1
    last: int = 0
    keys: Keys = field(default_factory=lambda: np.empty(0, np.int64))


class FileSearch:
    """Indexes of a file and cached filters of one handle."""

    def __init__(
        self, rows: SqliteRows, views: Views, metric: VectorMetric, hnsw_above: int
    ) -> None:
        self._rows = rows
        self._views = views
        self.metric: VectorMetric = metric
        self._hnsw_above = hnsw_above
        self._followers: dict[str, IndexFollower] = {}
        self._filters: LRUCache[Filter, ResolvedFilter] = LRUCache(MAX_FILTERS)
        self._default: str | None = None  # name of the first view
        self._recent = ExampleCache()
        self._lock = Lock()

    def view(self, by: str | None) -> tuple[StoredView, View]:
        """Return the stored view of that name, by default the first one, and its embedder. Raises
        `SettingError` for an unknown name."""
        stored, given = self._views.choose(self._rows.views(), by)
        if stored is None:
            raise empty_error(self._rows)
        return stored, given

    def views(self) -> dict[str, View]:
        return self._views.resolve(self._rows.views())

    def current_index(self, by: str | None) -> FaissIndex:
        """Return the index with every change that any process has committed. Raises
        `EmptyKnowledgeBaseError`."""
        while True:
            follower = self._follower(by)
            try:
                index = follower.current()
                break
            except StaleIndexError:  # this or another handle replaced the view
                self._drop(follower)
        if not len(index):
            raise empty_error(self._rows)
        return index

    def check_filled(self, by: str | None) -> None:
        self.current_index(by)

    def nearest(
        self, vectors: Vectors, k: int, scope: SearchScope, excluded_for: Sequence[Query] | None
    ) -> list[list[Candidate]]:
        """Return the candidates of each vector, repeating the search if a hit was deleted."""
        by = scope.by
        rebuilt = False
        while True:
            index = self.current_index(by)
            own = None
            if excluded_for is not None:
                own = [self._rows.excluded_keys(query, scope.exclude) for query in excluded_for]
            allowed = self._allowed_keys(scope.where, scope.within, limit=len(index))
            searched = index.watermark
            hits = index.search(vectors, k, allowed=allowed, excluded=own)
            candidates = self._candidates(hits, len(index))
            if candidates is not None:
                return candidates
            if searched == self._rows.last_seq():  # not explained by a delete of another process
                if rebuilt:
                    raise StoreError(
                        f"the change log of {self._rows.name} lacks the removal of examples",
                        hint="run bottega verify --repair, or verify(repair=True)",
                    )
                self._drop(self._follower(by))
                rebuilt = True

    def vectors(self, ids: Sequence[str], by: str | None) -> Vectors:
        view, _ = self.view(by)
        with self._rows.snapshot():
            keys = self._rows.keys(ids)
            found = self._rows.vectors(keys.values(), view.number)
        return stacked([(id, found.get(keys.get(id, 0))) for id in ids], view)

    def neighbours(self, ids: Sequence[str], k: int, by: str | None) -> list[list[SearchHit]]:
        vectors = self.vectors(ids, by)
        keys = self._rows.keys(ids)
        same_image = self._rows.same_image_keys(list(keys.values()))
        own = [same_image.get(keys.get(id, 0), set()) for id in ids]
        return self.current_index(by).search(vectors, k, excluded=own)

    def close_indexes(self) -> None:
        """Close every index; the next search opens them again."""
        with self._lock:  # held until the end: no search may open an index meanwhile
            for follower in self._followers.values():
                follower.close()
            self._followers.clear()
            self._recent.clear()

    def wait_for_indexes(self) -> None:
        """Wait until no index is being built."""
        with self._lock:
            followers = list(self._followers.values())
        for follower in followers:
            follower.wait_for_indexes()

    def _follower(self, by: str | None) -> IndexFollower:
        with self._lock:
            name = self._default if by is None else by
            follower = None if name is None else self._followers.get(name)
            if follower is None:
                view, _ = self.view(by)
                if by is None:
                    self._default = view.name
                follower = self._followers.get(view.name) or IndexFollower(
                    self._rows, view, self.metric, self._hnsw_above
                )
                self._followers[view.name] = follower
            return follower

    def _drop(self, follower: IndexFollower) -> None:
        """Close and forget a stale follower without saving it."""
        with self._lock:
            kept = {name: each for name, each in self._followers.items() if each is not follower}
            self._followers = kept
        # Without the lock: closing waits for the background worker.
        follower.close(keep=False)

    def _allowed_keys(
        self, where: Filter | None, within: Collection[str] | None, limit: int
    ) -> Keys | None:
        keys = None if where is None else self._filter_keys(where, limit)
        if within is not None:
            chosen = np.fromiter(self._rows.keys(within).values(), np.int64)
            keys = chosen if keys is None else np.intersect1d(chosen, keys)
        return keys

    def _filter_keys(self, where: Filter, limit: int) -> Keys:
        """Return the keys that match. Rows never change, so only new rows are tested; the index
        ignores deleted ones."""
        with self._lock:
            cached = self._filters.get(where)
            if cached is None:
                self._filters.put(where, cached := ResolvedFilter())
            seq = self._rows.last_seq()
            if cached.seq != seq:
                if len(cached.keys) > MAX_DELETED + 2 * limit:  # most of them have been deleted
                    cached.last, cached.keys = 0, np.empty(0, np.int64)
                # Read before the rows: a row added in between is tested again, not missed.
                last = self._rows.last_key()
                new = self._rows.keys_where(where, cached.last)
                cached.keys = np.union1d(cached.keys, np.array(new, np.int64))
                cached.seq, cached.last = seq, last
            return cached.keys

    def _candidates(self, hits: list[list[SearchHit]], living: int) -> list[list[Candidate]] | None:
        """Return the candidates of the hits, or None if another process has deleted one since the
        search."""
        wanted = {hit.key for found in hits for hit in found}
        get = self._recent.get
        examples = {key: example for key in wanted if (example := get(key)) is not None}
        if missing := wanted - examples.keys():
            fetched = self._rows.by_keys(missing)
            # Keys are never reused, so a missing row has been deleted.
            if len(fetched) < len(missing):
                return None
            self._recent.keep(fetched, limit=living + SPARE)
            examples |= fetched
        return [[Candidate(examples[hit.key], hit.score) for hit in found] for found in hits]


class StaleIndexError(Exception):
    """The follower is closed or its view was replaced; the caller gets a new follower."""


class IndexFollower:
    """Up-to-date index of one view.

    Up to `hnsw_above` rows it is exact. Above, it builds a graph in the background and stays exact
    until the graph is ready. A process that ends earlier saves the plain vectors to a file, which
    the next process reads instead of every row.
    """

    def __init__(
        self, rows: SqliteRows, view: StoredView, metric: VectorMetric, hnsw_above: int
    ) -> None:
        self._rows = rows
        self._view = view
        self._metric: VectorMetric = metric
        self._hnsw_above = hnsw_above
        self._path = snapshot_path(rows.path, view.name, rows.namespace)
        self._index: FaissIndex | None = None
        self._ready: FaissIndex | None = None
        self._saved_at = 0
        self._lock = Lock()
        self._worker: Thread | None = None
        self._stopping = Event()
        self._caller_waiting = Event()  # set when a caller waits for the background worker
        self._failed = False

    def current(self) -> FaissIndex:
        """Return the index with every change that any process has committed. Raises
        `StaleIndexError`."""
        with self._lock:
            last = self._rows.last_seq()
            # Checked under the lock: `close` empties the index under it.
            if self._stopping.is_set():
                raise StaleIndexError
            if self._index is None:
                self._check_view()
                self._index = self._load_saved() or self._build_flat()
                self._maintain(self._index)
            if self._ready is not None:
                self._index, self._ready = self._ready, None
            if self._index.watermark < last:
                self._check_view()
                if not self._catch_up(self._index):
                    self._index = self._build_flat()
                self._maintain(self._index)
            return self._index

    def close(self, *, keep: bool = True) -> None:
        """Wait for the background worker, and save a large index for the next start."""
        self._stopping.set()
        self._caller_waiting.set()
        # Without the lock: searches of other threads go on meanwhile.
        if self._worker is not None:
            self._worker.join()
        with self._lock:
            index = self._ready or self._index
            if keep and index is not None and self._is_unsaved(index):
                self._save(index)
            self._index = self._ready = None

    @property
    def is_building(self) -> bool:
        return self._worker is not None and self._worker.is_alive()

    def wait_for_indexes(self) -> None:
        """Wait until no build is running."""
        self._caller_waiting.set()
        while self.is_building:
            if self._worker is not None:
                self._worker.join()
            with suppress(StaleIndexError):
                self.current()

    @property
    def _shape(self) -> tuple[int, VectorMetric]:
        return self._view.dimension, self._metric

    def _check_view(self) -> None:
        if self._rows.views().get(self._view.name) != self._view:
            raise StaleIndexError

    def _is_unsaved(self, index: FaissIndex) -> bool:
        if isinstance(index, HnswIndex):
            return index.watermark > self._saved_at
        if self._path is None or not os.access(self._path.parent, os.W_OK):
            return False
        return len(index) > self._hnsw_above and self._is_far_behind(index)

    def _is_far_behind(self, index: FaissIndex) -> bool:
        """Return whether the file is missing or lacks more than a tenth of the changes."""
        lag = index.watermark - self._saved_at
        return not self._saved_at or lag > max(SAVE_EVERY, len(index) // 10)

    def _load_saved(self) -> FaissIndex | None:
        found = load(self._path) if self._path else None
        if found is None or not self._fits(found.header):
            return None
        index: FaissIndex
        if isinstance(found.index, faiss.IndexFlat):
            index = FlatIndex.restore(found.index, found.keys, self._metric, found.header.seq)
        else:
            index = self._graph_of(found)
        # One snapshot: another process's commit in between would look like damage.
        with self._rows.snapshot():
            complete = self._catch_up(index)
            matches = index.digest() == self._rows.keys_digest()
        if not complete:
            log.info("%s is too old and will be rebuilt", self._path)
            return None
        if not matches:
            log.warning("%s does not match its rows and will be rebuilt", self._path)
            return None
        self._saved_at = found.header.seq
        return index

    def _graph_of(self, found: IndexSnapshot) -> HnswIndex:
        return restore_graph(
            found.index,
            found.keys,
            self._metric,
            exact_up_to=self._hnsw_above,
            watermark=found.header.seq,
        )

    def _fits(self, header: SnapshotHeader) -> bool:
        return header.mark is not None and header == self._header(header.seq)

    def _header(self, seq: int) -> SnapshotHeader:
        view, space = self._view, self._rows.namespace
        made_by = (view.number, view.fingerprint, view.dimension, self._metric)
        return SnapshotHeader(*made_by, space, seq, self._rows.mark(seq))

    def _build_flat(self) -> FaissIndex:
        index = self._fill(FlatIndex(*self._shape))
        if self._stopping.is_set():  # filling stopped early
            raise StaleIndexError
        return index

    def _fill(self, index: FaissIndex, page: int = PAGE) -> FaissIndex:
        """Add the rows after the index's last row; earlier rows are as of its watermark."""
        # Read before the rows: a change meanwhile is applied twice, not missed.
        watermark = index.watermark if len(index) else self._rows.last_seq()
        index.fill(self._pages(page, index.last_key()), watermark)
        return index

    def _pages(self, size: int, key: int = 0) -> Iterator[Sequence[tuple[int, Vectors]]]:
        while not self._stopping.is_set():
            page = self._rows.vectors_after(key, size, self._view.number)
            if not page:
                return
            for found, vector in page:
                self._check_width(found, vector)
            yield page
            key = page[-1][0]

    def _catch_up(self, index: FaissIndex, within: int = 0) -> bool:
        """Apply the missing changes. Return False if the log has lost some of them, which requires
        a rebuild."""
        while index.watermark + within < self._rows.last_seq():
            changes = self._rows.changes_since(index.watermark, PAGE, self._view.number)
            # Read after the changes: another process may have pruned before they were read.
            if index.watermark < self._rows.pruned():
                return False
            for change in changes:
                if change.vector is not None:
                    self._check_width(change.key, change.vector)
            index.apply(changes)
        return True

    def _check_width(self, key: int, vector: Vectors) -> None:
        if len(vector) != self._view.dimension:
            raise StoreError(
                f"{self._rows.name} is damaged: the vector {self._view.name!r} of row {key} has"
                f" {len(vector)} numbers, not {self._view.dimension}",
                hint="run bottega verify --repair, or verify(repair=True)",
            )

    def _maintain(self, index: FaissIndex) -> None:
        if self._failed or self.is_building:
            return
        if isinstance(index, HnswIndex):
            stale = index.dead_share > MAX_DEAD_SHARE
            unsaved = self._is_far_behind(index)
            work = self._rebuild if stale else self._save if unsaved else None
        else:
            work = self._rebuild if len(index) > self._hnsw_above else None
        if work is not None:
            self._worker = Thread(target=self._run_logged, args=(work, index), daemon=True)
            self._worker.start()

    def _run_logged(self, work: Callable[[FaissIndex], None], index: FaissIndex) -> None:
        """Run the work and log a failure; the existing index continues to serve."""
        try:
            # For this thread only; searches keep their threads.
            faiss.omp_set_num_threads(max(1, (os.cpu_count() or 1) // 2))
            work(index)
        except (BottegaError, RuntimeError, MemoryError) as error:
            self._failed = True
            if not self._stopping.is_set():
                log.warning("the index of %s was not rebuilt: %s", self._rows.path, error)

    def _rebuild(self, old: FaissIndex) -> None:
        if isinstance(old, FlatIndex):
            self._caller_waiting.wait(BUILD_DELAY_SECONDS)
        if self._stopping.is_set():
            return
        new: FaissIndex = FlatIndex(*self._shape)
        if len(old) > self._hnsw_above:
            found = load(unfinished_path(self._path)) if self._path else None
            if found is not None and self._fits(found.header):
                new = self._graph_of(found)
            else:
                graph = empty_graph(*self._shape)
                new = HnswIndex(graph, self._metric, exact_up_to=self._hnsw_above)
        begun = len(new)
        self._fill(new, BUILD_BATCH)
        if self._stopping.is_set():
            if isinstance(new, HnswIndex) and len(new) - begun >= SAVE_EVERY:
                self._save(new, unfinished=True)
            return
        # A graph that an earlier process began may not match the rows of today.
        if not self._catch_up(new, MAX_LAG) or (begun and not self._matches_rows(new)):
            self._delete_unfinished()
            return
        if isinstance(new, HnswIndex):
            self._save(new)
            self._delete_unfinished()
        # `current` swaps it in under its lock, which searches hold.
        self._ready = new

    def _delete_unfinished(self) -> None:
        if self._path is not None:
            with suppress(OSError):
                unfinished_path(self._path).unlink()

    def _matches_rows(self, index: FaissIndex) -> bool:
        with self._rows.snapshot():
            return self._catch_up(index) and index.digest() == self._rows.keys_digest()

    def _save(self, index: FaissIndex, unfinished: bool = False) -> None:
        if self._path is None:
            return
        copy, keys, seq = index.copy()
        found = IndexSnapshot(self._header(seq), copy, keys)
        save(unfinished_path(self._path) if unfinished else self._path, found)
        if not unfinished:
            self._saved_at = seq
