"""Protocols of the data sources of retrievers, implemented by a knowledge base."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from bottega.protocols import Vectors
from bottega.types import Candidate, Example, ExampleChange, Query

SearchFunction = Callable[[Query, int], list[Candidate]]
# Returns (n, d), one row per id. Raises `NotFoundError` for a deleted id.
VectorLookup = Callable[[Sequence[str]], Vectors]


class ExampleCollection(Protocol):
    """Fixed collection of examples."""

    def ids(self) -> Sequence[str]: ...

    def get_many(self, ids: Sequence[str]) -> list[Example]: ...


class LabelledPool(ExampleCollection, Protocol):
    """Collection of examples with an index by label, for sampling."""

    def ids_by_label(self) -> Mapping[str, Sequence[str]]: ...


# Returns the changes after a sequence number, in the order of `seq`. Blocks.
ChangeReader = Callable[[int], Iterable[ExampleChange]]


class ChangeFeed(Protocol):
    """Log of added and deleted examples. Both methods block and are called in threads."""

    def changes(self, since: int, /) -> Iterable[ExampleChange]:
        """Return the changes after `since`, in the order of `seq`. Raises `LogPrunedError` if the
        log no longer holds some of them; changes after 0 are always available."""
        ...

    def get_many(self, ids: Sequence[str], /) -> list[Example]:
        """Return the examples. Raises `NotFoundError` for a deleted id."""
        ...


class FilteredSearch(Protocol):
    """Search for the `k` nearest among these ids, best first, without the query itself."""

    def __call__(self, query: Query, k: int, *, within: Collection[str]) -> list[Candidate]: ...


class NearestSearch(Protocol):
    """Search for the `k` nearest examples of each row, without those excluded for its query."""

    def __call__(
        self, vectors: Vectors, k: int, *, excluded_for: Sequence[Query]
    ) -> list[list[Candidate]]: ...
