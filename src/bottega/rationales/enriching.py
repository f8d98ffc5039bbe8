"""Rationales for a whole knowledge base, which may be stopped at any moment and goes on later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from bottega.errors import BottegaError, NotFoundError
from bottega.knowledge import KnowledgeBase
from bottega.rationales.making import Made, Rationales
from bottega.types import Example

# The tag that says how often predictions were right with the best candidate; 0 is a rejected one.
ACCURACY = "rationale_accuracy"


@dataclass(frozen=True)
class Todo:
    """The ids of examples to make rationales for, in the order of the knowledge base. Of the others
    `given` came with a rationale, `passages` have no answer; `scores` are those of the rationales
    that were made earlier, `rejected` were tried in vain."""

    ids: tuple[str, ...]
    given: int = 0
    passages: int = 0
    rejected: int = 0
    scores: tuple[float, ...] = ()


def todo(knowledge: KnowledgeBase, *, again: bool = False) -> Todo:
    """`again` also takes those that have a rationale, or were tried and rejected."""
    ids: list[str] = []
    scores: list[float] = []
    given = passages = rejected = 0
    for example in knowledge:
        accuracy = _accuracy(example)
        if not example.answer:
            passages += 1
        elif again or (accuracy is None and not example.rationale):
            ids.append(str(example.id))
        elif accuracy is None:
            given += 1
        elif accuracy == 0:
            rejected += 1
        else:
            scores.append(accuracy)
    return Todo(tuple(ids), given, passages, rejected, tuple(scores))


def _accuracy(example: Example) -> float | None:
    """None where the tag is not ours."""
    try:
        return float(example.tags[ACCURACY])
    except (KeyError, ValueError):
        return None


class SpendingBudget(Protocol):
    """What a run may cost: `starts` says whether another example can be paid for, and `ended` is
    told what it cost, and what it would have cost with all candidates."""

    def starts(self) -> bool: ...

    def ended(self, cost_usd: float | None, at_most_usd: float) -> None: ...


class Enriching:
    """Stores each rationale, durably, when it is made. An example whose request failed stays as it
    is; one whose candidates are all rejected keeps what it had, and is tagged with a score of 0.

    `done` is told of each. An error for which `concerns_one` is false would meet every example, and
    is raised.
    """

    def __init__(
        self,
        knowledge: KnowledgeBase,
        rationales: Rationales,
        *,
        concerns_one: Callable[[BottegaError], bool],
        done: Callable[[str, Made], None],
    ) -> None:
        self._knowledge = knowledge
        self._rationales = rationales
        self._concerns_one = concerns_one
        self._done = done

    async def run(self, ids: Sequence[str], budget: SpendingBudget, concurrency: int = 8) -> None:
        """So many examples at once, until the purse is empty."""
        waiting = iter(ids)

        async def work() -> None:
            for id in waiting:
                if not budget.starts():
                    return
                budget.ended(*await self._one(id))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(ids))):
                group.create_task(work())

    async def _one(self, id: str) -> tuple[float | None, float]:
        """What it cost, and would at most."""
        try:
            example = await asyncio.to_thread(self._knowledge.get, id)
        except NotFoundError:  # deleted by another process: nobody lacks its rationale
            return 0.0, 0.0
        made = await self._rationales.make(example)
        if made.error is None:
            with suppress(NotFoundError):
                await asyncio.to_thread(self._store, id, made)
        self._done(id, made)
        if made.error is not None and not self._concerns_one(made.error):
            raise made.error
        return made.cost_usd, made.at_most_usd

    def _store(self, id: str, made: Made) -> None:
        tags = {ACCURACY: f"{made.score:.4g}"}
        if made.rationale is None:
            self._knowledge.tag(id, tags)  # what it has may be newer than what was read
        else:
            self._knowledge.annotate(id, rationale=made.rationale, tags=tags)
