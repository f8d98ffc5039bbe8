"""The ports inside this room: rows are the truth, an index is derived from their changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from bottega.exclusion import Exclude
from bottega.knowledge.eviction import Eviction
from bottega.knowledge.filters import Filter
from bottega.knowledge.records import RowMetadata
from bottega.protocols import Vectors
from bottega.types import Example, ExampleChange, Query


@dataclass(frozen=True)
class Change:
    """One entry of the change log. `vector` is None if the row is gone by now.

    `key` numbers a row for the index. It is never given to a second row.
    """

    seq: int
    key: int
    vector: Vectors | None


class SearchHit(NamedTuple):
    key: int
    score: float


@dataclass(frozen=True)
class EmbeddedBatch:
    """One vector for each example of a batch, and what made them."""

    fingerprint: str
    vectors: Vectors


@dataclass(frozen=True)
class StoredView:
    """A named vector that every row has. `number` changes when another embedder takes over."""

    number: int
    name: str
    fingerprint: str
    dimension: int


@dataclass(frozen=True)
class UsageRecord:
    """How often an example was shown, when last (unix seconds), and what that saved."""

    count: int
    last: float
    saved_usd: float


@dataclass(frozen=True)
class Capacity:
    """At most so many rows in a namespace, and who leaves when there are more."""

    rows: int
    evict: Eviction


@dataclass(frozen=True)
class Footprint:
    """Examples, images and pinned ones of the namespace; `bytes` of the whole file."""

    examples: int
    images: int
    pinned: int
    bytes: int
    format_version: int


class RowStore(Protocol):
    """Examples at rest, one namespace of them. What `put` or `delete` has returned from survives
    a crash.

    Safe to call from several threads; other processes may write to the same store meanwhile.
    """

    path: str
    name: str  # of the store, for messages
    namespace: str

    def put(
        self,
        examples: Sequence[Example],
        views: Mapping[str, EmbeddedBatch],
        capacity: Capacity | None = None,
        metadata_by_id: Mapping[str, RowMetadata] | None = None,
        supersede: bool = False,
    ) -> int:
        """Stores those whose id is new and returns how many were. All of them, or none. Those that
        `supersede` take the place of older answers to the same question, unless one is pinned:
        then they are left out.

        What stands in `metadata_by_id` by id comes with age, pin and counters, before any is
        evicted. Raises `EmbedderMismatchError` if the store's vectors have another fingerprint.
        """
        ...

    def annotate(self, id: str, told: Mapping[str, str | None], tags: Mapping[str, str]) -> bool:
        """The rationale that is `told`, if one is, and more tags, under a new key, since what a key
        stands for never changes; vectors, uses and age stay. False if the id is not there."""
        ...

    def delete(self, ids: Collection[str]) -> int: ...

    def get(self, ids: Collection[str]) -> dict[str, Example]: ...

    def by_keys(self, keys: Collection[int]) -> dict[int, Example]: ...

    def keys(self, ids: Collection[str]) -> dict[str, int]: ...

    def pinned_answers(self, asked: Collection[str]) -> dict[str, str]:
        """The ids of the pinned examples by the digests of their questions."""
        ...

    def own_keys(self, query: Query, exclude: Exclude) -> set[int]:
        """Return the keys of the rows that `exclude` rules out: the query's own id, and rows that
        share an image with it or are the same question."""
        ...

    def ids_with_prefix(self, prefix: str, limit: int) -> list[str]: ...

    def ids_where(self, where: Filter | None = None) -> list[str]:
        """In the order of insertion, as everything that lists rows."""
        ...

    def keys_where(self, where: Filter, after: int = 0) -> list[int]:
        """Ascending, from the first one above `after`."""
        ...

    def last_key(self) -> int:
        """The highest key of any namespace."""
        ...

    def count(self) -> int: ...

    def labels(self) -> dict[str, list[str]]:
        """The ids of each label, labels in the order in which they were first seen."""
        ...

    def is_multi_label(self) -> bool: ...

    def note(self, name: str) -> str | None: ...

    def set_note(self, name: str, value: str) -> None: ...

    def views(self) -> dict[str, StoredView]:
        """By name, in the order in which they came to the store."""
        ...

    def vectors(self, keys: Collection[int], view: int) -> dict[int, Vectors]: ...

    def vectors_after(self, key: int, limit: int, view: int) -> list[tuple[int, Vectors]]: ...

    def keys_digest(self) -> tuple[int, int]:
        """Number and sum of the keys: what an index must hold."""
        ...

    def last_seq(self) -> int: ...

    def mark(self, seq: int) -> int | None:
        """A random number that change `seq` was given: whoever knows it was made from this file,
        not from a copy that has gone its own way. None if the log has lost the change."""
        ...

    def pruned(self) -> int:
        """The last change of the namespace that the log has lost: who has read less may miss a
        deletion. To be asked after `changes_since`, as another process may prune between them."""
        ...

    def changes_since(self, seq: int, limit: int, view: int) -> list[Change]: ...

    def named_changes_since(self, seq: int, limit: int) -> list[ExampleChange]: ...

    def add_uses(self, uses: Mapping[str, UsageRecord]) -> None: ...

    def pin(self, ids: Collection[str], pinned: bool) -> int: ...

    def snapshot(self) -> AbstractContextManager[None]: ...

    def footprint(self) -> Footprint: ...

    def close(self) -> None: ...


class VectorIndex(Protocol):
    """Nearest neighbours among the rows whose changes it was told. Safe for several threads."""

    @property
    def watermark(self) -> int:
        """The last change that is in the index."""
        ...

    def apply(self, changes: Sequence[Change]) -> None: ...

    def search(
        self,
        vectors: Vectors,
        k: int,
        *,
        allowed: Collection[int] | None = None,
        excluded: Sequence[Collection[int]] | None = None,
    ) -> list[list[SearchHit]]:
        """The `k` best hits of each vector, best first; fewer only if there are fewer.

        `allowed` restricts every vector to these keys, `excluded` bars keys vector by vector.
        """
        ...

    def __len__(self) -> int: ...
