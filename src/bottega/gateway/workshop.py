"""One namespace at work: how its questions go, and who keeps what the master says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bottega.pipeline import Pipeline
from bottega.types import Candidate, Example, Query

Charge = Callable[[float], None]
Said = Callable[[], Awaitable[str]]


class Keeper(Protocol):
    """Stores an example: its id, durable by then, or that of a pinned one that answers the same
    question and stays; None if it could not be stored."""

    async def keep(self, example: Example, /) -> str | None: ...


class Pair(Protocol):
    """How far the apprentice agreed with the master."""

    @property
    def shown(self) -> float: ...
    @property
    def hidden(self) -> float: ...


class Measure(Protocol):
    """Which answers are measured, and what is learnt of them: `routing.Shadow`."""

    def begins(self) -> bool: ...

    def cancel(self) -> None: ...

    async def measure(
        self,
        query: Query,
        candidates: Sequence[Candidate],
        *,
        shown: Said,
        hidden: Said,
        master: Said,
    ) -> Pair | None: ...


@dataclass(frozen=True)
class Workshop:
    """`teachers` are the tiers whose answers become examples; without a `keeper` nothing does.
    `shadow` measures what demonstrations do, also where `pipeline` shows none: `ungated` does.
    What that costs is told to `charge`, of a router that holds a budget. `best` says how near the
    nearest example is that was found for a question, shown or not; `example` reads a stored one
    by its id, and blocks."""

    pipeline: Pipeline
    keeper: Keeper | None = None
    teachers: frozenset[str] = frozenset()
    shadow: Measure | None = None
    ungated: Pipeline | None = None
    charge: Charge | None = None
    best: Callable[[Query], float | None] = lambda query: None
    example: Callable[[str], Example | None] = lambda id: None


class Workshops(Protocol):
    async def open(self, namespace: str, /) -> Workshop: ...
