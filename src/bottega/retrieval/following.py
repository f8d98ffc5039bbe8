"""Keeping up with a knowledge base that others add to and delete from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bottega.errors import LogPrunedError, NotFoundError
from bottega.retrieval.ports import Changes, Listed
from bottega.types import Changed, Example

Take = Callable[[Sequence[str], Sequence[str]], None]


class Still:
    """A pool that does not change, as a feed."""

    def __init__(self, pool: Listed) -> None:
        self._pool = pool

    def changes(self, since: int, /) -> list[Changed]:
        ids = list(self._pool.ids())[since:]
        return [Changed(since + place, id) for place, id in enumerate(ids, start=1)]

    def get_many(self, ids: Sequence[str], /) -> list[Example]:
        return self._pool.get_many(ids)


class Follower:
    """Reads a change log from where it last stopped. Not safe for two threads at once.

    `take(gone, new)` is given what changed, reads of the new ones what it wants and learns it.
    `gone` must be forgotten before `new` is learnt: an id that went and came back is in both. What
    fails in it is told again the next time, so it reads before it changes anything.
    """

    def __init__(self, changes: Changes, take: Take) -> None:
        self._changes = changes
        self._take = take
        self._seq = 0
        self._held: set[str] = set()

    def follow(self) -> int:
        """How many ids there was news of.

        What is deleted while it is read is looked up again: the news are those of one moment.
        """
        while True:
            changes, forgotten = self._told()
            if not changes and not forgotten:
                return 0
            last: dict[str, Changed] = {}
            for change in changes:
                last.pop(change.id, None)  # what came back is the newest
                last[change.id] = change
            new = [id for id, change in last.items() if not change.deleted]
            gone = [*forgotten, *last]
            upto = changes[-1].seq if changes else 0
            try:
                self._take(gone, new)
            except NotFoundError:
                if not any(True for _ in self._changes(upto)):
                    raise
                continue
            # Only now: what was not learnt must be told again.
            self._seq = upto
            self._held = self._held.difference(gone).union(new)
            return len(gone)

    def _told(self) -> tuple[list[Changed], list[str]]:
        """What is new in the log, and the ids held of which it tells nothing any more."""
        try:
            return list(self._changes(self._seq)), []
        except LogPrunedError:
            changes = list(self._changes(0))
            return changes, sorted(self._held.difference(change.id for change in changes))
