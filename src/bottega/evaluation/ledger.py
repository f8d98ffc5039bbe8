"""Where a run keeps its answers."""

from __future__ import annotations

from typing import Protocol

from bottega.errors import BottegaError
from bottega.evaluation.outcomes import Method, Outcome, Scored
from bottega.types import Candidate, Example


class Ledger(Protocol):
    """An answer is kept when `keep` returns; one that failed is no answer."""

    def answered(self, method: Method, items: tuple[Example, ...]) -> dict[int, Scored]:
        """What was answered before, by the item's place."""
        ...

    async def keep(self, method: Method, scored: Scored, outcome: Outcome) -> None: ...

    async def fail(self, method: Method, place: int, error: BottegaError) -> None: ...


class Unkept:
    """The ledger of a run that begins and ends in one process."""

    def answered(self, method: Method, items: tuple[Example, ...]) -> dict[int, Scored]:
        return {}

    async def keep(self, method: Method, scored: Scored, outcome: Outcome) -> None:
        pass

    async def fail(self, method: Method, place: int, error: BottegaError) -> None:
        pass


class Shown(Unkept):
    """Remembers which demonstrations one method showed, by the item's place."""

    def __init__(self, method: str, shots: int) -> None:
        self.key = (method, shots)
        self.by_place: dict[int, tuple[Candidate, ...]] = {}

    async def keep(self, method: Method, scored: Scored, outcome: Outcome) -> None:
        if (method.name, method.shots) == self.key and outcome.trace is not None:
            self.by_place[scored.place] = outcome.trace.candidates
