"""Data sources of retrievers: protocols that a knowledge base implements; change-log follower."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bottega.errors import LogPrunedError, NotFoundError
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


@dataclass(frozen=True)
class StaticExamples:
    """Change feed of a fixed collection of examples."""

    pool: ExampleCollection

    def changes(self, since: int, /) -> list[ExampleChange]:
        ids = list(self.pool.ids())[since:]
        return [ExampleChange(since + position, id) for position, id in enumerate(ids, start=1)]

    def get_many(self, ids: Sequence[str], /) -> list[Example]:
        return self.pool.get_many(ids)


class ChangeFollower:
    """Reader of a change log from its last position. Not safe for concurrent threads.

    `take(gone, new)` receives the changed ids and updates an index. It must remove `gone` before it
    adds `new`, because an id that was deleted and added again is in both. After a failure the same
    changes are passed again, so `take` must read before it changes anything.
    """

    def __init__(
        self, changes: ChangeReader, take: Callable[[Sequence[str], Sequence[str]], None]
    ) -> None:
        self._changes = changes
        self._take = take
        self._seq = 0
        self._indexed: set[str] = set()

    def follow(self) -> int:
        """Process the new changes and return the number of changed ids.

        If an example is deleted while it is read, the changes are read again: they must be a
        consistent snapshot.
        """
        while True:
            changes, pruned = self._read_changes()
            if not changes and not pruned:
                return 0
            last: dict[str, ExampleChange] = {}
            for change in changes:
                last.pop(change.id, None)  # an id added again is the newest
                last[change.id] = change
            new = [id for id, change in last.items() if not change.deleted]
            gone = [*pruned, *last]
            upto = changes[-1].seq if changes else 0
            try:
                self._take(gone, new)
            except NotFoundError:
                if not any(True for _ in self._changes(upto)):
                    raise
                continue
            # Only after success: failed changes must be passed again.
            self._seq = upto
            self._indexed = self._indexed.difference(gone).union(new)
            return len(gone)

    def _read_changes(self) -> tuple[list[ExampleChange], list[str]]:
        """Return the new changes, and the indexed ids that a pruned log no longer mentions."""
        try:
            return list(self._changes(self._seq)), []
        except LogPrunedError:
            changes = list(self._changes(0))
            return changes, sorted(self._indexed.difference(change.id for change in changes))
