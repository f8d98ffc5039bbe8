"""Methods, scored answers, error classes and the budget of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bottega import notebook
from bottega.errors import (
    BottegaError,
    BudgetError,
    GarbledError,
    GenerationError,
    ImageError,
    PromptTooLongError,
    RejectedError,
    SettingError,
    UnreachableError,
    WorkerError,
)
from bottega.pipeline import Pipeline
from bottega.protocols import Generator, Pricer, turns_only
from bottega.types import Answer, Example, Prompt, Query, Reply, Sampling, Trace, Usage

# Called after each round, item by item in their order, for a method that learns from its answers.
Learn = Callable[[Query, Answer, str], Awaitable[None]]
# Name of a method and its number of demonstrations.
MethodKey = tuple[str, int]
# A wrong key, a forbidden or an unknown model. A 400 may concern one image.
RUN_ERROR_STATUSES = {401, 403, 404}


@dataclass(frozen=True)
class Outcome:
    """Answer of one query; `trace` is None if no model was called."""

    answer: Answer
    trace: Trace | None = None


@dataclass(frozen=True)
class Method:
    """Evaluated method with the name and the number of demonstrations that tables show.

    `learn` receives each answer and its tier, including the answers of a resumed run.
    """

    name: str
    shots: int
    answer: Callable[[Query], Awaitable[Outcome]]
    learn: Learn | None = None

    @property
    def key(self) -> MethodKey:
        return self.name, self.shots

    @property
    def title(self) -> str:
        return method_title(self.name, self.shots)


def pipeline_method(name: str, pipeline: Pipeline, shots: int = 0) -> Method:
    """Return a pipeline as a method. It receives the queries alone, so it cannot learn from gold
    answers."""

    async def answer(query: Query) -> Outcome:
        trace = await pipeline.trace(query)
        return Outcome(trace.answer, trace)

    return Method(name, shots, answer)


def method_title(method: str, shots: int) -> str:
    """Return a method's title with its number of shots: `top-k 5`, `zero-shot`."""
    return f"{method} {shots or ''}".strip()


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """Answered `item` at `index` in its benchmark, with its `answer` and the `scores` by each
    metric.

    `tier` gave the answer, empty without a router. `prompt_tokens`, `completion_tokens` and
    `cost_usd` include all requests for the item. `calls` counts sampled replies, as many calls as
    they would be one by one; `cost_usd` is None if a price is unknown.
    """

    index: int
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

    def _repr_html_(self) -> str:
        return notebook.render("scored", self)


def is_item_error(error: BottegaError) -> bool:
    """Return whether the next item may succeed after this error."""
    if isinstance(error, RejectedError):
        return error.status not in RUN_ERROR_STATUSES
    if isinstance(error, UnreachableError):
        return False
    if isinstance(error, ImageError | PromptTooLongError | WorkerError):
        return True
    return isinstance(error, GenerationError) and error.retryable


@dataclass
class EndpointCheck:
    """Detector of a wrong endpoint address.

    A wrong address and a busy proxy both send web pages. The address counts as wrong if more pages
    than concurrent requests arrive before the first answer.
    """

    answered: bool = False
    pages: int = 0

    def tolerates(self, error: BottegaError, concurrency: int) -> bool:
        """Count a web page; return whether it may come from a busy proxy."""
        if not isinstance(error, GarbledError):
            return False
        self.pages += 1
        return self.answered or self.pages <= concurrency


class Budget:
    """Budget of a whole run in US dollars, of which `spent` is used.

    `reserve` refuses a request if it and all running requests, at the highest cost so far, exceed
    the limit. The limit holds unless prices rise, so a limited run sends the first item of each
    method alone.
    """

    def __init__(
        self, usd: float | None = None, *, spent: float = 0.0, highest_cost: float = 0.0
    ) -> None:
        if usd is not None and not usd > 0:
            raise SettingError(
                f"the budget must be positive, got {usd} USD", hint="change --budget"
            )
        self._limit = usd
        self.spent = spent
        self._highest_cost = highest_cost
        self._running = 0
        self.is_spent = False

    def __str__(self) -> str:
        text = f"{self.spent:.4f} of {self._limit or 0.0:g} USD spent"
        return f"{text}, and the next request could exceed the budget" if self.is_spent else text

    @property
    def is_limited(self) -> bool:
        return self._limit is not None

    def reserve(self) -> bool:
        """Reserve the cost of a request; return False if the budget does not cover it."""
        wanted = self.spent + self._highest_cost * (self._running + 1)
        if self._limit is not None and wanted > self._limit:
            self.is_spent = True
            return False
        self._running += 1
        return True

    def settle(self, cost_usd: float | None, at_most_usd: float = 0.0) -> None:
        """Book the cost of a request; `at_most_usd` is what a similar one may cost.

        Raises `SettingError` if there is a limit and the price is unknown.
        """
        self._running -= 1
        if cost_usd is None and self._limit is not None:
            raise SettingError(
                "a budget needs the cost of each reply, but its price or its tokens are unknown",
                hint="set --price IN,OUT, and let the server report usage",
            )
        self.spent += cost_usd or 0.0
        self._highest_cost = max(self._highest_cost, cost_usd or 0.0, at_most_usd)


def reply_cost(reply: Reply, price: Pricer) -> float | None:
    """Return the cost of a reply in US dollars, None if it is unknown: also where a server that is
    not free reports no tokens."""
    if not (reply.usage.prompt_tokens or reply.usage.completion_tokens) and price(
        reply.model, Usage(1000, 1000)
    ):
        return None
    return price(reply.model, reply.usage)


def check_priced(model: str, budget: Budget, price: Pricer) -> None:
    """Raise `SettingError` for a budget without the model's price, before the first request."""
    if budget.is_limited and price(model, Usage(1, 1)) is None:
        raise SettingError(
            f"a budget needs the price of {model}, which is unknown",
            hint="set it in US dollars per million tokens: --price 0.15,0.60, in streams"
            " --master-price and --apprentice-price",
        )


def add_cost(total: float | None, cost: float | None) -> float | None:
    """Return the sum, None if one of them is unknown."""
    return None if total is None or cost is None else total + cost


class CostLimitedGenerator:
    """Generator wrapper that refuses requests beyond a budget (`BudgetError`).

    With a limit, its first request is sent alone: it shows the cost before many run
    concurrently.
    """

    def __init__(self, inner: Generator, budget: Budget, price: Pricer) -> None:
        check_priced(inner.name, budget, price)
        self._inner = inner
        self._budget = budget
        self._price = price
        self._first = asyncio.Lock()
        self._measured = not budget.is_limited
        self.name = inner.name
        self.fingerprint = str(getattr(inner, "fingerprint", inner.name))
        self.turns_only = turns_only(inner)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        if not self._measured:
            async with self._first:
                if not self._measured:
                    reply = await self._send(prompt, sampling)
                    self._measured = True
                    return reply
        return await self._send(prompt, sampling)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _send(self, prompt: Prompt, sampling: Sampling) -> Reply:
        if not self._budget.reserve():
            raise BudgetError(
                str(self._budget),
                hint="repeat the command with a larger --budget to resume",
            )
        cost: float | None = 0.0
        try:
            reply = await self._inner.generate(prompt, sampling)
            cost = reply_cost(reply, self._price)
        finally:
            self._budget.settle(cost)
        return reply
