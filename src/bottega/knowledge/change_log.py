"""Vectors and the change log, from which indexes are built and updated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from threading import Lock

import numpy as np

from bottega.image import KEEP_DECODED_UP_TO
from bottega.knowledge.database import IN_JSON, Database, json_array
from bottega.knowledge.ports import Change
from bottega.knowledge.use_counts import LOST_PREFIX
from bottega.protocols import Vectors
from bottega.types import Example, ExampleChange

MOST_BYTES = 64 << 20
BYTES_BESIDE_IMAGES = 2048
# An image may cache its pixels and its base64 text beside its bytes.
BYTES_PER_PIXEL = 3
COPIES_OF_BYTES = 3


class ExampleCache:
    """Bounded cache of examples by key. A key always denotes the same content, so no entry can be
    stale."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._examples: dict[int, Example] = {}
        self._lock = Lock()

    def among(self, keys: Collection[int]) -> dict[int, Example]:
        # Without the lock or a recency update: every search runs this.
        get = self._examples.get
        return {key: example for key in keys if (example := get(key)) is not None}

    def __len__(self) -> int:
        return len(self._examples)

    def keep(self, examples: Mapping[int, Example], most: int) -> None:
        """Add examples; beyond `most` entries, clear the cache first, because most entries were
        deleted."""
        with self._lock:
            if len(self._examples) + len(examples) > most:
                self._examples.clear()
                self._bytes = 0
            for key, example in examples.items():
                if key not in self._examples:
                    self._examples[key] = example
                    self._bytes += _size(example)
            while self._bytes > self._most_bytes:
                oldest = next(iter(self._examples))
                self._bytes -= _size(self._examples.pop(oldest))

    def clear(self) -> None:
        with self._lock:
            self._examples.clear()
            self._bytes = 0


def _size(example: Example) -> int:
    size = BYTES_BESIDE_IMAGES + len(example.answer) + len(example.rationale or "")
    for image in example.query.images:
        pixels = image.width * image.height
        size += COPIES_OF_BYTES * len(image.data)
        size += BYTES_PER_PIXEL * pixels if pixels <= KEEP_DECODED_UP_TO else 0
    return size


FIRST_VIEW = 1


class ChangeLog(Database):
    """Vectors and change log of one namespace of a file."""

    def __init__(
        self,
        path: str,
        *,
        create: bool = True,
        busy_seconds: float = 10.0,
        namespace: str = "",
    ) -> None:
        super().__init__(path, create=create, busy_seconds=busy_seconds)
        self.namespace = namespace

    def vectors(self, keys: Collection[int], view: int) -> dict[int, Vectors]:
        found = self.read(
            f"SELECT key, vector FROM vectors WHERE view = ? AND key IN {IN_JSON}",
            view,
            json_array(keys),
        )
        with self.decoding():
            return {key: np.frombuffer(blob, np.float32) for key, blob in found}

    def vectors_after(self, key: int, limit: int, view: int) -> list[tuple[int, Vectors]]:
        found = self.read(
            "SELECT examples.key, vector FROM examples JOIN vectors USING (key)"
            " WHERE namespace = ? AND view = ? AND examples.key > ?"
            " ORDER BY examples.key LIMIT ?",
            self.namespace,
            view,
            key,
            limit,
        )
        with self.decoding():
            return [(key, np.frombuffer(blob, np.float32)) for key, blob in found]

    def keys_digest(self) -> tuple[int, int]:
        (row,) = self.read(
            "SELECT count(*), coalesce(sum(key), 0) FROM examples WHERE namespace = ?",
            self.namespace,
        )
        return row[0], row[1]

    def mark(self, seq: int) -> int | None:
        found = self.read("SELECT mark FROM changes WHERE seq = ?", seq)
        return int(found[0][0]) if found else None

    def pruned(self) -> int:
        found = self.read("SELECT value FROM meta WHERE name = ?", f"{LOST_PREFIX}{self.namespace}")
        return int(found[0][0]) if found else 0

    def changes_since(self, seq: int, limit: int, view: int = FIRST_VIEW) -> list[Change]:
        """Return up to `limit` changes after `seq`. Those of other namespaces are included without
        a vector: to this index they are rows that it never had."""
        found = self.read(
            "SELECT seq, changes.key, vector FROM changes LEFT JOIN vectors"
            " ON vectors.key = changes.key AND view = ? AND namespace = ?"
            " WHERE seq > ? ORDER BY seq LIMIT ?",
            view,
            self.namespace,
            seq,
            limit,
        )
        with self.decoding():
            return [
                Change(seq, key, None if blob is None else np.frombuffer(blob, np.float32))
                for seq, key, blob in found
            ]

    def example_changes_since(self, seq: int, limit: int) -> list[ExampleChange]:
        # Changes from before the log had ids are skipped: no reader can know their rows. If a
        # migration gave a row another id (format 6), the earlier id counts as deleted.
        found = self.read(
            "SELECT seq, id, NOT EXISTS (SELECT 1 FROM examples"
            " WHERE key = changes.key AND id = changes.id)"
            " FROM changes WHERE namespace = ? AND id IS NOT NULL AND seq > ? ORDER BY seq LIMIT ?",
            self.namespace,
            seq,
            limit,
        )
        return [ExampleChange(seq, id, bool(deleted)) for seq, id, deleted in found]
