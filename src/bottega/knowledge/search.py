"""Parts that the searches of all stores share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock

import numpy as np

from bottega.errors import EmptyKnowledgeBaseError, NotFoundError
from bottega.image import KEEP_DECODED_UP_TO
from bottega.knowledge.records import StoredView
from bottega.knowledge.stores import RowStore
from bottega.protocols import Vectors
from bottega.types import Example

MAX_DELETED = 1000
SPARE = 100  # cached examples beyond the number of stored ones: some were deleted since
ATTEMPTS = 3
MAX_CACHE_BYTES = 64 << 20
BYTES_BESIDE_IMAGES = 2048
# An image may cache its pixels and its base64 text beside its bytes.
BYTES_PER_PIXEL = 3
COPIES_OF_BYTES = 3


class ExampleCache(dict[int, Example]):
    """Bounded examples by key. A key always denotes the same content, so no entry can be stale.
    Searches read it without a lock or a recency update."""

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = Lock()

    def keep(self, examples: Mapping[int, Example], limit: int) -> None:
        """Add examples; beyond `limit` entries, or the maximum of bytes, drop the oldest ones, many
        of which were deleted."""
        with self._lock:
            for key, example in examples.items():
                if key not in self:
                    self[key] = example
                    self._bytes += _size(example)
            while len(self) > limit or self._bytes > self._max_bytes:
                self._bytes -= _size(self.pop(next(iter(self))))

    def clear(self) -> None:
        with self._lock:
            super().clear()
            self._bytes = 0


def _size(example: Example) -> int:
    size = BYTES_BESIDE_IMAGES + len(example.answer) + len(example.rationale or "")
    for image in example.query.images:
        pixels = image.width * image.height
        size += COPIES_OF_BYTES * len(image.data)
        size += BYTES_PER_PIXEL * pixels if pixels <= KEEP_DECODED_UP_TO else 0
    return size


def stacked(vectors: Sequence[tuple[str, Vectors | None]], view: StoredView) -> Vectors:
    """Return the vectors of the ids as rows. Raises `NotFoundError` for a missing one."""
    rows = []
    for id, vector in vectors:
        if vector is None:
            raise NotFoundError(
                f"example {id!r} has no vector", hint="run bottega verify to find missing vectors"
            )
        rows.append(vector)
    return np.stack(rows) if rows else np.empty((0, view.dimension), np.float32)


def empty_error(rows: RowStore) -> EmptyKnowledgeBaseError:
    where = f"the namespace {rows.namespace!r} of {rows.name}" if rows.namespace else rows.name
    return EmptyKnowledgeBaseError(f"{where} holds no examples", hint="add some first: bottega add")
