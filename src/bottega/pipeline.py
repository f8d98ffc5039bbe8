"""The order, and nothing else: routed, retrieved, re-ranked, prompted, generated, parsed, recorded.

The pipeline is given a `Query`. Gold answers live in `Example`s, so they cannot reach it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, TypeVar

from bottega.errors import SettingError
from bottega.protocols import (
    Parser,
    Pricer,
    Prompter,
    Recorder,
    Reranker,
    Retriever,
    Router,
    Tier,
)
from bottega.types import Answer, Candidate, Query, Sampling, Trace

T = TypeVar("T")


@dataclass(frozen=True)
class Pipeline:
    """`fetch` candidates are retrieved for the re-ranker to choose from (default: as many as are
    shown). `choices` are given to queries that bring none. Of the answers in a reply of several
    completions `choose` makes one; the first, if not told otherwise."""

    route: Router
    prompt: Prompter
    parse: Parser
    retrieve: Retriever | None = None
    rerank: Reranker | None = None
    record: Recorder | None = None
    price: Pricer | None = None
    sampling: Sampling = field(default_factory=Sampling)
    choices: tuple[str, ...] = ()
    fetch: int | None = None
    choose: Callable[[Sequence[Answer]], Answer] = itemgetter(0)

    async def answer(self, query: Query) -> Answer:
        return (await self.trace(query)).answer

    def answer_sync(self, query: Query) -> Answer:
        """`answer` for code without an event loop. Inside one, await `answer` instead."""
        return _run(self.answer(query))

    async def trace(self, query: Query) -> Trace:
        """Answers the query and returns all that happened, after it was recorded."""
        started, clock = time.time(), time.perf_counter()
        query = query if query.choices else replace(query, choices=self.choices)
        tier = await self.route(query)
        shown = await self._demonstrations(query, tier)
        prompt = self.prompt(query, shown)
        reply = await tier.generator.generate(prompt, self.sampling)
        trace = Trace(
            id=uuid.uuid4().hex[:16],
            time=started,
            query=query,
            tier=tier.name,
            candidates=tuple(shown),
            prompt=prompt,
            reply=reply,
            answer=self.choose([self.parse(query, one) for one in reply.completions]),
            seconds=time.perf_counter() - clock,
            cost_usd=self.price(reply.model, reply.usage) if self.price else None,
        )
        if self.record is not None:
            await self.record(trace)
        return trace

    async def _demonstrations(self, query: Query, tier: Tier) -> list[Candidate]:
        if self.retrieve is None or tier.shots == 0:
            return []
        candidates = await self.retrieve(query, self.fetch or tier.shots)
        if self.rerank is None:
            return candidates[: tier.shots]
        return await self.rerank(query, candidates, tier.shots)


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    work.close()
    raise SettingError(
        "answer_sync was called inside a running event loop", hint="await pipeline.answer(query)"
    )
