"""A first answer, only to search by what it says."""

from __future__ import annotations

from dataclasses import replace

from bottega.protocols import Generator, Prompter, Retriever
from bottega.retrieval.keywords import Keyworder
from bottega.types import Candidate, Query, Sampling


class ResponseProbe:
    """Asks the apprentice once without demonstrations and retrieves by the keywords of its answer.

    Cache-of-Thought, 4.3.1: "what is in the image" says little, an answer says more, even a wrong
    one. It costs one call a query. The keywords stand behind the question, or with
    `keep_question=False` in its place, as the paper has it. An answer without keywords leaves the
    query as it is. Raises the generator's `GenerationError`.
    """

    def __init__(
        self,
        retrieve: Retriever,
        generator: Generator,
        prompt: Prompter,
        keyworder: Keyworder,
        *,
        keep_question: bool = True,
        sampling: Sampling | None = None,
    ) -> None:
        self._retrieve = retrieve
        self._generator = generator
        self._prompt = prompt
        self._keyworder = keyworder
        self._keep_question = keep_question
        self._sampling = sampling or Sampling(max_tokens=128)

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        reply = await self._generator.generate(self._prompt(query, ()), self._sampling)
        keywords = await self._keyworder(reply.completions[0].text)
        return await self._retrieve(self._probed(query, keywords), k)

    def _probed(self, query: Query, keywords: tuple[str, ...]) -> Query:
        if not keywords:
            return query
        said = ", ".join(keywords)
        kept = query.text if self._keep_question else ""
        return replace(query, text=f"{kept} {said}".strip())
