"""Full reuse of keys and values as a composition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bottega.generation import Transformers
from bottega.protocols import Generator, Parser, Prompter, Searcher
from bottega.recipes.compressing import in_this_process
from bottega.types import Candidate, Prefix, Query, Sampling

if TYPE_CHECKING:
    from bottega.compression import Reuse
    from bottega.generation.loaded import LoadedModel


def reusing(
    base: Generator, *, prompt: Prompter, parse: Parser, sampling: Sampling | None = None
) -> Searcher:
    """A pipeline's `search` in the place of showing passages: their keys and values, each read
    alone, stand before the question (`compression.Reuse`). Raises `SettingError` for a base that is
    not in this process."""
    model = in_this_process(base)
    from bottega.compression import Compressed

    return Compressed(Reusing(model, prompt), model, prompt=prompt, parse=parse, sampling=sampling)


class Reusing:
    """Reads passages in the thread of the model."""

    def __init__(self, base: Transformers, prompt: Prompter) -> None:
        self._base, self._prompt = base, prompt
        self._made: Reuse | None = None

    async def __call__(self, query: Query, shown: Sequence[Candidate]) -> Prefix:
        return await self._base.run(lambda model: self._reuse(model).prefix(query, shown))

    def _reuse(self, model: LoadedModel) -> Reuse:
        if self._made is None:
            from bottega.compression import Reuse

            self._made = Reuse(model.model, model.encode, model.ends, self._prompt)
        return self._made
