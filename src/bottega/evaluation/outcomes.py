"""Methods, their outcomes and failures, and the budget of a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bottega.errors import (
    BottegaError,
    GarbledError,
    GenerationError,
    ImageError,
    RejectedError,
    SettingError,
    UnreachableError,
)
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
        return method_title(self.name, self.shots)


def method_title(method: str, shots: int) -> str:
    """A method at its number of shots, as people read it: `top-k 5`, `zero-shot`."""
    return f"{method} {shots or ''}".strip()


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
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


# A wrong key, a forbidden or an unknown model. A 400 may be about this one image.
FOR_ALL = {401, 403, 404}


def is_item_error(error: BottegaError) -> bool:
    """True if the next question may well be answered."""
    if isinstance(error, RejectedError):
        return error.status not in FOR_ALL
    if isinstance(error, UnreachableError):
        return False
    return isinstance(error, ImageError) or (isinstance(error, GenerationError) and error.retryable)


@dataclass
class EndpointCheck:
    """A web page comes from a wrong address or from a busy proxy. It was a wrong address if nothing
    has been answered when more pages came than requests are sent at once."""

    answered: bool = False
    pages: int = 0

    def passes(self, error: BottegaError, at_once: int) -> bool:
        if not isinstance(error, GarbledError):
            return False
        self.pages += 1
        return self.answered or self.pages <= at_once


def first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of a task group's errors, the first one raised on purpose, else the first of any kind."""
    expected, others = errors.split(BottegaError)
    error: BaseException = (expected or others or errors).exceptions[0]
    return first(error) if isinstance(error, BaseExceptionGroup) else error


class Budget:
    """US dollars for a whole run, of which `spent` are gone.

    `reserve` refuses a request that could not be paid for if it, and all that are under way, cost
    as much as the dearest so far. So a limit is kept unless prices rise; that is why a limited run
    asks the first item of each method alone.
    """

    def __init__(
        self, usd: float | None = None, *, spent: float = 0.0, highest_cost: float = 0.0
    ) -> None:
        if usd is not None and not usd > 0:
            raise SettingError(f"the budget is {usd} USD", hint="give a positive number")
        self._limit = usd
        self.spent = spent
        self._highest_cost = highest_cost
        self._under_way = 0
        self.is_spent = False

    @property
    def is_limited(self) -> bool:
        return self._limit is not None

    def reserve(self) -> bool:
        wanted = self.spent + self._highest_cost * (self._under_way + 1)
        if self._limit is not None and wanted > self._limit:
            self.is_spent = True
            return False
        self._under_way += 1
        return True

    def settle(self, cost_usd: float | None, at_most_usd: float = 0.0) -> None:
        """What it cost, and what one like it may cost. Raises `SettingError` if there is a limit
        and no price."""
        self._under_way -= 1
        if cost_usd is None and self._limit is not None:
            raise SettingError(
                "the model's price is not known, so a budget cannot be held",
                hint="--price 0.15,0.60 gives US dollars for a million tokens",
            )
        self.spent += cost_usd or 0.0
        self._highest_cost = max(self._highest_cost, cost_usd or 0.0, at_most_usd)
