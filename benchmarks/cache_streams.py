"""Parts of the Cache-of-Thought experiments: models with recorded replies, filled caches and
streams.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bottega import (
    Candidate,
    DenseRetriever,
    DualEmbedder,
    Example,
    InterleavedPrompter,
    KnowledgeBase,
    LabelParser,
    Pipeline,
    Query,
    ReplayGenerator,
    Sampling,
    Tier,
    TokenEmbedder,
    TowerEmbedder,
    bundled,
    cache_of_thought,
)
from bottega.evaluation import votes
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.outcomes import Method, Outcome, pipeline_method
from bottega.evaluation.retriever_factory import CachingEmbedder
from bottega.evaluation.streams import StreamResult, stream
from bottega.knowledge import View
from bottega.pipeline import FixedRouter
from bottega.protocols import Generator, Retriever, Router, Vectors
from bottega.retrieval import (
    CrossModalRetriever,
    EmptyTolerantRetriever,
    HashtagRetriever,
    HashtagTree,
    LeaveOneOutGroupCount,
    ResponseProbeRetriever,
    TfidfKeywordExtractor,
)
from bottega.retrieval.keywords import response_text
from bottega.routing import ColdStartRouter, CoverageRouter, RandomRouter

APPRENTICE, MASTER = "apprentice", "master"
BRIEF = InterleavedPrompter(show_choices=False, repeat_question=False)
GREEDY = Sampling(max_tokens=64)
Retrieving = Callable[[KnowledgeBase], Retriever]
Routing = Callable[[KnowledgeBase, Sequence[Tier]], Router]


class ModelPool:
    """Both models and the embedders. Replies are stored by prompt content: greedy decoding answers
    equal prompts equally in every stream.
    """

    def __init__(self, folder: Path) -> None:
        models = [bundled(name, max_batch=64) for name in (APPRENTICE, MASTER)]
        self.apprentice: Generator = _Brief(folder / "apprentice.jsonl", models[0])
        self.master: Generator = _Brief(folder / "master.jsonl", models[1])
        self.image = CachingEmbedder(TowerEmbedder.bundled(threads=1))
        self.text = CachingEmbedder(TokenEmbedder.bundled())
        self.dual = DualEmbedder(self.image, self.text)

    def views(self) -> dict[str, View]:
        """Return the cached sides of Table 1. `alone` is the image in the space of `dual`."""
        return {
            "dual": View(self.dual),
            "image": View(self.image),
            "alone": View(self.dual, lambda example: replace(example.query, text="")),
            "response": View(
                self.dual, lambda example: replace(example.query, text=response_text(example))
            ),
        }

    def open(self, warm: Sequence[Example] = (), views: Sequence[str] = ("dual",)) -> KnowledgeBase:
        """Open a cache in memory with these answers of the master."""
        every = self.views()
        cache = KnowledgeBase.open(":memory:", {name: every[name] for name in views})
        if warm:
            cache.add(warm)
        return cache

    def hashtags(self, cache: KnowledgeBase) -> Retriever:
        """Group demonstrations and queries by counts of the cache alone. The paper uses keywords of
        responses; this apprentice cannot give any before it has seen examples.
        """
        vectors = partial(cache.vectors, by="dual")
        tree = HashtagTree(LeaveOneOutGroupCount(vectors, self._responses(cache)))
        search = partial(cache.search, by="dual")
        return SettledIndex(HashtagRetriever(cache.changes, vectors, self.dual, search, tree))

    def _responses(self, cache: KnowledgeBase) -> Callable[[Sequence[str]], Vectors]:
        return lambda ids: self.text.embed(
            [Query(response_text(one)) for one in cache.get_many(ids)]
        )


class _Brief(ReplayGenerator):
    """Generator that accepts only turns, as the bundled models do."""

    turns_only = True


@dataclass(frozen=True)
class Setting:
    """Benchmark with the settings of its streams. `shots` and `retrieve` were tuned on other
    seeds."""

    spec: str
    shots: int
    view: str
    rates: tuple[int, ...]
    seeds: tuple[int, ...]
    items: int | None = None

    @property
    def views(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.view, "dual")))

    def load(self, seed: int) -> Benchmark:
        return load_benchmark(self.spec, seed=seed, limit=self.items)

    def dense(self, cache: KnowledgeBase) -> Retriever:
        return DenseRetriever(partial(cache.search, by=self.view))


class SettledIndex:
    """Retriever that waits for groups rebuilt in the background, so results do not depend on the
    machine's speed.
    """

    def __init__(self, retrieve: HashtagRetriever) -> None:
        self._retrieve = retrieve

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        found = await self._retrieve(query, k)
        await self._retrieve.settled()
        return found


class RandomRetriever:
    """Retriever of random demonstrations from the current cache."""

    def __init__(self, cache: KnowledgeBase, seed: int) -> None:
        self._cache = cache
        self._rng = random.Random(seed)

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        ids = self._cache.ids()
        chosen = self._rng.sample(ids, min(k, len(ids)))
        return [Candidate(one, 0.0) for one in self._cache.get_many(chosen)]


class EmptyRetriever:
    """Retriever without results: a cheaper model without a cache."""

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        return []


async def with_master_answers(
    models: ModelPool, examples: Iterable[Example], labels: Sequence[str]
) -> list[Example]:
    """Return the questions with the master's answers instead of the gold ones, as a prefilled cache
    holds them. Questions without a master's answer are left out.
    """
    queries = [example.query for example in examples]
    with closing(models.open()) as cache:
        ask = pipeline(models, cache, lambda tiers: FixedRouter(tiers[-1]), labels=labels)
        await asyncio.gather(*map(ask.answer, queries))
        return list(cache)


def pipeline(
    models: ModelPool,
    cache: KnowledgeBase,
    route: Router | Callable[[Sequence[Tier]], Router],
    *,
    retrieve: Retriever | None = None,
    shots: int = 0,
    labels: Sequence[str] = (),
) -> Pipeline:
    return cache_of_thought(
        cache,
        master=models.master,
        apprentice=models.apprentice,
        shots=shots,
        route=route,
        retrieve=retrieve,
        labels=labels,
        sampling=GREEDY,
        parse=LabelParser(),
    )


async def run_stream(
    models: ModelPool,
    setting: Setting,
    data: Benchmark,
    route: Routing,
    warm: Sequence[Example] = (),
    retrieving: Retrieving | None = None,
) -> StreamResult:
    """Run one stream with its own cache; the apprentice sees the demonstrations of `retrieving`."""
    with closing(models.open(warm, setting.views)) as cache:
        answers = pipeline(
            models,
            cache,
            lambda tiers: route(cache, tiers),
            retrieve=(retrieving or setting.dense)(cache),
            shots=setting.shots,
            labels=data.labels,
        )
        return await stream(data, pipeline_method("cached", answers, setting.shots))


async def run_votes(
    models: ModelPool,
    setting: Setting,
    data: Benchmark,
    route: Routing,
    warm: Sequence[Example] = (),
) -> StreamResult:
    """Run the same stream without an apprentice: a vote of its demonstrations answers."""
    with closing(models.open(warm, setting.views)) as cache:
        answers = pipeline(models, cache, lambda tiers: route(cache, tiers), labels=data.labels)
        retrieve = setting.dense(cache)

        async def answer(query: Query) -> Outcome:
            tier = await answers.route(query)
            if tier.name == MASTER:
                by_master = replace(answers, route=FixedRouter(tier))
                trace = await by_master.trace(query)
                return Outcome(trace.answer, trace)
            found = await retrieve(query, setting.shots) if len(cache) else []
            return Outcome(votes.vote(found))

        return await stream(data, Method("vote", setting.shots, answer))


def coin_router(rate: int, seed: int) -> Routing:
    """Return the paper's coin; `rate` is the apprentice's share in percent."""
    return lambda cache, tiers: RandomRouter(tiers, 1 - rate / 100, seed)


def half_first(rate: int, seed: int, items: int) -> Routing:
    """Return a router with the same budget and an empty cache: the first queries go to the master
    until half of its share is spent, then a coin decides.
    """
    first = round((1 - rate / 100) * items / 2)

    def route(cache: KnowledgeBase, tiers: Sequence[Tier]) -> Router:
        return ColdStartRouter(
            first, tiers[-1], then=RandomRouter(tiers, first / (items - first), seed)
        )

    return route


def coverage_router(setting: Setting, rate: int, seed: int) -> Routing:
    """Return a router with the same budget and an empty cache that sends the least covered queries
    to the master.
    """

    def route(cache: KnowledgeBase, tiers: Sequence[Tier]) -> Router:
        retrieve = EmptyTolerantRetriever(setting.dense(cache))
        return CoverageRouter(tiers, retrieve, master_rate=1 - rate / 100, seed=seed)

    return route


def table_one(models: ModelPool, corpus: Sequence[Example]) -> dict[str, Retrieving]:
    """Return the rows of Table 1 that the bundled parts support, as "cached side | query's
    side"."""
    words = TfidfKeywordExtractor((response_text(one) for one in corpus), longest=1)

    def by(view: str, cache: KnowledgeBase) -> Retriever:
        return DenseRetriever(partial(cache.search, by=view))

    def probed(retrieve: Retriever) -> Retriever:
        return ResponseProbeRetriever(
            retrieve, models.apprentice, BRIEF, words, keep_question=False, sampling=GREEDY
        )

    return {
        "image \\| image": partial(by, "image"),
        "image \\| image + first answer": lambda cache: probed(
            CrossModalRetriever(models.dual, partial(cache.nearest, by="alone"))
        ),
        "image + response \\| image + first answer": lambda cache: probed(by("response", cache)),
        "image + question \\| image + question": partial(by, "dual"),
        "hierarchical": models.hashtags,
    }
