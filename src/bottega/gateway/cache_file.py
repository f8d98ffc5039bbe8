"""One namespace of the configured cache, with the pipeline that asks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

from bottega.errors import EmbedderMismatchError, SettingError
from bottega.gateway.metrics import Metrics
from bottega.gateway.namespaces import Opened
from bottega.gateway.routes import routed
from bottega.gateway.settings import Cache, Config
from bottega.gateway.tiers import Staff
from bottega.gateway.timing import TimedKeeper, TimedRetriever
from bottega.gateway.workshop import Workshop
from bottega.knowledge import (
    Eviction,
    KnowledgeBase,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    LeastSaving,
    Random,
)
from bottega.naming import NOTE, open_embedder
from bottega.parsing import plain_text
from bottega.protocols import Embedder, Retriever
from bottega.recipes import cache_of_thought
from bottega.recording import Remember
from bottega.reranking import Order, TopK
from bottega.retrieval import BM25, Dense
from bottega.types import Candidate, Query

CACHE = "cache.db"
EVICT: dict[str, Callable[[], Eviction]] = {
    "least-recent": LeastRecentlyUsed,
    "least-frequent": LeastFrequentlyUsed,
    "least-saving": LeastSaving,
    "random": Random,
}


class Near:
    """Leaves out what is less similar than `at_least`."""

    def __init__(self, retrieve: Retriever, at_least: float) -> None:
        self._retrieve, self._at_least = retrieve, at_least

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        return [one for one in await self._retrieve(query, k) if one.score >= self._at_least]


@dataclass
class CacheFile:
    """Opens namespaces, all of one file, all with one embedder."""

    config: Config
    staff: Staff
    metrics: Metrics

    @property
    def file(self) -> Path:
        return self.config.cache.file or self.config.gateway.data / CACHE

    @cached_property
    def embedder(self) -> Embedder:
        return open_embedder(self.config.cache.embed)

    def open(self, namespace: str) -> Opened:
        """Blocks; the first time while the embedder is loaded."""
        base = self._base(namespace)
        try:
            return self._workshop(base), base
        except BaseException:
            base.close()
            raise

    def _base(self, namespace: str) -> KnowledgeBase:
        cache = self.config.cache
        try:
            base = KnowledgeBase.open(
                self.file,
                self.embedder,
                capacity=cache.capacity,
                evict=EVICT[cache.evict]() if cache.capacity else None,
                namespace=namespace,
            )
        except EmbedderMismatchError as error:
            raise SettingError(
                f"{self.config.file}: cache.embed is {cache.embed!r}, and {self.file} was filled"
                f" with {error.stored!r}",
                hint=f"name that one, or bottega reindex {self.file} --embed {cache.embed}",
            ) from error
        if base.note(NOTE) is None:
            base.set_note(NOTE, cache.embed)
        return base

    def _workshop(self, base: KnowledgeBase) -> Workshop:
        cache, tiers = self.config.cache, self.staff.tiers
        found: Retriever = TimedRetriever(_retriever(cache, base), self.metrics.retrieval)
        route, escalate = routed(self.config.route, tiers, found, len(base))
        pipeline = cache_of_thought(
            base,
            tiers=tiers,
            route=route,
            escalate=escalate,
            retrieve=found if cache.at_least is None else Near(found, cache.at_least),
            rerank=TopK(cast(Order, cache.order)),
            parse=plain_text,
            reasoning=False,
            remember=False,
            price=self.staff.prices,
        )
        teachers = self.config.teachers
        keeper = Remember(base, teachers=teachers, longest=cache.longest)
        return Workshop(
            pipeline, TimedKeeper(keeper, self.metrics.store), teachers=frozenset(teachers)
        )


def _retriever(cache: Cache, base: KnowledgeBase) -> Retriever:
    return BM25(base) if cache.retrieve == "bm25" else Dense(base.search)
