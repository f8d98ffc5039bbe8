"""Caches of all namespaces, each with its pipeline."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import orjson

from bottega._util.locations import StoreLocation
from bottega.errors import (
    BottegaError,
    EmbedderMismatchError,
    NotFoundError,
    StoreError,
)
from bottega.gateway.accounting.ledger import Ledger, ShadowSample
from bottega.gateway.config.settings import Config, RouteSettings
from bottega.gateway.decode_budget import (
    BudgetedExampleWriter,
    BudgetedRetriever,
    DecodeBudget,
    FairSemaphore,
)
from bottega.gateway.drafts import DraftGenerator
from bottega.gateway.ports import RequestRecord, Tenant
from bottega.gateway.request_traces import RequestTraces
from bottega.gateway.running.cache_views import (
    PREPARED,
    cache_location,
    filled_with_error,
    prepare_views,
)
from bottega.gateway.running.tiers import TierSet
from bottega.gateway.state.gates import SharedGates
from bottega.gateway.telemetry.metrics import Metrics
from bottega.knowledge import (
    KnowledgeBase,
    TowerTokenEmbedder,
    View,
)
from bottega.knowledge.embedders.names import BUNDLED, NOTE, open_embedder, packaged_name
from bottega.knowledge.eviction import EVICTIONS
from bottega.knowledge.records import DEFAULT
from bottega.openai_api.fields import data_url_cache
from bottega.parsing import FinalAnswerParser, agreement, most_frequent
from bottega.pipeline import FixedRouter, Pipeline
from bottega.prompting import InterleavedPrompter
from bottega.protocols import Embedder, Escalation, Retriever, Router, Tier
from bottega.recipes import cache_of_thought, default_prompter, share_features
from bottega.recipes.cache_retrieval import (
    BY_DRAFT,
    BY_RESPONSE,
    TEXT_ONLY,
    CacheRetrieval,
    DraftModel,
)
from bottega.recording import CacheRecorder
from bottega.recording.recorders import Tagger
from bottega.reranking import GatedReranker, TopKReranker
from bottega.retrieval import (
    BM25Retriever,
    DenseRetriever,
    EmptyTolerantRetriever,
    SameContextFilter,
    SharedRetriever,
    tag_keywords,
)
from bottega.routing import (
    AgreementPair,
    BenefitGate,
    BudgetRouter,
    ColdStartRouter,
    ConfidenceEscalation,
    CoverageRouter,
    RandomRouter,
    ShadowSampler,
)
from bottega.types import Candidate, Example, Query


def build_router(
    route: RouteSettings,
    tiers: Sequence[Tier],
    retrieve: Retriever,
    held: int,
    claim: Callable[[], Awaitable[bool]] | None = None,
) -> tuple[Router, Escalation | None]:
    """Return the router and the escalation of one namespace, which share no state with other
    namespaces. Its cache has `held` examples, which count towards the cold start. `claim` counts
    queries across all gateways."""
    first = next((t for t in tiers if t.name == route.tier), tiers[0])
    router: Router = FixedRouter(replace(first, reason="fixed tier"))
    escalation = None
    match route.router:
        case "random":
            router = RandomRouter(tiers, route.master_rate or 0.0, route.seed)
        case "budget":
            assert route.usd_per_1k is not None
            router = BudgetRouter(tiers, route.usd_per_1k, seed=route.seed)
        case "coverage":
            least, share = route.min_similarity, route.master_rate
            router = CoverageRouter(tiers, retrieve, least, master_rate=share, seed=route.seed)
        case "confidence":
            assert route.min_confidence is not None
            router = FixedRouter(replace(first, reason="cheapest tier first"))
            escalation = ConfidenceEscalation(tiers, route.min_confidence)
    left = route.cold_start - held
    if left > 0:
        router = ColdStartRouter(left, tiers[-1], then=router, claim=claim)
    return router, escalation


log = logging.getLogger(__name__)

AGREES = 0.5


class SimilarityFilter:
    """Retriever wrapper that drops candidates less similar than `min_similarity`."""

    def __init__(self, retrieve: Retriever, min_similarity: float) -> None:
        self._retrieve, self._min_similarity = retrieve, min_similarity

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        return [one for one in await self._retrieve(query, k) if one.score >= self._min_similarity]


@dataclass
class NamespaceOpener:
    """Opener of namespaces, which share one file and one embedder. The state of their benefit gates
    is stored in the ledger."""

    config: Config
    tier_set: TierSet
    metrics: Metrics
    ledger: Ledger
    decoding: DecodeBudget
    traces: RequestTraces | None = None
    # Gates outlive open namespaces: a shadow call may end after its namespace was evicted.
    _gates: dict[str, BenefitGate] = field(default_factory=dict)
    shared_gates: SharedGates | None = None
    _logged: set[str] = field(default_factory=set)
    _prepared: bool = False  # whether the file has the views of this configuration

    @property
    def location(self) -> StoreLocation:
        return cache_location(self.config)

    @cached_property
    def embedder(self) -> Embedder:
        return open_embedder(self.config.cache.embed)

    @cached_property
    def views(self) -> dict[str, View]:
        if self.retrieval is None:
            return {DEFAULT: View(self.embedder)}
        return self.retrieval.views()

    @cached_property
    def retrieval(self) -> CacheRetrieval | None:
        """Retrieval method with its own views; None to search by `cache.embed` or by words."""
        cache, name = self.config.cache, self.config.cache.retrieve
        if name == "nearest" or name == "bm25":
            return None
        images = BUNDLED if cache.embed == "dual" else cache.embed  # the default contains words
        draft = None
        if name in BY_DRAFT:
            model = DraftGenerator(self.tier_set.served[0], data_url_cache())
            prompt = default_prompter(model) if model.turns_only else InterleavedPrompter()
            draft = DraftModel(model, prompt)
        return CacheRetrieval(
            name,
            image=None if name in TEXT_ONLY else open_embedder(images),
            text=None if name == "image" else open_embedder(cache.embed_text),
            tokens=TowerTokenEmbedder.bundled() if name == "hybrid" else None,
            draft=draft,
            groups=cache.groups,
        )

    def open(self, namespace: str) -> OpenNamespace:
        """Open a namespace. Blocks; the first call loads the embedder."""
        base = self._base(namespace)
        try:
            return self._tenant(base, namespace), base
        except BaseException:
            base.close()
            raise

    def record_shadow_sample(
        self, record: RequestRecord, similarity: float, pair: AgreementPair
    ) -> None:
        """Count and store a shadow sample, and the new state of a gate that is not shared."""
        namespace = record.namespace
        self.ledger.record_shadow(
            ShadowSample(
                time.time(), record.request_id, namespace, similarity, pair.shown, pair.hidden
            )
        )
        (self.metrics.agreed if pair.shown >= AGREES else self.metrics.differed).inc()
        if self.shared_gates is None:
            state = self._gates[namespace].state()
            self.ledger.set_gate(namespace, orjson.dumps(state).decode())

    def _base(self, namespace: str) -> KnowledgeBase:
        cache = self.config.cache
        try:
            if not self._prepared:
                prepare_views(self.location, self.views, self.retrieval)
                self._prepared = True
            base = KnowledgeBase.open(
                self.location.target,
                self.embedder if self.retrieval is None else self.views,
                capacity=cache.capacity,
                evict=EVICTIONS[cache.evict]() if cache.capacity else None,
                namespace=namespace,
                vectors=cache.vectors_url(os.environ),
            )
        except EmbedderMismatchError as error:
            stored = packaged_name(error.stored) or error.stored
            raise filled_with_error(self.config, stored) from error
        if base.note(NOTE) is None:
            base.set_note(PREPARED, cache.retrieve)
            name = packaged_name(base.embedder().fingerprint)
            base.set_note(NOTE, cache.embed if self.retrieval is None else name or "")
        return base

    def _tenant(self, base: KnowledgeBase, namespace: str) -> Tenant:
        config, stored_tiers = self.config, frozenset(self.config.stored_tiers)
        recorder = CacheRecorder(
            base,
            stored_tiers=stored_tiers,
            max_characters=config.cache.max_characters,
            tag=self._tagger(),
        )
        writer = BudgetedExampleWriter(recorder, self.decoding, self.metrics.store.time)
        # Shared by the router and the demonstrations: one search for both.
        found = self._search(base)
        for tier in self.tier_set.tiers:
            share_features(tier.generator, base)
        pipeline = self._pipeline(base, namespace, found)
        example = partial(_example, base)
        if not config.shadow.rate:
            return Tenant(
                pipeline, writer, stored_tiers, best=found.best, example=example, embed=base.embed
            )
        gate = self._gate(namespace)
        shadow = ShadowSampler(gate, agreement, rate=config.shadow.rate, eager=config.shadow.gate)
        if config.shadow.gate and not gate.is_measured and namespace not in self._logged:
            self._logged.add(namespace)
            log.info(
                "the gate of %r has too few samples: until it has enough, every answer of an"
                " apprentice is compared and no examples are shown",
                namespace,
            )
        assert pipeline.rerank is not None
        gated = replace(pipeline, rerank=GatedReranker(pipeline.rerank, gate.shows))
        return Tenant(
            gated if config.shadow.gate else pipeline,
            writer,
            stored_tiers,
            shadow,
            ungated=pipeline,
            charge=getattr(pipeline.route, "charge", None),
            best=found.best,
            example=example,
            embed=base.embed,
        )

    def _search(self, base: KnowledgeBase) -> SharedRetriever:
        search: Retriever = DenseRetriever(partial(base.search, exclude="same-question"))
        if self.retrieval is not None:
            search = self.retrieval.retriever(base)
        if self.config.cache.retrieve == "bm25":
            search = BM25Retriever(base, exclude="same-question")
        # One search for all: routers, demonstrations, searches and passages.
        max_shots = max(1, *(one.max_candidates for one in self.tier_set.served))
        budgeted = BudgetedRetriever(search, self.decoding, self.metrics.retrieval.time)
        return SharedRetriever(EmptyTolerantRetriever(SameContextFilter(budgeted)), min_k=max_shots)

    def _tagger(self) -> Tagger | None:
        """Return the function that tags answers with their keywords, if searches compare them."""
        if self.retrieval is None or self.retrieval.name not in BY_RESPONSE:
            return None
        return partial(tag_keywords, extractor=self.retrieval.extract)

    def _pipeline(self, base: KnowledgeBase, namespace: str, found: SharedRetriever) -> Pipeline:
        config, tiers = self.config, self.tier_set.tiers
        cache = config.cache
        claim = self._cold_start_claim(namespace, len(base))
        route, escalate = build_router(config.route, tiers, found, len(base), claim)
        retrieve: Retriever = found
        if cache.min_similarity is not None:
            retrieve = SimilarityFilter(found, cache.min_similarity)
        pipeline = cache_of_thought(
            base,
            tiers=tiers,
            route=route,
            escalate=escalate,
            retrieve=retrieve,
            rerank=TopKReranker(cache.order or "nearest-last"),
            parse=FinalAnswerParser(),
            reasoning=False,
            remember=False,
            price=self.tier_set.prices,
            record=None if self.traces is None else self.traces.recorder(namespace),
        )
        if config.route.samples is not None:
            pipeline = replace(pipeline, choose=most_frequent)
        return pipeline

    def _cold_start_claim(self, namespace: str, held: int) -> Callable[[], Awaitable[bool]] | None:
        tables, limit = self.ledger.tables, self.config.route.cold_start
        if tables is None:
            return None

        async def claim() -> bool:
            try:
                return await asyncio.to_thread(tables.claim_cold_start, namespace, held, limit)
            except StoreError as error:
                log.warning(
                    "a cold-start query cannot be counted and is routed as usual: %s", error
                )
                return False

        return claim

    def _gate(self, namespace: str) -> BenefitGate:
        if self.shared_gates is not None:
            return self.shared_gates.open(namespace)
        if namespace not in self._gates:
            gate = self._gates[namespace] = BenefitGate()
            if (state := self.ledger.gate(namespace)) is not None:
                try:
                    gate.restore(orjson.loads(state))
                except (BottegaError, ValueError) as error:
                    log.warning("the gate of %r starts again without samples: %s", namespace, error)
        return self._gates[namespace]


def _example(base: KnowledgeBase, id: str) -> Example | None:
    """Return the example, None if it was deleted, evicted or replaced by a newer answer."""
    try:
        return base.get(id)
    except NotFoundError:
        return None


OpenNamespace = tuple[Tenant, KnowledgeBase]


class NamespacePool:
    """Pool of at most `limit` open namespaces. The least recently used one is evicted, and closed
    once no request holds its tenant. `open_one` blocks and runs in a thread, one call at a time:
    this loads an embedder only once. Clients take turns, so a client that opens many namespaces
    does not delay the others."""

    def __init__(self, open_one: Callable[[str], OpenNamespace], limit: int) -> None:
        self._open_one = open_one
        self._limit = limit
        self._opened: OrderedDict[str, asyncio.Future[OpenNamespace]] = OrderedDict()
        self._endings: list[weakref.finalize[..., Tenant]] = []
        self._turns = FairSemaphore(1, 1)
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="bottega-open")
        self._closer = ThreadPoolExecutor(1, thread_name_prefix="bottega-close")
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self, namespace: str, /) -> Tenant:
        """Return the tenant of a namespace. Raises `StoreError`; the next call tries again."""
        return (await self._open(namespace))[0]

    def base(self, namespace: str) -> KnowledgeBase:
        """Return the gateway's own knowledge base. Call it from a thread other than the event
        loop's. Blocks. Raises `StoreError`."""
        if self._loop is None:
            raise StoreError("the gateway is still starting", hint="try again in a moment")
        return asyncio.run_coroutine_threadsafe(self._open(namespace), self._loop).result()[1]

    def call_soon(self, work: Callable[[], None]) -> None:
        """Schedule work on the event loop, from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(work)

    async def _open(self, namespace: str) -> OpenNamespace:
        self._loop = asyncio.get_running_loop()
        found = self._opened.get(namespace)
        if found is None:
            found = asyncio.ensure_future(self._open_in_turn(namespace))
            found.add_done_callback(lambda done: self._on_opened(namespace, done))
            # Before the first await: concurrent requests share this opening.
            self._opened[namespace] = found
        self._opened.move_to_end(namespace)
        return await asyncio.shield(found)  # a client that leaves must not cancel it for others

    async def _open_in_turn(self, namespace: str) -> OpenNamespace:
        await self._turns.acquire(1)
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._opener, self._open_one, namespace)
        finally:
            self._turns.release(1)

    def counts(self) -> dict[str, int]:
        """Return the number of examples of each open namespace. Blocks."""
        # A copy: this runs in a thread while the event loop changes the dict.
        done = {name: one.result() for name, one in list(self._opened.items()) if one.done()}
        return {name: len(base) for name, (_, base) in done.items()}

    async def aclose(self) -> None:
        """Close all namespaces, even those that a request still uses. Stored examples are
        durable."""
        # A thread that opens a namespace cannot be stopped: wait, then close what it opened.
        await asyncio.gather(*self._opened.values(), return_exceptions=True)
        self._opened.clear()
        for ending in self._endings:
            ending()
        await asyncio.to_thread(self._closer.shutdown)
        self._opener.shutdown(wait=False)

    def _on_opened(self, namespace: str, done: asyncio.Future[OpenNamespace]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._opened.pop(namespace, None)  # the next request tries again
            return
        tenant, base = done.result()
        # Requests hold the tenant, so its end is the first moment when nothing reads the base.
        ending = weakref.finalize(tenant, self._closer.submit, _close, base, namespace)
        ending.atexit = False  # the executor accepts no work at exit
        self._endings = [*(one for one in self._endings if one.alive), ending]
        while len(self._opened) > self._limit:
            self._opened.popitem(last=False)


def _close(base: KnowledgeBase, namespace: str) -> None:
    try:
        base.close()
    except Exception:
        log.exception("closing the cache of the namespace %r failed", namespace)
