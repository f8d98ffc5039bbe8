"""Requests of one search: deduplicated, counted and limited by a budget."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

from bottega._util.caching import SharedTask
from bottega._util.event_loops import gather_or_cancel
from bottega.errors import SettingError, check_count
from bottega.protocols import Generator
from bottega.types import Ended, Prompt, Reply, Sampling, SearchNode, SearchTree, Usage

T = TypeVar("T")

# Upper bounds: template tokens per message, and tokens of a large tiled image.
MESSAGE_TOKENS = 32
IMAGE_TOKENS = 4096


class BudgetSpentError(Exception):
    """Request not sent because it exceeds the budget. Searches catch it and return their best."""


def most_prompt_tokens(prompt: Prompt) -> int:
    """Return an upper bound of tokens without a tokenizer: one per byte of text, 4,096 per
    image."""
    sizes = [len(part.encode()) if isinstance(part, str) else IMAGE_TOKENS for part in prompt.parts]
    return sum(sizes) + MESSAGE_TOKENS * len(prompt.messages)


@dataclass(frozen=True)
class ReservedCost:
    """Calls and tokens that are reserved before a request is sent."""

    calls: int = 0
    tokens: int = 0

    def __add__(self, other: ReservedCost) -> ReservedCost:
        return ReservedCost(self.calls + other.calls, self.tokens + other.tokens)


class BudgetedGenerator:
    """Generator for one search, with a budget.

    Identical requests are sent once, including concurrent ones. A sampled request without a seed
    gets one derived from `seed` and its content, independent of the order of requests.

    The budget allows `max_calls` completions and `max_tokens` tokens; a request that does not fit
    raises `BudgetSpentError` instead of being sent. Tokens are reserved before sending: for each
    completion its maximum length and `count(prompt)`, an upper bound, because a server that ignores
    `n` reads the prompt for every sample. `settle()` frees reserved tokens that replies did not
    use. Call it only when no request is pending, so the budget does not depend on the order of
    replies. Errors of the generator pass through.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        seed: int = 0,
        max_calls: int | None = None,
        max_tokens: int | None = None,
        count: Callable[[Prompt], int] = most_prompt_tokens,
    ) -> None:
        check_budget(max_calls, max_tokens)
        self.requests = 0
        self.calls = 0
        self.usage = Usage()
        self.reserved = ReservedCost()
        self._generator = generator
        self._seed = seed
        self._calls_left = max_calls
        self._tokens_left = max_tokens
        self._tokens_freed = 0
        self._count = count
        self._requests: dict[tuple[Prompt, Sampling], SharedTask[Reply]] = {}

    @property
    def is_limited(self) -> bool:
        return self._calls_left is not None or self._tokens_left is not None

    def room(self, price: ReservedCost) -> float:
        """Return how many requests of this price fit into the remaining budget."""
        kinds = ((self._calls_left, price.calls), (self._tokens_left, price.tokens))
        return min((left // each for left, each in kinds if left is not None and each), default=inf)

    def settle(self) -> None:
        """Free the reserved tokens that finished requests did not use."""
        if self._tokens_left is not None:
            self._tokens_left += self._tokens_freed
        self._tokens_freed = 0

    def tree(self, root: SearchNode, path: tuple[int, ...], ended: Ended) -> SearchTree:
        """Return the tree of the search, with its requests so far."""
        return SearchTree(root, path, ended, self.requests, self.calls, self.usage)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        key = prompt, sampling
        request = self._requests.get(key)
        if request is None:
            reserved = 0
            if self._tokens_left is not None:
                reserved = sampling.n * (self._count(prompt) + sampling.max_tokens)
            price = ReservedCost(sampling.n, reserved)
            self._pay(price)  # before any await: two requests cannot both take the last budget
            work = self._send(prompt, sampling, price.tokens)
            request = SharedTask(work, lambda: self._requests.pop(key, None))
            self._requests[key] = request
        return await request.wait()

    def _pay(self, price: ReservedCost) -> None:
        if self.room(price) < 1:
            raise BudgetSpentError
        self.reserved += price
        if self._calls_left is not None:
            self._calls_left -= price.calls
        if self._tokens_left is not None:
            self._tokens_left -= price.tokens

    async def _send(self, prompt: Prompt, sampling: Sampling, bound: int) -> Reply:
        self.requests += 1
        reply = await self._generator.generate(prompt, self._seeded(prompt, sampling))
        self.calls += len(reply.completions)
        self.usage += reply.usage
        spent = reply.usage.prompt_tokens + reply.usage.completion_tokens
        if spent:  # some endpoints report no usage
            self._tokens_freed += bound - spent
        return reply

    def _seeded(self, prompt: Prompt, sampling: Sampling) -> Sampling:
        if sampling.temperature == 0 or sampling.seed is not None:
            return sampling
        digest = hashlib.blake2b(repr((self._seed, sampling)).encode(), digest_size=4)
        for message in prompt.messages:
            parts = [part if isinstance(part, str) else (part.sha256,) for part in message.parts]
            digest.update(repr((message.role, parts)).encode())
        return replace(sampling, seed=int.from_bytes(digest.digest()) >> 1)


def check_budget(max_calls: int | None, max_tokens: int | None) -> None:
    for name, reserved in (("max_calls", max_calls), ("max_tokens", max_tokens)):
        if reserved is not None:
            check_count(name, reserved)


def check_rollout(max_calls: int | None, max_tokens: int | None, needed: ReservedCost) -> None:
    """Raise `SettingError` for a budget smaller than one rollout, which costs `needed`."""
    limits = {"max_calls": (max_calls, needed.calls), "max_tokens": (max_tokens, needed.tokens)}
    for name, (given, least) in limits.items():
        if given is not None and given < least:
            unit = name.removeprefix("max_").replace("calls", "completions")
            raise SettingError(
                f"{name} is a budget smaller than one rollout, got {given}: the first rollout needs"
                f" {least} {unit}",
                hint=f"set {name} to {least} or more, or remove it",
            )


async def gather_all(work: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results in order.

    An error cancels the other tasks. A spent budget lets them finish, since their cost is already
    reserved, and then raises `BudgetSpentError`.
    """
    results = []
    for result in await gather_affordable(work):
        if result is None:
            raise BudgetSpentError
        results.append(result)
    return results


async def gather_affordable(work: Iterable[Awaitable[T]]) -> list[T | None]:
    """Return results like `gather_all`, with None for tasks that exceed the budget."""

    async def unless_spent(one: Awaitable[T]) -> T | None:
        try:
            return await one
        except BudgetSpentError:
            return None

    return await gather_or_cancel(map(unless_spent, work))
