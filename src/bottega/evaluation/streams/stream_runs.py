"""Streams of Cache-of-Thought: tiers answer items in order and fill a cache (section 6.2)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from bottega._util.event_loops import for_each
from bottega.errors import BottegaError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods import votes
from bottega.evaluation.outcomes import Method, Outcome, ScoredAnswer, pipeline_method
from bottega.evaluation.runs.runner import AnswerStore, RunState, evaluate
from bottega.evaluation.streams.growing_cache import StreamResult
from bottega.evaluation.streams.stream_plan import UNLIMITED, Curve, RouterName, Start, Stream
from bottega.knowledge import KnowledgeBase
from bottega.knowledge.eviction import EVICTIONS
from bottega.knowledge.index.vector_index import VectorMetric
from bottega.pipeline import FixedRouter, Pipeline
from bottega.protocols import Pricer, Retriever, Router, Tier
from bottega.recipes import cache_of_thought
from bottega.recipes.cache_retrieval import BY_RESPONSE, CacheRetrieval, RetrievalName
from bottega.recording.recorders import Tagger
from bottega.retrieval import (
    EmptyTolerantRetriever,
    HashtagRetriever,
    ResponseProbeRetriever,
    tag_keywords,
)
from bottega.routing import ColdStartRouter, CoverageRouter, RandomRouter
from bottega.types import Candidate, Example, Query, Sampling


@dataclass(frozen=True)
class StreamSetup:
    """Parts that all streams of a run share.

    `tiers` are ordered from cheapest to most expensive, the last one is the master. `corpus` holds
    the master's answers to the labelled questions; a warm start loads all of them, a cold start a
    sample of `cold`. `orders` holds permutations of the item indices. `retrievals` maps names to
    the retrieval methods of the curves.
    """

    data: Benchmark
    tiers: Sequence[Tier]
    retrievals: Mapping[RetrievalName, CacheRetrieval]
    orders: Sequence[Sequence[int]]
    corpus: Sequence[Example] = ()
    cold: int = 0
    router: RouterName = "coin"
    capacity: int | None = None
    metric: VectorMetric = "cosine"
    sampling: Sampling | None = None
    price: Pricer | None = None
    seed: int = 0

    @property
    def master(self) -> Tier:
        return self.tiers[-1]

    def pipeline(
        self,
        cache: KnowledgeBase,
        route: Router | Callable[[Sequence[Tier]], Router],
        retrieve: Retriever | None = None,
        *,
        remember: bool = True,
        tag: Tagger | None = None,
    ) -> Pipeline:
        """Return the pipeline that queries the tiers and stores the master's answers."""
        return cache_of_thought(
            cache,
            tiers=self.tiers,
            route=route,
            retrieve=retrieve,
            labels=self.data.labels,
            parse=self.data.parse,
            price=self.price,
            sampling=self.sampling,
            remember=remember,
            tag=tag,
        )

    def open_cache(self, curve: Curve) -> KnowledgeBase:
        """Return the cache at the start of a stream, in memory. Blocks."""
        evict = None if curve.evict == UNLIMITED else EVICTIONS[curve.evict]()
        cache = KnowledgeBase.open(
            ":memory:",
            self.retrievals[curve.retrieve].views(),
            metric=self.metric,
            capacity=self.capacity if evict else None,
            evict=evict,
        )
        if curve.control != "no-cache":
            cache.add(self._loaded(curve.start))
        return cache

    def tagger(self, curve: Curve) -> Tagger | None:
        """Return the function that tags answers with their keywords, if the retrieval compares
        them."""
        retrieval = self.retrievals[curve.retrieve]
        if retrieval.name not in BY_RESPONSE:
            return None
        return partial(tag_keywords, extractor=retrieval.extract)

    def _loaded(self, start: Start) -> Sequence[Example]:
        if start == "cold":
            corpus, rng = list(self.corpus), random.Random(self.seed)
            return rng.sample(corpus, min(self.cold, len(corpus)))
        return self.corpus if start == "warm" else ()


async def run_streams(
    setup: StreamSetup,
    streams: Sequence[Stream],
    *,
    concurrency: int,
    store: AnswerStore | None = None,
    done: Callable[[ScoredAnswer | None], None] = lambda scored: None,
    finished: Callable[[Stream, StreamResult], None] = lambda stream, result: None,
) -> dict[Stream, StreamResult]:
    """Run the streams that the store lacks, `concurrency` at a time; the models batch their
    requests.

    An interrupted stream runs again from its start: its replies must be recorded
    (`ReplayGenerator`), or they are requested again. `done` receives each answer, stored ones
    included, and None for each failure; `finished` receives each complete stream. Raises the first
    error that would affect every item.
    """
    store = store or AnswerStore()
    results: dict[Stream, StreamResult] = {}

    async def run(stream: Stream) -> None:
        order = setup.orders[stream.order - 1]
        scored = stored_stream(store, setup, stream)
        if len(scored) < len(order):
            # Answers of an interrupted run had another cache after a failed item.
            await store.forget((stream.name, setup.tiers[0].shots))
            scored = await _run_stream(setup, stream, _OrderedStore(store, order), done)
        else:
            for one in scored:
                done(one)
        results[stream] = StreamResult(tuple(scored), len(order))
        finished(stream, results[stream])

    await for_each(streams, run, limit=concurrency)
    return {stream: results[stream] for stream in streams}


