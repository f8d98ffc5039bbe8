"""Which candidates are shown, and in which order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from bottega.types import Candidate, Query

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
        best = list(candidates[:k])
        if self.order == "nearest-last":
            best.reverse()
        elif self.order == "shuffled":
            hashes = ":".join(image.sha256 for image in query.images)
            random.Random(f"{self.seed}:{query.text}:{hashes}").shuffle(best)
        return best
