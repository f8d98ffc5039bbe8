"""The two ports inside this room: rows are the truth, an index is derived from their changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bottega.protocols import Vectors
from bottega.types import Example, Query


@dataclass(frozen=True)
class Change:
    """One entry of the change log. `vector` is None if the row is gone by now.

    `key` numbers a row for the index. It is never given to a second row.
    """

    seq: int
    key: int
    vector: Vectors | None


@dataclass(frozen=True)
class Hit:
    key: int
    score: float


@dataclass(frozen=True)
class Footprint:
    """`embedder` and `dimension` are None until the first row is stored."""

    examples: int
    images: int
    bytes: int
    embedder: str | None
    dimension: int | None
    format_version: int


class RowStore(Protocol):
    """Examples at rest. What `put` or `delete` has returned from survives a crash.

    Safe to call from several threads; other processes may write to the same store meanwhile.
    """

    def put(self, examples: Sequence[Example], vectors: Vectors, fingerprint: str) -> int:
        """Stores those whose id is new and returns how many were. All of them, or none.

        Raises `EmbedderMismatchError` if the store's vectors have another fingerprint.
        """
        ...

    def delete(self, ids: Collection[str]) -> int: ...

    def get(self, ids: Collection[str]) -> dict[str, Example]: ...

    def by_keys(self, keys: Collection[int]) -> dict[int, Example]: ...

    def keys(self, ids: Collection[str]) -> dict[str, int]: ...

    def own_keys(self, query: Query) -> set[int]:
        """The rows that are the query itself: its id, or one of its images."""
        ...

    def ids_with_prefix(self, prefix: str, limit: int) -> list[str]: ...

    def ids_where(
        self,
        *,
        label: str | None = None,
        source: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> list[str]:
        """In the order of insertion, as everything that lists rows."""
        ...

    def labels(self) -> dict[str, list[str]]:
        """The ids of each label, labels in the order in which they were first seen."""
        ...

    def is_multi_label(self) -> bool: ...

    def note(self, name: str) -> str | None: ...

    def set_note(self, name: str, value: str) -> None: ...

    def last_seq(self) -> int: ...

    def changes_since(self, seq: int, limit: int) -> list[Change]: ...

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
    ) -> list[list[Hit]]:
        """The `k` best hits of each vector, best first; fewer only if there are fewer.

        `allowed` restricts every vector to these keys, `excluded` bars keys vector by vector.
        """
        ...

    def __len__(self) -> int: ...