def stored_stream(store: AnswerStore, setup: StreamSetup, stream: Stream) -> list[ScoredAnswer]:
    """Return the stored answers of a stream in its order."""
    answered = store.answered((stream.name, setup.tiers[0].shots), setup.data.items)
    order = setup.orders[stream.order - 1]
    return [
        replace(answered[index], index=position)
        for position, index in enumerate(order)
        if index in answered
    ]


async def _run_stream(
    setup: StreamSetup,
    stream: Stream,
    store: AnswerStore,
    done: Callable[[ScoredAnswer | None], None],
) -> list[ScoredAnswer]:
    order = setup.orders[stream.order - 1]
    data = replace(setup.data, items=tuple(setup.data.items[index] for index in order))
    if (tag := setup.tagger(stream.curve)) is not None:
        setup = replace(setup, corpus=await tag(setup.corpus))
    cache = await asyncio.to_thread(setup.open_cache, stream.curve)
    with closing(cache):
        method = _method(setup, stream, cache)
        # Each answer is cached before the next item.
        config = RunConfig(concurrency=1, round_size=1)
        _, scored = await evaluate(data, method, config, RunState(store), done=done)
    return scored


def _method(setup: StreamSetup, stream: Stream, cache: KnowledgeBase) -> Method:
    curve = stream.curve
    retrieve = SynchronousRetriever(setup.retrievals[curve.retrieve].retriever(cache))
    route = _route(setup, stream, retrieve)
    shown: Retriever = retrieve
    if curve.control == "random":
        shown = RandomRetriever(cache, setup.seed + stream.order)
    if curve.control == "no-cache":
        shown = EmptyRetriever()
    tag = setup.tagger(curve)
    pipeline = setup.pipeline(cache, route, shown, remember=curve.control != "no-cache", tag=tag)
    name, shots = stream.name, setup.tiers[0].shots
    if curve.control != "vote":
        return pipeline_method(name, pipeline, shots)
    return Method(name, shots, _Voter(pipeline, EmptyTolerantRetriever(retrieve), setup.master))


def _route(
    setup: StreamSetup, stream: Stream, retrieve: Retriever
) -> Callable[[Sequence[Tier]], Router]:
    """Return the router of a stream. Streams of one order and rate share the coin's seed."""
    seed, rate = 1_000 * setup.seed + stream.order, stream.rate

    def route(tiers: Sequence[Tier]) -> Router:
        if rate in (0, 1):
            return FixedRouter(tiers[-1] if rate else tiers[0])
        if setup.router == "coverage" and stream.curve.control != "no-cache":
            tolerant = EmptyTolerantRetriever(retrieve)
            return CoverageRouter(tiers, tolerant, master_rate=rate, seed=seed)
        if setup.router == "half-first" and stream.curve.control != "no-cache":
            items = len(setup.data.items)
            first = round(rate * items / 2)
            then = RandomRouter(tiers, first / (items - first), seed)
            return ColdStartRouter(first, tiers[-1], then=then)
        return RandomRouter(tiers, rate, seed)

    return route


@dataclass(frozen=True)
class _Voter:
    """Answers of a stream whose apprentice is a vote of its demonstrations."""

    pipeline: Pipeline
    retrieve: Retriever
    master: Tier

    async def __call__(self, query: Query) -> Outcome:
        tier = await self.pipeline.route(query)
        if tier.name == self.master.name:
            trace = await replace(self.pipeline, route=FixedRouter(tier)).trace(query)
            return Outcome(trace.answer, trace)
        return Outcome(votes.vote(await self.retrieve(query, tier.shots)))


class _OrderedStore(AnswerStore):
    """Store of one stream, which keeps answers by the items' own indices.

    It returns no answers: a stream always runs from its start, because its cache and its router
    depend on all earlier answers.
    """

    def __init__(self, inner: AnswerStore, order: Sequence[int]) -> None:
        self._inner = inner
        self._order = order

    async def keep(self, method: Method, scored: ScoredAnswer, outcome: Outcome) -> None:
        index = self._order[scored.index]
        await self._inner.keep(method, replace(scored, index=index), outcome)

    async def fail(self, method: Method, index: int, error: BottegaError) -> None:
        await self._inner.fail(method, self._order[index], error)


@dataclass(frozen=True)
class SynchronousRetriever:
    """Retriever wrapper that waits until the background has rebuilt the groups, so results do not
    depend on the machine's speed."""

    retrieve: Retriever

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        found = await self.retrieve(query, k)
        inner: object = self.retrieve
        if isinstance(inner, ResponseProbeRetriever):
            inner = inner.retrieve
        if isinstance(inner, HashtagRetriever):
            await inner.settled()
        return found


class RandomRetriever:
    """Retriever of random examples from the current cache, without the query's own question. Equal
    sequences of calls return equal examples."""

    def __init__(self, cache: KnowledgeBase, seed: int) -> None:
        self._cache = cache
        self._rng = random.Random(seed)

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        ids = await asyncio.to_thread(self._others, query)
        chosen = self._rng.sample(ids, min(k, len(ids)))
        return [Candidate(one, 0.0) for one in self._cache.get_many(chosen)]

    def _others(self, query: Query) -> list[str]:
        """Return the ids without those of the query's own question."""
        own = self._cache.excluded_ids(query, "same-question")
        return [id for id in self._cache.ids() if id not in own]


class EmptyRetriever:
    """Retriever without results."""

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        return []
