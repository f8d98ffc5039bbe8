"""The best, in an order to be chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from bottega.errors import SettingError
from bottega.reranking.lots import lots_for
from bottega.types import Candidate, Query

MOST_SHOWN = 100
Order = Literal["nearest-last", "nearest-first", "shuffled"]


class TopK:
    """The first k candidates. The paper leaves their order open; it is a setting here.

    `nearest-last` (default) puts the best demonstration next to the query, where language models
    read most; `shuffled` is seeded per query.
    """

    def __init__(self, order: Order = "nearest-last", *, seed: int = 0) -> None:
        self.order: Order = order
        self.seed = seed

    async def __call__(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> list[Candidate]:
        check_count(k)
        return arranged(candidates[:k], self.order, query, self.seed)


def check_count(k: int) -> None:
    if k < 0:
        raise SettingError(f"cannot choose {k} candidates", hint="use k >= 0")


def check_depth(k: int) -> None:
    """Of a branch: the tree is recorded node within node, and JSON cannot go on for ever."""
    check_count(k)
    if k > MOST_SHOWN:
        raise SettingError(
            f"a search cannot choose {k} demonstrations",
            hint=f"show {MOST_SHOWN} or fewer, or leave the search out",
        )


def arranged(best: Sequence[Candidate], order: Order, query: Query, seed: int) -> list[Candidate]:
    """Candidates that stand best first, in the order in which they will be shown."""
    shown = list(best)
    if order == "nearest-last":
        shown.reverse()
    elif order == "shuffled":
        lots_for(query, seed).shuffle(shown)
    return shown
