"""Search of a knowledge base in PostgreSQL, by an index in Milvus above a number of rows."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from dataclasses import dataclass, field
from threading import Lock, Thread

from bottega.errors import BottegaError
from bottega.knowledge.index import Metric
from bottega.knowledge.milvus.collection import Consistency, MilvusCollection
from bottega.knowledge.milvus.copying import VectorCopy
from bottega.knowledge.milvus.database import MilvusDatabase, NotLoadedError
from bottega.knowledge.postgres.filters import Parameters
from bottega.knowledge.postgres.rows import PostgresRows
from bottega.knowledge.postgres.search import CANDIDATES, CHECK_SECONDS, PostgresSearch
from bottega.knowledge.records import SearchHit, StoredView, Views
from bottega.protocols import Vectors

log = logging.getLogger(__name__)

MAX_LIMIT = 16_384  # of one search, by the server
# Matches of a filter up to which PostgreSQL compares all of them. More candidates of Milvus are no
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
class Progress:
    """Position of a collection as far as this process knows it. A Bounded search sees all changes
    up to `settled`, a Strong one those up to `position`. Both are 0 while it must be filled."""

    collection: MilvusCollection
    copy: VectorCopy
    position: int = 0
    settled: int = 0
    read: float = -math.inf
    begun: float = -math.inf  # when `position` was read first
    lock: Lock = field(default_factory=Lock, repr=False)

    def set(self, position: int) -> None:
        """Record the position that was read now."""
        now = time.monotonic()
        with self.lock:
            # Unobserved, another process may have filled the collection again.
            if position < self.settled or now - self.read > 2 * STALE_SECONDS:
                self.position = self.settled = 0
            self.read = now
            if not self.position:
                self.position, self.begun = position, now
            elif now - self.begun > BOUNDED_SECONDS:
                self.settled, self.position, self.begun = self.position, position, now

    def covered(self) -> tuple[int, Consistency]:
        """Return the number of the last change that a search of this consistency sees."""
        return (self.settled, "Bounded") if self.settled else (self.position, "Strong")


class MilvusSearch(PostgresSearch):
    """Search of one handle. Milvus proposes candidates; PostgreSQL, which has the same vectors,
    applies filters and compares. No result is deleted or outdated, whatever Milvus contains."""

    def __init__(
        self,
        rows: PostgresRows,
        views: Views,
        metric: Metric,
        hnsw_above: int,
        database: MilvusDatabase,
    ) -> None:
        super().__init__(rows, views, metric, hnsw_above)
        self._compared_above = COMPARED_ABOVE
        self._database = database
        self._progress: dict[int, Progress] = {}
        self._updater: Thread | None = None
        self._updating = Lock()
        database.names("")  # raises for a wrong address or password

    def close_indexes(self) -> None:
        with self._updating:
            for progress in self._progress.values():
                progress.copy.stopped.set()
            self._progress = {}
        self.wait_for_indexes()
        self._database.close()
        super().close_indexes()

    def wait_for_indexes(self) -> None:
        if self._updater is not None:
            self._updater.join()
        for progress in self._progress.values():
            progress.read = -math.inf

    def _indexed_hits(
        self,
        view: StoredView,
        vector: Vectors,
        k: int,
        barred: str,
        source: str,
        parameters: Parameters,
    ) -> list[SearchHit] | None:
        """Return the hits, or None if all rows must be compared: the collection is being filled, or
        lacks `k` rows that pass the filters."""
        progress = self._current(view)
        position, consistency = progress.covered()
        if not position:
            return None
        limit, namespace = min(CANDIDATES * k, MAX_LIMIT), self._rows.namespace
        while True:
            try:
                found = progress.collection.nearest(vector, limit, namespace, consistency)
            except NotLoadedError:
                progress.set(0)
                return None
            given = Parameters(*parameters.values)
            keys = given.add([hit.key for hit in found], "bigint[]")
            candidates = (
                f"{source} AND made.key IN (SELECT unnest({keys}) UNION SELECT key FROM kb_changes"
                f" WHERE seq > {given.add(position, 'bigint')})"
            )
            hits = self._ranked(barred, candidates, k, given)
            found_all = len(found) < limit
            # Rows that Milvus lacks may have filled up the hits: a candidate beyond the limit can
            # be nearer unless the last hit is as near as the last candidate.
            if len(hits) == k and (found_all or hits[-1].score >= found[-1].score):
                return hits
            if found_all or limit == MAX_LIMIT:
                return None
            limit = min(GROWTH * limit, MAX_LIMIT)

    def _uses_index(self, view: StoredView) -> bool:
        """Return whether the view is large; PostgreSQL needs no index for it."""
        read, large = self._indexed.get(view.number, (-math.inf, False))
        if not large and time.monotonic() - read > CHECK_SECONDS:
            large = self._is_large(view)
            self._indexed[view.number] = (time.monotonic(), large)
        return large

    def _current(self, view: StoredView) -> Progress:
        """Return the progress of a view's collection, which is updated in the background."""
        with self._updating:
            progress = self._progress.get(view.number)
            if progress is None:
                progress = self._progress[view.number] = self._new_progress(view)
        age = time.monotonic() - progress.read
        if age > STALE_SECONDS:
            progress.set(progress.copy.position())
        if age > UPDATE_SECONDS:
            self._start_update(progress)
        return progress

    def _new_progress(self, view: StoredView) -> Progress:
        [row] = self._rows.read(OWN_NAME)
        prefix = f"bottega_{hashlib.sha256(row['name'].encode()).hexdigest()[:12]}_"
        self._drop_replaced(prefix)
        collection = MilvusCollection(
            self._database, f"{prefix}{view.number}_{self._metric}", view.dimension, self._metric
        )
        return Progress(collection, VectorCopy(self._rows, view, collection))

    def _drop_replaced(self, prefix: str) -> None:
        """Drop the collections of views that were replaced."""
        names = self._database.names(prefix)  # before the views: those of newer views are absent
        numbers = [row["number"] for row in self._rows.read("SELECT number FROM kb_views")]
        for name in names:
            if not name.startswith(tuple(f"{prefix}{number}_" for number in numbers)):
                self._database.drop(name)

    def _start_update(self, progress: Progress) -> None:
        with self._updating:
            if self._updater is None or not self._updater.is_alive():
                self._updater = Thread(target=self._update, args=(progress,), daemon=True)
                self._updater.start()

    def _update(self, progress: Progress) -> None:
        try:
            progress.set(progress.copy.update())
        except BottegaError as error:
            message = "the vectors of %s were not copied to %s: %s"
            log.warning(message, self._rows.name, self._database.name, error)
