"""Interface between the knowledge base, its row store and the indexes derived from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from bottega._util.identity import Exclude
from bottega.knowledge.eviction import Eviction
from bottega.knowledge.filters import Filter
from bottega.knowledge.records import RowMetadata
from bottega.protocols import Vectors
from bottega.types import Example, ExampleChange, Query


@dataclass(frozen=True)
class Change:
    """Entry of the change log. `vector` is None if the row has been deleted since.

    `key` identifies a row for the index and is never reused.
    """

    seq: int
    key: int
    vector: Vectors | None


class SearchHit(NamedTuple):
    """Key of a row and its score; higher is better."""

    key: int
    score: float


@dataclass(frozen=True)
class EmbeddedBatch:
    """Vectors (n, dimension) of a batch of examples and the fingerprint of their embedder."""

    fingerprint: str
    vectors: Vectors


@dataclass(frozen=True)
class StoredView:
    """Named vector that every row has. `number` changes when another embedder replaces it."""

    number: int
    name: str
    fingerprint: str
    dimension: int


@dataclass(frozen=True)
class UsageRecord:
    """Number of times an example was shown, the last time (unix seconds), and US dollars saved."""

    count: int
    last_used: float
    saved_usd: float


@dataclass(frozen=True)
class Capacity:
    """Maximum number of rows in a namespace, and the policy that evicts the excess."""

    rows: int
    evict: Eviction


@dataclass(frozen=True)
class Footprint:
    """Numbers of examples, images and pinned examples in the namespace; `bytes` of the whole
    file."""

    examples: int
    images: int
    pinned: int
    bytes: int
    format_version: int


class RowStore(Protocol):
    """Durable examples of one namespace: whatever `put` or `delete` wrote before returning survives
    a crash.

    Methods are safe to call from several threads while other processes write to the same store.
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
        """Store the examples with new ids in one transaction and return their number.

        `metadata_by_id` sets age, pin and counters before eviction. With `supersede`, each example
        replaces older answers to the same question; it is skipped if one of those is pinned. Raises
        `EmbedderMismatchError` if the stored vectors have another fingerprint.
        """
        ...

    def annotate(self, id: str, fields: Mapping[str, str | None], tags: Mapping[str, str]) -> bool:
        """Set these fields and add these tags. Return False if the id does not exist.

        The row gets a new key, because the content of a key never changes; vectors, uses and age
        stay.
        """
        ...

    def delete(self, ids: Collection[str]) -> int: ...

    def get(self, ids: Collection[str]) -> dict[str, Example]: ...

    def by_keys(self, keys: Collection[int]) -> dict[int, Example]: ...

    def keys(self, ids: Collection[str]) -> dict[str, int]: ...

    def pinned_ids(self, question_digests: Collection[str]) -> dict[str, str]:
        """Return the ids of pinned examples by question digest."""
        ...

    def excluded_keys(self, query: Query, exclude: Exclude) -> set[int]:
        """Return the keys of the rows that `exclude` rules out: the query's own id, and rows that
        share an image with it or are the same question."""
        ...

    def ids_with_prefix(self, prefix: str, limit: int) -> list[str]: ...

    def ids_where(self, where: Filter | None = None) -> list[str]:
        """Return the ids that match, in insertion order."""
        ...

    def keys_where(self, where: Filter, after: int = 0) -> list[int]:
        """Return the keys above `after` that match, ascending."""
        ...

    def last_key(self) -> int:
        """Return the highest key of any namespace."""
        ...

    def count(self) -> int: ...

    def labels(self) -> dict[str, list[str]]:
        """Return the ids of each label, with labels in order of first appearance."""
        ...

    def is_multi_label(self) -> bool: ...

    def note(self, name: str) -> str | None: ...

    def set_note(self, name: str, value: str) -> None: ...

    def views(self) -> dict[str, StoredView]:
        """Return the complete views by name, in order of creation."""
        ...

    def vectors(self, keys: Collection[int], view: int) -> dict[int, Vectors]: ...

    def vectors_after(self, key: int, limit: int, view: int) -> list[tuple[int, Vectors]]: ...

    def keys_digest(self) -> tuple[int, int]:
        """Return the number and the sum of the keys, to compare with those of an index."""
        ...

    def last_seq(self) -> int: ...

    def mark(self, seq: int) -> int | None:
        """Return the random number of change `seq`, or None if the log has lost the change.

        Two files with the same mark share that change: a restored copy that diverged has other
        marks.
        """
        ...

    def pruned(self) -> int:
        """Return the last change of the namespace that the log has lost. A reader of an earlier
        change may miss a deletion.

        Call it after `changes_since`, because another process may prune in between.
        """
        ...

    def changes_since(self, seq: int, limit: int, view: int) -> list[Change]: ...

    def example_changes_since(self, seq: int, limit: int) -> list[ExampleChange]: ...

    def add_uses(self, uses: Mapping[str, UsageRecord]) -> None: ...

    def pin(self, ids: Collection[str], pinned: bool) -> int: ...

    def snapshot(self) -> AbstractContextManager[None]: ...

    def footprint(self) -> Footprint: ...

    def close(self) -> None: ...
