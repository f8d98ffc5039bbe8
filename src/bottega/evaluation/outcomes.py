"""What a method is, what it answers, and what is kept of an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bottega.types import Answer, Example, Query, Trace


@dataclass(frozen=True)
class Outcome:
    """One answered query; `trace` is None where no model was asked."""

    answer: Answer
    trace: Trace | None = None


# What a method that grows with its answers does after each round, item by item in their order.
Learn = Callable[[Query, Answer, str], Awaitable[None]]


@dataclass(frozen=True)
class Method:
    """A way to answer, under the name and the number of demonstrations that tables show. `learn` is
    told of every answer and of the tier that gave it, the answers of an earlier run included."""

    name: str
    shots: int
    answer: Callable[[Query], Awaitable[Outcome]]
    learn: Learn | None = None

    @property
    def title(self) -> str:
        return titled(self.name, self.shots)


def titled(method: str, shots: int) -> str:
    """A method at its number of shots, as people read it: `top-k 5`, `zero-shot`."""
    return f"{method} {shots or ''}".strip()


@dataclass(frozen=True, slots=True)
class Scored:
    """An answered item, `place` in its benchmark, with its answer's score by each of the metrics
    and what it cost. `calls` are the replies that were sampled, as many calls as they would be one
    by one; `cost_usd` is None where a price is unknown."""

    place: int
    item: Example
    answer: Answer
    scores: tuple[float, ...]
    tier: str = ""
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = 0.0

    @property
    def score(self) -> float:
        return self.scores[0]

    @property
    def correct(self) -> bool:
        return self.score == 1.0
