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
    Escalation,
    Parser,
    Pricer,
    Prompter,
    Recorder,
    Reranker,
    Retriever,
    Router,
    Searcher,
    Tier,
)
from bottega.types import Answer, Candidate, Query, Reply, Sampling, SearchResult, Trace, Usage

T = TypeVar("T")


@dataclass(frozen=True)
class Pipeline:
    """`fetch` candidates are retrieved for the re-ranker to choose from (default: as many as are
    shown). `choices` are given to queries that bring none. Of the answers in a reply of several
    completions `choose` makes one; the first, if not told otherwise. `escalate` may send a query
    on to another tier after an answer. `tiers` are those that can be asked for by name. A `search`
    stands in for all from re-ranking to parsing, for tiers that are shown demonstrations."""

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
    escalate: Escalation | None = None
    tiers: tuple[Tier, ...] = ()
    search: Searcher | None = None

    async def answer(self, query: Query) -> Answer:
        return (await self.trace(query)).answer

    def answer_sync(self, query: Query) -> Answer:
        """`answer` for code without an event loop. Inside one, await `answer` instead."""
        return _run(self.answer(query))

    async def trace(self, query: Query) -> Trace:
        """Answers the query and returns all that happened, after it was recorded."""
        started, clock = time.time(), time.perf_counter()
        # A copy even where nothing changes: `retrieval.SharedRetriever` goes by the object.
        query = replace(query, choices=query.choices or self.choices)
        tier, dismissed, spent = await self.route(query), list[Reply](), list[Reply]()
        while True:
            found = await self._found(query, tier)
            spent.append(replace(found.reply, usage=_usage(found)))
            better = await self.escalate(query, tier, found.answer) if self.escalate else None
            if better is None:
                break
            dismissed.append(found.reply)
            tier = better
        trace = Trace(
            id=uuid.uuid4().hex[:16],
            time=started,
            query=query,
            tier=tier.name,
            candidates=found.shown,
            prompt=found.prompt,
            reply=found.reply,
            answer=found.answer,
            seconds=time.perf_counter() - clock,
            cost_usd=self._cost(spent),
            dismissed=tuple(dismissed),
            tree=found.tree,
        )
        if self.record is not None:
            await self.record(trace)
        return trace

    async def _found(self, query: Query, tier: Tier) -> SearchResult:
        if self.search is not None and self.retrieve is not None and tier.shots:
            candidates = await self.retrieve(query, self.fetch or tier.shots)
            return await self.search.search(query, candidates, tier.shots)
        shown = await self.demonstrations(query, tier)
        prompt = (tier.prompt or self.prompt)(query, shown)
        reply = await tier.generator.generate(prompt, tier.sampling or self.sampling)
        answer = self.choose([self.parse(query, one) for one in reply.completions])
        return SearchResult(tuple(shown), prompt, reply, answer)

    async def demonstrations(self, query: Query, tier: Tier) -> list[Candidate]:
        """What this tier is shown with the query, in order."""
        if self.retrieve is None or tier.shots == 0:
            return []
        candidates = await self.retrieve(query, self.fetch or tier.shots)
        if self.rerank is None:
            return candidates[: tier.shots]
        return await self.rerank(query, candidates, tier.shots)

    def _cost(self, replies: Sequence[Reply]) -> float | None:
        if self.price is None:
            return None
        costs = [self.price(reply.model, reply.usage) for reply in replies]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if len(known) == len(costs) else None


def _usage(found: SearchResult) -> Usage:
    return found.reply.usage if found.tree is None else found.tree.usage


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    work.close()
    raise SettingError(
        "answer_sync was called inside a running event loop", hint="await pipeline.answer(query)"
    )
