"""What RACC is compared with, beside showing passages one after the other (`concat`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bottega.generation import OpenAICompatible
from bottega.pipeline import Pipeline
from bottega.protocols import Generator, Reranker, Searcher
from bottega.recipes import reusing
from bottega.reranking import JointChoice
from bottega.types import Candidate, Found, Query

CANDIDATES, REUSED = "candidates", "kv-reuse"
BASELINES = (CANDIDATES, REUSED)


def baseline(name: str, pipeline: Pipeline, generator: Generator) -> Pipeline:
    """The pipeline with one of `BASELINES` in place of showing passages together. Raises
    `SettingError` for a generator that cannot do it."""
    search = _search(name, pipeline, generator)
    if name == REUSED and pipeline.rerank is not None:
        search = InOrder(pipeline.rerank, search)
    return replace(pipeline, search=search)


@dataclass(frozen=True)
class InOrder:
    """A search whose passages stand as the re-ranker puts them, as `concat` shows them."""

    rerank: Reranker
    within: Searcher

    async def search(self, query: Query, candidates: Sequence[Candidate], k: int, /) -> Found:
        return await self.within.search(query, await self.rerank(query, candidates, k), k)


def _search(name: str, pipeline: Pipeline, generator: Generator) -> Searcher:
    prompt, parse, sampling = pipeline.prompt, pipeline.parse, pipeline.sampling
    if name == REUSED:
        return reusing(generator, prompt=prompt, parse=parse, sampling=sampling)
    if isinstance(generator, OpenAICompatible):
        generator = generator.asking({"logprobs": True})  # which is off unless asked for
    return JointChoice(generator, prompt=prompt, parse=parse, sampling=sampling)
