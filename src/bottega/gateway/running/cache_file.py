"""The configured cache: its namespaces, each with the pipeline that asks it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import cast

import orjson

from bottega.errors import (
    BottegaError,
    EmbedderMismatchError,
    NotFoundError,
    SettingError,
    StoreBusyError,
)
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.config.settings import Cache, Config
from bottega.gateway.decoding import BudgetedKeeper, BudgetedRetriever, DecodeBudget
from bottega.gateway.door import Progress
from bottega.gateway.running.namespaces import Opened
from bottega.gateway.running.routes import routed
from bottega.gateway.running.tiers import Staff
from bottega.gateway.telemetry.metrics import Metrics
from bottega.gateway.upstreams.timing import TimedKeeper, TimedRetriever
from bottega.gateway.workshop import Pair, Workshop
from bottega.knowledge import (
    Eviction,
    KnowledgeBase,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    LeastSaving,
    Random,
)
from bottega.naming import NOTE, open_embedder
from bottega.parsing import FinalAnswerParser, agreement, most_frequent
from bottega.pipeline import Pipeline
from bottega.protocols import Embedder, Retriever
from bottega.recipes import cache_of_thought
from bottega.recording import Remember
from bottega.reranking import Gated, Order, TopK
from bottega.retrieval import BM25, Alike, Dense, Shared, UnlessEmpty
from bottega.routing import BenefitGate, Shadow
from bottega.types import Candidate, Example, Query

log = logging.getLogger(__name__)

CACHE = "cache.db"
AGREES = 0.5
FIRST_MEASURED = (
    "the gate of %r has too few samples: every answer of an apprentice is compared until it has"
    " enough, and no examples are shown until then"
)
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
    """Opens namespaces, all of one file, all with one embedder. What shadow samples have taught
    the gates is in the ledger, and outlives the process."""

    config: Config
    staff: Staff
    metrics: Metrics
    ledger: Ledger
    decoding: DecodeBudget
    _gates: dict[str, BenefitGate] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    @property
    def file(self) -> Path:
        return self.config.cache.file or self.config.gateway.data / CACHE

    @cached_property
    def embedder(self) -> Embedder:
        return open_embedder(self.config.cache.embed)

    def check(self) -> None:
        """Raises `StoreError` for a file that waiting makes no cache, before anything is loaded."""
        if not self.file.is_file() or not self.file.stat().st_size:  # as a kill may leave it
            return
        with suppress(StoreBusyError):  # there will be another try when it is needed
            KnowledgeBase.open(self.file, None).close()

    def open(self, namespace: str) -> Opened:
        """Blocks; the first time while the embedder is loaded."""
        base = self._base(namespace)
        try:
            return self._workshop(base, namespace), base
        except BaseException:
            base.close()
            raise

    def measured(self, progress: Progress, similarity: float, pair: Pair) -> None:
        """A shadow sample: counted, and kept with what its gate knows now."""
        namespace, gate = progress.namespace, self._gates[progress.namespace]
        self.ledger.note_shadow(
            namespace, similarity, pair.shown, pair.hidden, time.time(), progress.request_id
        )
        (self.metrics.agreed if pair.shown >= AGREES else self.metrics.differed).inc()
        self.ledger.set_gate(namespace, orjson.dumps(gate.state()).decode())

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

    def _workshop(self, base: KnowledgeBase, namespace: str) -> Workshop:
        config, teachers = self.config, frozenset(self.config.teachers)
        keeper = Remember(base, teachers=teachers, longest=config.cache.longest)
        timed = BudgetedKeeper(TimedKeeper(keeper, self.metrics.store), self.decoding)
        # The router and the demonstrations look for the same.
        found = self._search(base)
        pipeline = self._pipeline(base, found)
        example = partial(_example, base)
        if not config.shadow.rate:
            return Workshop(pipeline, timed, teachers, best=found.best, example=example)
        gate = self._gate(namespace)
        shadow = Shadow(gate, agreement, rate=config.shadow.rate, eager=config.shadow.gate)
        if config.shadow.gate and not gate.is_measured and namespace not in self._told:
            self._told.add(namespace)
            log.info(FIRST_MEASURED, namespace)
        assert pipeline.rerank is not None
        gated = replace(pipeline, rerank=Gated(pipeline.rerank, gate.shows))
        shown = gated if config.shadow.gate else pipeline
        charge = getattr(pipeline.route, "charge", None)
        return Workshop(
            shown,
            timed,
            teachers,
            shadow,
            ungated=pipeline,
            charge=charge,
            best=found.best,
            example=example,
        )

    def _search(self, base: KnowledgeBase) -> Shared:
        timed = TimedRetriever(_retriever(self.config.cache, base), self.metrics.retrieval)
        most = max(1, *(tier.shots for tier in self.staff.tiers))
        budgeted = BudgetedRetriever(timed, self.decoding)
        return Shared(UnlessEmpty(Alike(budgeted)), least=most)

    def _pipeline(self, base: KnowledgeBase, found: Shared) -> Pipeline:
        config, tiers = self.config, self.staff.tiers
        cache = config.cache
        route, escalate = routed(config.route, tiers, found, len(base))
        pipeline = cache_of_thought(
            base,
            tiers=tiers,
            route=route,
            escalate=escalate,
            retrieve=found if cache.at_least is None else Near(found, cache.at_least),
            rerank=TopK(cast(Order, cache.order)),
            parse=FinalAnswerParser(),
            reasoning=False,
            remember=False,
            price=self.staff.prices,
        )
        if config.route.samples is not None:
            pipeline = replace(pipeline, choose=most_frequent)
        return pipeline

    def _gate(self, namespace: str) -> BenefitGate:
        if namespace not in self._gates:
            gate = self._gates[namespace] = BenefitGate()
            if (state := self.ledger.gate(namespace)) is not None:
                try:
                    gate.restore(orjson.loads(state))
                except (BottegaError, ValueError) as error:
                    log.warning("the gate of %r measures anew: %s", namespace, error)
        return self._gates[namespace]


def _example(base: KnowledgeBase, id: str) -> Example | None:
    """Return the example, None if it was deleted, evicted or replaced by a newer answer."""
    try:
        return base.get(id)
    except NotFoundError:
        return None


def _retriever(cache: Cache, base: KnowledgeBase) -> Retriever:
    if cache.retrieve == "bm25":
        return BM25(base, exclude="same-question")
    return Dense(partial(base.search, exclude="same-question"))
