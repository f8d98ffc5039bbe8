"""Search of a knowledge base in PostgreSQL, with an index in Milvus for many rows."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from dataclasses import dataclass, field
from threading import Lock, Thread

from bottega.errors import BottegaError
from bottega.knowledge.index.vector_index import VectorMetric
from bottega.knowledge.milvus.collection import Consistency, MilvusCollection, VectorCopy
from bottega.knowledge.milvus.database import MilvusDatabase, NotLoadedError
from bottega.knowledge.postgres.filters import Parameters
from bottega.knowledge.postgres.rows import PostgresRows
from bottega.knowledge.postgres.search import (
    CANDIDATE_FACTOR,
    CHECK_SECONDS,
    HNSW_ABOVE,
    PostgresSearch,
)
from bottega.knowledge.records import SearchHit, StoredView, Views
from bottega.protocols import Vectors

log = logging.getLogger(__name__)

MAX_LIMIT = 16_384  # of one search, by the server
# Maximum matches of a filter that PostgreSQL compares exactly. More candidates from Milvus are no
# substitute: beyond the nearest ones, its index misses many.
COMPARED_ABOVE = 20_000
GROWTH = 8  # of the limit, if a filter rules out too many candidates
UPDATE_SECONDS = 1.0
STALE_SECONDS = 10.0
# A Bounded search sees all writes that are older than `common.gracefulTime` of the server (5 s).
BOUNDED_SECONDS = 10.0
OWN_NAME = (
    "SELECT system_identifier::text || ' ' ||"
    " (SELECT oid FROM pg_database WHERE datname = current_database())::text AS name"
    " FROM pg_control_system()"
)


@dataclass
class CollectionState:
    """Position of a collection, as this process last read it. A Bounded search sees all changes up
    to `settled`, a Strong one those up to `position`. Both are 0 until it is filled."""

    collection: MilvusCollection
    copy: VectorCopy
    position: int = 0
    settled: int = 0
    read: float = -math.inf
    begun: float = -math.inf  # when `position` was first read
    lock: Lock = field(default_factory=Lock, repr=False)

    def set(self, position: int) -> None:
        """Record a position that was just read."""
        now = time.monotonic()
        with self.lock:
            # Meanwhile, another process may have emptied and filled the collection.
            if position < self.settled or now - self.read > 2 * STALE_SECONDS:
                self.position = self.settled = 0
            self.read = now
            if not self.position:
                self.position, self.begun = position, now
            elif now - self.begun > BOUNDED_SECONDS:
                self.settled, self.position, self.begun = self.position, position, now

    def covered(self) -> tuple[int, Consistency]:
        """Return the number of the last change that searches see, and their consistency."""
        return (self.settled, "Bounded") if self.settled else (self.position, "Strong")


class MilvusRows(PostgresRows):
    """Examples in PostgreSQL, of which Milvus indexes the vectors."""

    def __init__(self, url: str, namespace: str, vectors: str, *, create: bool = True) -> None:
        super().__init__(url, namespace, create=create)
        self._vectors = vectors

    def open_search(
        self, views: Views, metric: VectorMetric, hnsw_above: int | None
    ) -> MilvusSearch:
        above = HNSW_ABOVE if hnsw_above is None else hnsw_above
        return MilvusSearch(self, views, metric, above, MilvusDatabase(self._vectors))


class MilvusSearch(PostgresSearch):
    """Search of one `KnowledgeBase`. Milvus returns candidates; PostgreSQL, which has the same
    vectors, filters and compares them. No deleted or replaced example is returned."""

    def __init__(
        self,
        rows: PostgresRows,
        views: Views,
        metric: VectorMetric,
        hnsw_above: int,
        database: MilvusDatabase,
    ) -> None:
        super().__init__(rows, views, metric, hnsw_above)
        self._compared_above = COMPARED_ABOVE
        self._database = database
        self._collections: dict[int, CollectionState] = {}
        self._updater: Thread | None = None
        self._updating = Lock()
        database.names("")  # raises `StoreError` for a wrong address or password

    def close_indexes(self) -> None:
        with self._updating:
            for state in self._collections.values():
                state.copy.stopped.set()
            self._collections = {}
        self.wait_for_indexes()
        self._database.close()
        super().close_indexes()

    def wait_for_indexes(self) -> None:
        if self._updater is not None:
            self._updater.join()
        for state in self._collections.values():
            state.read = -math.inf

    def _indexed_hits(
        self,
        view: StoredView,
        vector: Vectors,
        k: int,
        with_clause: str,
        source: str,
        parameters: Parameters,
    ) -> list[SearchHit] | None:
        """Return the hits, or None if all rows must be compared, because the collection is being
        filled or too few candidates pass the filters."""
        state = self._current(view)
        position, consistency = state.covered()
        if not position:
            return None
        limit, namespace = min(CANDIDATE_FACTOR * k, MAX_LIMIT), self._rows.namespace
        while True:
            try:
                found = state.collection.nearest(vector, limit, namespace, consistency)
            except NotLoadedError:
                state.set(0)
                return None
            given = Parameters(*parameters.values)
            keys = given.add([hit.key for hit in found], "bigint[]")
            candidates = (
                f"{source} AND vectors.key IN (SELECT unnest({keys})"
                f" UNION SELECT key FROM kb_changes WHERE seq > {given.add(position, 'bigint')})"
            )
            hits = self._ranked(with_clause, candidates, k, given)
            found_all = len(found) < limit
            # Hits may be rows that Milvus lacks. A candidate beyond the limit can therefore be
            # nearer unless the last hit is at least as near as the last candidate.
            if len(hits) == k and (found_all or hits[-1].score >= found[-1].score):
                return hits
            if found_all or limit == MAX_LIMIT:
                return None
            limit = min(GROWTH * limit, MAX_LIMIT)

    def _uses_index(self, view: StoredView) -> bool:
        """Return whether the view is large. PostgreSQL builds no index for it."""
        read, large = self._indexed.get(view.number, (-math.inf, False))
        if not large and time.monotonic() - read > CHECK_SECONDS:
            large = self._is_large(view)
            self._indexed[view.number] = (time.monotonic(), large)
        return large

    def _current(self, view: StoredView) -> CollectionState:
        """Return the state of a view's collection, and start updating it in the background."""
        with self._updating:
            state = self._collections.get(view.number)
            if state is None:
                state = self._collections[view.number] = self._new_state(view)
        age = time.monotonic() - state.read
        if age > STALE_SECONDS:
            state.set(state.copy.position())
        if age > UPDATE_SECONDS:
            self._start_update(state)
        return state

    def _new_state(self, view: StoredView) -> CollectionState:
        [row] = self._rows.read(OWN_NAME)
        prefix = f"bottega_{hashlib.sha256(row['name'].encode()).hexdigest()[:12]}_"
        self._drop_replaced(prefix)
        collection = MilvusCollection(
            self._database, f"{prefix}{view.number}_{self.metric}", view.dimension, self.metric
        )
        return CollectionState(collection, VectorCopy(self._rows, view, collection))

    def _drop_replaced(self, prefix: str) -> None:
        """Drop the collections of replaced views."""
        # Read before the views: the collections of newer views must not be dropped.
        names = self._database.names(prefix)
        numbers = [row["number"] for row in self._rows.read("SELECT number FROM kb_views")]
        for name in names:
            if not name.startswith(tuple(f"{prefix}{number}_" for number in numbers)):
                self._database.drop(name)

    def _start_update(self, state: CollectionState) -> None:
        with self._updating:
            if self._updater is None or not self._updater.is_alive():
                self._updater = Thread(target=self._update, args=(state,), daemon=True)
                self._updater.start()

    def _update(self, state: CollectionState) -> None:
        try:
            state.set(state.copy.update())
        except BottegaError as error:
            message = "the vectors of %s were not copied to %s, the next search tries again: %s"
            log.warning(message, self._rows.name, self._database.name, error)
