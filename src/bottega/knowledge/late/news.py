"""What an index has to embed and to drop: from a change log, or by comparing ids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from bottega.errors import NotFoundError, StoreError
from bottega.types import Changed, Example

Held = Callable[[], Collection[str]]


class Followed(Protocol):
    """The part of a knowledge base that an index follows. What an id stands for never changes."""

    def ids(self) -> Sequence[str]: ...

    def get_many(self, ids: Sequence[str]) -> list[Example]: ...


@runtime_checkable
class Logged(Protocol):
    """A source that can also say what happened after change number `since`, in order.

    One that no longer knows all of it raises `StoreError`, or begins at `since` or before.
    """

    def changes(self, since: int, /) -> Iterable[Changed]: ...


@dataclass(frozen=True)
class News:
    """`upto` is the change that they end with, None where there is no log."""

    gone: list[str]
    new: list[str]
    upto: int | None = None


def news(source: Followed, since: int | None, held: Held) -> News:
    """What happened after `since`, or what the ids say where no log tells it (None: all of it)."""
    if since is not None:
        told = _told(source, since)
        if told is not None:
            return _of_log(told, since, held)
    # The log's end first: what comes between the two readings is then told once more, not missed.
    upto = _end(source)
    wanted, there = dict.fromkeys(source.ids()), dict.fromkeys(held())
    gone = [id for id in there if id not in wanted]
    return News(gone, [id for id in wanted if id not in there], upto)


def present(source: Followed, ids: Sequence[str]) -> list[tuple[str, Example]]:
    """Those of the ids that are still there, with their examples."""
    try:
        return list(zip(ids, source.get_many(ids), strict=True))
    except NotFoundError:
        if len(ids) <= 1:
            return []
    half = len(ids) // 2
    return [*present(source, ids[:half]), *present(source, ids[half:])]


def _of_log(told: Sequence[Changed], since: int, held: Held) -> News:
    if not told:
        return News([], [], since)
    last: dict[str, bool] = {}
    for change in told:
        last.pop(change.id, None)  # what came back is the newest
        last[change.id] = change.deleted
    there = set(held())
    gone = [id for id, deleted in last.items() if deleted and id in there]
    new = [id for id, deleted in last.items() if not deleted and id not in there]
    return News(gone, new, told[-1].seq)


def _told(source: Followed, since: int) -> list[Changed] | None:
    """None where the log has a gap."""
    if not isinstance(source, Logged):
        return None
    try:
        told = list(source.changes(since))
    except StoreError:
        return None
    return None if told and told[0].seq <= since else told


def _end(source: Followed) -> int | None:
    """The number of the last change there is. Read through once: entries are small."""
    if not isinstance(source, Logged):
        return None
    end = 0
    try:
        for change in source.changes(0):
            end = change.seq
    except StoreError:
        return None
    return end
