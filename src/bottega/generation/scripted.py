"""A generator without a model: the public test double."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bottega.errors import GenerationError
from bottega.types import Completion, Prompt, Reply, Sampling, Usage


@dataclass(frozen=True)
class Call:
    prompt: Prompt
    sampling: Sampling


class ScriptedGenerator:
    """Answers from a function of the prompt, or from a sequence, one item a sample.

    An exception in the sequence is raised in its turn; a script that has run out raises
    `GenerationError`. `calls` holds what was asked. Tokens are counted as words, an image as one.
    `latency` is in seconds.
    """

    def __init__(
        self,
        replies: Callable[[Prompt], str] | Sequence[str | Exception],
        *,
        name: str = "scripted",
        latency: float = 0.0,
    ) -> None:
        self.name = name
        self.calls: list[Call] = []
        self._latency = latency
        self._function = replies if callable(replies) else None
        self._rest: Iterator[str | Exception] = iter(() if callable(replies) else replies)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        self.calls.append(Call(prompt, sampling))
        texts = [self._next(prompt) for _ in range(sampling.n)]
        if self._latency:
            await asyncio.sleep(self._latency)
        return Reply(
            self.name,
            tuple(Completion(text) for text in texts),
            Usage(_words(prompt), sum(len(text.split()) for text in texts)),
            self._latency,
        )

    async def aclose(self) -> None:
        pass

    def _next(self, prompt: Prompt) -> str:
        if self._function is not None:
            return self._function(prompt)
        item = next(self._rest, None)
        if item is None:
            raise GenerationError(
                f"the script of {self.name!r} has run out after {len(self.calls) - 1} calls",
                hint="give it more replies, or a function",
            )
        if isinstance(item, Exception):
            raise item
        return item


def _words(prompt: Prompt) -> int:
    parts = [part for message in prompt.messages for part in message.parts]
    return sum(len(part.split()) if isinstance(part, str) else 1 for part in parts)
