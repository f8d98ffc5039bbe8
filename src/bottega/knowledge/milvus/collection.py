"""Vectors of one view in a collection of Milvus, and their copy from PostgreSQL."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from threading import Event
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from bottega.errors import StoreError
from bottega.knowledge.index.vector_index import VectorMetric
from bottega.knowledge.milvus.database import ANSWER_SECONDS, MilvusDatabase, NotLoadedError
from bottega.knowledge.postgres.rows import PostgresRows
from bottega.knowledge.postgres.schema import vectors_table
from bottega.knowledge.records import SearchHit, StoredView
from bottega.protocols import Vectors

if TYPE_CHECKING:
    from pymilvus import MilvusClient

COPY_LOCK = 0x42747464
PAGE_BYTES = 8 << 20  # of vectors; a message may have 64 MiB
PAGES = 20  # of changes per update
FEED = (
    "SELECT (SELECT coalesce(max(seq), 0) FROM kb_changes) AS last,"
    " (SELECT coalesce(max(seq), 0) FROM kb_pruned) AS pruned"
)

LOAD_SECONDS = 60.0  # the server continues loading after that
GRAPH = {"M": 16, "efConstruction": 200}
EF_SEARCH = 128
METRICS: dict[VectorMetric, str] = {"cosine": "COSINE", "l2": "L2"}
FIELDS = {"key", "space", "vector"}

Consistency = Literal["Strong", "Bounded"]


class StoredVector(NamedTuple):
    key: int
    namespace: str
    vector: Vectors


class MilvusCollection:
    """Vectors by the keys of rows, which are positive.

    The collection also stores its position in the change feed of the rows: an entry with the key
    `-n` means that all changes up to number n are applied. A collection that was dropped or
    restored from a backup therefore never claims rows that it lacks.
    """

    def __init__(
        self, database: MilvusDatabase, name: str, dimension: int, metric: VectorMetric
    ) -> None:
        self._database = database
        self.name = name
        self._dimension = dimension
        self._metric: VectorMetric = metric

    def prepare(self) -> bool:
        """Load the collection into the memory of the server, creating it if needed. Return whether
        it is new. Raises `StoreError` if another program created it."""
        with self._database.client() as client:
            is_new = not client.has_collection(self.name, timeout=ANSWER_SECONDS)
            if is_new:
                self._create(client)
            self._check(client)
            if not client.list_indexes(self.name, timeout=ANSWER_SECONDS):
                index = client.prepare_index_params()
                index.add_index(
                    *("vector", "HNSW"), metric_type=METRICS[self._metric], params=GRAPH
                )
                client.create_index(self.name, index, timeout=LOAD_SECONDS)
            client.load_collection(self.name, timeout=LOAD_SECONDS)
        return is_new

    def position(self) -> int:
        """Return the number of the last change that is applied; 0 if the collection is missing or
        incomplete. Raises `NotLoadedError`."""
        with self._database.client() as client:
            marks = client.query(
                self.name, "key < 0", ["key"], timeout=ANSWER_SECONDS, consistency_level="Strong"
            )
        return max((-mark["key"] for mark in marks), default=0)

    def apply(self, stored: Sequence[StoredVector], deleted: Collection[int] = ()) -> None:
        """Store and delete vectors."""
        entries = [_entry(one.key, _digest(one.namespace), one.vector) for one in stored]
        with self._database.client() as client:
            if entries:
                client.upsert(self.name, entries, timeout=ANSWER_SECONDS)
            if deleted:
                client.delete(self.name, ids=list(deleted), timeout=ANSWER_SECONDS)

    def set_position(self, before: int, position: int) -> None:
        """Record that all changes up to `position` are applied."""
        mark = np.zeros(self._dimension, np.float32)
        mark[0] = 1
        with self._database.client() as client:
            client.upsert(self.name, [_entry(-position, 0, mark)], timeout=ANSWER_SECONDS)
            if before:
                client.delete(self.name, ids=[-before], timeout=ANSWER_SECONDS)

    def nearest(
        self, vector: Vectors, limit: int, namespace: str, consistency: Consistency
    ) -> list[SearchHit]:
        """Return the approximate nearest vectors of a namespace, best first. Raises
        `NotLoadedError`."""
        with self._database.client() as client:
            [found] = client.search(
                self.name,
                [np.asarray(vector, np.float32)],
                filter=f"space == {_digest(namespace)}",
                limit=limit,
                search_params={"params": {"ef": max(EF_SEARCH, limit)}},
                timeout=ANSWER_SECONDS,
                consistency_level=consistency,
            )
        return [SearchHit(one["id"], self._score(one["distance"])) for one in found]

    def drop(self) -> None:
        self._database.drop(self.name)

    def _score(self, distance: float) -> float:
        # Milvus returns cosine similarities, and squares of Euclidean distances.
        return distance if self._metric == "cosine" else -math.sqrt(max(distance, 0))

    def _create(self, client: MilvusClient) -> None:
        from pymilvus import DataType

        schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("key", DataType.INT64, is_primary=True)
        schema.add_field("space", DataType.INT64)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=self._dimension)
        client.create_collection(self.name, schema=schema, timeout=ANSWER_SECONDS)

    def _check(self, client: MilvusClient) -> None:
        described = client.describe_collection(self.name, timeout=ANSWER_SECONDS)
        fields = {field["name"]: field for field in described["fields"]}
        where = f"the collection {self.name} of {self._database.name}"
        if fields.keys() != FIELDS:
            raise StoreError(
                f"{where} belongs to another program",
                hint="set vectors to another database of Milvus, or drop the collection",
            )
        dimension = fields["vector"]["params"].get("dim")
        if dimension != self._dimension:
            raise StoreError(
                f"{where} must have vectors of {self._dimension} numbers, got {dimension}",
                hint="drop the collection in Milvus; it is filled again from PostgreSQL",
            )


def _entry(key: int, space: int, vector: Vectors) -> dict[str, object]:
    return {"key": key, "space": space, "vector": np.asarray(vector, np.float32)}


def _digest(namespace: str) -> int:
    """Return a positive number for a namespace. A text would have to be escaped in filters."""
    return int.from_bytes(hashlib.sha256(namespace.encode()).digest()[:7]) + 1


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
