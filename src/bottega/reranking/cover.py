"""Demonstrations that show many labels."""

from __future__ import annotations

from collections.abc import Sequence

from bottega.reranking.top import Order, arranged, check_count
from bottega.types import Candidate, Query


class LabelCover:
    """Chooses candidates so that as many of their labels as possible are shown.

    Meant for multi-label sets, where the nearest examples often repeat the common labels. Greedy
    set cover in rounds: each choice is the candidate that shows the most labels not yet shown in
    this round, the nearer one of two equals; when nothing new is left a round ends, and all labels
    are new again. A greedy cover shows at least 1 - 1/e of the labels that the best choice would.
    A candidate without labels ("none of the classes") counts as showing a label of its own. The
    pipeline's `fetch` must be larger than the number of shots for there to be a choice.
    """

    def __init__(self, order: Order = "nearest-last", *, seed: int = 0) -> None:
        self._order: Order = order
        self._seed = seed

    async def __call__(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> list[Candidate]:
        check_count(k)
        return arranged(_cover(candidates, k), self._order, query, self._seed)


def _cover(candidates: Sequence[Candidate], k: int) -> list[Candidate]:
    rest = [(candidate, _labels(candidate)) for candidate in candidates]
    chosen: list[Candidate] = []
    shown: set[str | None] = set()
    while rest and len(chosen) < k:
        best = max(range(len(rest)), key=lambda place: len(rest[place][1] - shown))
        if not rest[best][1] - shown:
            shown.clear()
            continue
        candidate, labels = rest.pop(best)
        chosen.append(candidate)
        shown |= labels
    return chosen


def _labels(candidate: Candidate) -> set[str | None]:
    example = candidate.example
    labels = (example.answer,) if example.labels is None else example.labels
    return set(labels) or {None}
