"""What one search asks: identical requests once, all counted, never more than is allowed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import astuple, dataclass, replace
from typing import TypeVar

from bottega.errors import SettingError
from bottega.protocols import Generator
from bottega.types import Prompt, Reply, Sampling, Usage

T = TypeVar("T")

# Tokens that templates may put around a message, and those of a large image in tiles.
AROUND_MESSAGE = 32
AN_IMAGE = 4096


class BudgetSpentError(Exception):
    """A request that does not fit into the budget and was not sent: a search ends with what it has,
    so it never leaves this room."""


def most_prompt_tokens(prompt: Prompt) -> int:
    """A bound where no tokenizer is at hand: every byte of text is a token, an image is 4,096."""
    parts = [part for message in prompt.messages for part in message.parts]
    sizes = [len(part.encode()) if isinstance(part, str) else AN_IMAGE for part in parts]
    return sum(sizes) + AROUND_MESSAGE * len(prompt.messages)


@dataclass
class Request:
    task: asyncio.Task[Reply]
    waiting: int = 0


class Asker:
    """A generator for the length of one search. Identical requests are sent once, also while the
    first is under way. A sampled request without a seed gets one that follows from `seed` and from
    what is asked, so that it does not matter when it is asked.

    At most `most_calls` completions and `most_tokens` tokens are asked for; what does not fit is
    not sent, `BudgetSpentError`. Tokens are set aside before sending, `count(prompt)` and all that
    the completions may have, until the reply says how many there were: `count` has to be a bound.
    Errors of the generator pass through.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        seed: int = 0,
        most_calls: int | None = None,
        most_tokens: int | None = None,
        count: Callable[[Prompt], int] = most_prompt_tokens,
    ) -> None:
        check_budget(most_calls, most_tokens)
        self.requests = 0
        self.calls = 0
        self.usage = Usage()
        self._generator = generator
        self._seed = seed
        self._calls_left = most_calls
        self._tokens_left = most_tokens
        self._count = count
        self._requests: dict[tuple[Prompt, Sampling], Request] = {}

    async def ask(self, prompt: Prompt, sampling: Sampling) -> Reply:
        key = prompt, sampling
        request = self._requests.get(key)
        if request is None:
            bound = self._set_aside(prompt, sampling)
            task = asyncio.create_task(self._send(prompt, sampling, bound))
            request = self._requests[key] = Request(task)
        request.waiting += 1
        try:
            return await asyncio.shield(request.task)
        finally:
            request.waiting -= 1
            if not request.waiting and not request.task.done():
                del self._requests[key]
                request.task.cancel()

    def _set_aside(self, prompt: Prompt, sampling: Sampling) -> int:
        bound = 0
        if self._tokens_left is not None:
            bound = self._count(prompt) + sampling.n * sampling.max_tokens
            if bound > self._tokens_left:
                raise BudgetSpentError
        if self._calls_left is not None:
            if sampling.n > self._calls_left:
                raise BudgetSpentError
            self._calls_left -= sampling.n
        if self._tokens_left is not None:
            self._tokens_left -= bound
        return bound

    async def _send(self, prompt: Prompt, sampling: Sampling, bound: int) -> Reply:
        self.requests += 1
        reply = await self._generator.generate(prompt, self._seeded(prompt, sampling))
        self.calls += len(reply.completions)
        self.usage = Usage(
            *(sum(pair) for pair in zip(astuple(self.usage), astuple(reply.usage), strict=True))
        )
        spent = reply.usage.prompt_tokens + reply.usage.completion_tokens
        if self._tokens_left is not None and spent:  # an endpoint may not say
            self._tokens_left += bound - spent
        return reply

    def _seeded(self, prompt: Prompt, sampling: Sampling) -> Sampling:
        if sampling.temperature == 0 or sampling.seed is not None:
            return sampling
        digest = hashlib.blake2b(repr((self._seed, sampling)).encode(), digest_size=4)
        for message in prompt.messages:
            parts = [part if isinstance(part, str) else (part.sha256,) for part in message.parts]
            digest.update(repr((message.role, parts)).encode())
        return replace(sampling, seed=int.from_bytes(digest.digest()) >> 1)


def check_budget(most_calls: int | None, most_tokens: int | None) -> None:
    for name, most in (("most_calls", most_calls), ("most_tokens", most_tokens)):
        if most is not None and most < 1:
            raise SettingError(
                f"{name} is {most}", hint=f"set {name} to 1 or more, or leave it out"
            )


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """All results in order. An error ends the others at once and is raised alone; a spent budget
    lets them end first, because they are paid for."""
    results = []
    for result in await affordable(work):
        if result is None:
            raise BudgetSpentError
        results.append(result)
    return results


async def affordable(work: Iterable[Awaitable[T]]) -> list[T | None]:
    """As `together`, but with None for those that the budget did not allow."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_unless_spent(one)) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def _unless_spent(work: Awaitable[T]) -> T | None:
    try:
        return await work
    except BudgetSpentError:
        return None
