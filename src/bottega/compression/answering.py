"""Answers behind compressed passages: the last part of a pipeline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from bottega.errors import SettingError
from bottega.protocols import BehindPrefix, Generator, Parser, Prompter
from bottega.types import Candidate, Found, Prefix, Query, Sampling

Condense = Callable[[Query, Sequence[Candidate]], Awaitable[Prefix]]


class Compressed:
    """Shows the model no passage: what is found stands before its prompt as keys and values.

    A `Searcher`, to be a pipeline's `search`. Without candidates the model is asked as it is.
    """

    def __init__(
        self,
        condense: Condense,
        base: BehindPrefix,
        *,
        prompt: Prompter,
        parse: Parser,
        sampling: Sampling | None = None,
    ) -> None:
        self._condense, self._base = condense, base
        self._prompt, self._parse = prompt, parse
        self._sampling = sampling or Sampling()

    async def search(self, query: Query, candidates: Sequence[Candidate], k: int, /) -> Found:
        if k < 1:
            raise SettingError(f"cannot choose {k} candidates", hint="use k >= 1")
        shown = tuple(candidates[:k])
        generator: Generator = self._base
        if shown:
            generator = self._base.behind(await self._condense(query, shown))
        prompt = self._prompt(query, ())
        reply = await generator.generate(prompt, self._sampling)
        return Found(shown, prompt, reply, self._parse(query, reply.completions[0]))
