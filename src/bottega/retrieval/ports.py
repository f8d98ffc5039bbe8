"""What retrievers need of a knowledge base, each part by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from bottega.protocols import Vectors
from bottega.types import Candidate, Example, ExampleChange, Query

SearchFunction = Callable[[Query, int], list[Candidate]]
# (n, d), one row for each id. Raises `NotFoundError` for an id that is gone.
VectorLookup = Callable[[Sequence[str]], Vectors]


class ExampleCollection(Protocol):
    """Examples that are all there from the beginning."""

    def ids(self) -> Sequence[str]: ...

    def get_many(self, ids: Sequence[str]) -> list[Example]: ...


class LabelledPool(ExampleCollection, Protocol):
    """The part of a knowledge base that sampling needs."""

    def ids_by_label(self) -> Mapping[str, Sequence[str]]: ...


# In the order of `seq`, those after the given one only. Blocks.
ChangeReader = Callable[[int], Iterable[ExampleChange]]


class ChangeFeed(Protocol):
    """What came and went. Both methods block and are called in threads."""

    def changes(self, since: int, /) -> Iterable[ExampleChange]:
        """In the order of `seq`, those after `since` only. A log that has forgotten some of them
        raises `LogPrunedError`; those after 0 it always tells."""
        ...

    def get_many(self, ids: Sequence[str], /) -> list[Example]:
        """Raises `NotFoundError` for an id that is gone."""
        ...


class FilteredSearch(Protocol):
    """The `k` nearest among these ids, best first, without the query itself."""

    def __call__(self, query: Query, k: int, *, within: Collection[str]) -> list[Candidate]: ...


class NearestSearch(Protocol):
    """The `k` nearest examples of each row, without those excluded for its query."""

    def __call__(
        self, vectors: Vectors, k: int, *, excluded_for: Sequence[Query]
    ) -> list[list[Candidate]]: ...
