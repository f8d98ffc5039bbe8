"""Copy of vectors from PostgreSQL to a collection of Milvus by the change feed."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

from bottega.knowledge.milvus.collection import MilvusCollection, StoredVector
from bottega.knowledge.milvus.database import NotLoadedError
from bottega.knowledge.postgres.rows import PostgresRows
from bottega.knowledge.postgres.schema import vectors_table
from bottega.knowledge.records import StoredView

COPY_LOCK = 0x42747464
PAGE_BYTES = 8 << 20  # of vectors; a message may have 64 MiB
PAGES = 20  # of changes per update
FEED = (
    "SELECT (SELECT coalesce(max(seq), 0) FROM kb_changes) AS last,"
    " (SELECT coalesce(max(seq), 0) FROM kb_pruned) AS pruned"
)


class VectorCopy:
    """Copier of one view. Any number of processes may call `update`; one at a time copies."""

    def __init__(self, rows: PostgresRows, view: StoredView, target: MilvusCollection) -> None:
        self._rows = rows
        self._view = view.number
        self._table = vectors_table(view.number)
        self._target = target
        self._page = min(1000, PAGE_BYTES // (4 * view.dimension))
        self.stopped = Event()

    def position(self) -> int:
        """Return the number of the last change in the collection, 0 if it must be filled."""
        try:
            return self._target.position()
        except NotLoadedError:
            return 0

    def update(self) -> int:
        """Apply changes, or fill a collection that is new or too old, unless another process is
        doing so. Return the position."""
        position = self.position()
        if position and position == self._rows.read(FEED)[0]["last"]:
            return position
        with self._rows.lock(COPY_LOCK, self._view) as is_held:
            if is_held:
                self._update()
        return self.position()

    def _update(self) -> None:
        is_new = self._target.prepare()
        position = self.position()
        last, pruned = self._rows.read(FEED)[0]
        # Deletions before `pruned` are unknown. A position ahead of the feed means that PostgreSQL
        # was restored from a backup.
        if not position or not pruned <= position <= last:
            if not is_new:
                self._target.drop()
                self._target.prepare()
            position = self._fill(last)
        if position:
            self._apply_changes(position)

    def _fill(self, last: int) -> int:
        """Copy all vectors. Return the position, or 0 if the copy was stopped early."""
        for page in self._pages():
            if self.stopped.is_set():
                return 0
            self._target.apply(page)
        if last:
            self._target.set_position(0, last)
        return last

    def _pages(self) -> Iterator[list[StoredVector]]:
        key = 0
        while True:
            found = self._rows.read(
                f"SELECT key, namespace, vector FROM {self._table} WHERE key > $1"
                " ORDER BY key LIMIT $2",
                *(key, self._page),
            )
            if not found:
                return
            yield [StoredVector(*row) for row in found]
            key = found[-1]["key"]

    def _apply_changes(self, position: int) -> None:
        for _ in range(PAGES):
            found = self._rows.read(
                "SELECT seq, key, vectors.namespace, vector FROM (SELECT seq, key FROM kb_changes"
                " WHERE seq > $1 ORDER BY seq LIMIT $2) AS changes"
                f" LEFT JOIN {self._table} AS vectors USING (key) ORDER BY seq",
                *(position, self._page),
            )
            if not found or self.stopped.is_set():
                return
            stored = {row[1]: StoredVector(*row[1:]) for row in found if row["vector"] is not None}
            deleted = {row["key"] for row in found} - stored.keys()
            self._target.apply(list(stored.values()), deleted)
            self._target.set_position(position, found[-1]["seq"])
            position = found[-1]["seq"]
