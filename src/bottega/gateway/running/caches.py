"""Caches of all namespaces, each with its pipeline, and the pool of those that are open."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import orjson

from bottega._util.caching import FairSemaphore
from bottega._util.locations import StoreLocation
from bottega.errors import BottegaError, EmbedderMismatchError, NotFoundError, StoreError
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import JUDGE_VERSION, ShadowSample
from bottega.gateway.config.gateway_settings import Config, RouteSettings
from bottega.gateway.config.routing_settings import Retrieve
from bottega.gateway.ports import RequestRecord, Tenant
from bottega.gateway.request.completion import RequestDraftGenerator
from bottega.gateway.request.reading import BudgetedExampleWriter, BudgetedRetriever, DecodeBudget
from bottega.gateway.request.request_traces import RequestTraces
from bottega.gateway.running.cache_views import (
    PREPARED,
    Retrievals,
    cache_location,
    filled_with_error,
    prepare_views,
)
from bottega.gateway.running.tiers import TierSet, confidence_fields
from bottega.gateway.state.gates import SharedGates
from bottega.gateway.telemetry.metrics import Metrics
from bottega.knowledge import KnowledgeBase
from bottega.knowledge.embedders.names import IMAGE_ONLY, NOTE, packaged_name, parts_read
from bottega.knowledge.eviction import EVICTIONS
from bottega.openai_api.request import data_url_cache
from bottega.parsing import FinalAnswerParser, decided_agreement, most_frequent
from bottega.pipeline import FixedRouter, Pipeline
from bottega.prompting import InterleavedPrompter
from bottega.protocols import Escalation, Retriever, Router, Tier
from bottega.recipes import cache_of_thought, default_prompter, share_features
from bottega.recipes.cache_retrieval import BY_QUESTION, DraftModel
from bottega.recording import CacheRecorder
from bottega.reranking import GatedReranker, TopKReranker
from bottega.retrieval import EmptyTolerantRetriever, SameContextFilter, SharedRetriever
from bottega.retrieval.retrievers import SameTextFilter, SimilarityFilter, UnreadFilter
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
from bottega.types import Example, Query

log = logging.getLogger(__name__)

WITHOUT_CANDIDATES = "none"  # retrieval of a sample without candidates
OpenNamespace = tuple[Tenant, KnowledgeBase]

Claim = Callable[[], Awaitable[bool]]


def build_router(
    route: RouteSettings, tiers: Sequence[Tier], retrieve: Retriever, claim: Claim, left: int
) -> tuple[Router, Escalation | None]:
    """Return the router and the escalation of one namespace and variant. They share only the cold
    start with others: `claim` counts its queries, at most `left` more."""
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
    if left > 0:
        router = ColdStartRouter(left, tiers[-1], then=router, claim=claim)
    return router, escalation


@dataclass(frozen=True)
class NamespaceParts:
    """Parts of a namespace that all variants share: its examples, one search per retrieval method,
    their writer, and the cold start."""

    name: str
    base: KnowledgeBase
    searches: Mapping[str, SharedRetriever]
    writer: BudgetedExampleWriter
    claim: Claim
    cold_start_left: int


@dataclass
class NamespaceOpener:
    """Opener of namespaces, which share one file and the embedders. The state of their benefit
    gates is stored in the ledger."""

    config: Config
    tier_set: TierSet
    metrics: Metrics
    ledger: Ledger
    decoding: DecodeBudget
    traces: RequestTraces | None = None
    # Gates outlive open namespaces: a shadow call may end after its namespace was evicted.
    _gates: dict[tuple[str, str], BenefitGate] = field(default_factory=dict)
    shared_gates: SharedGates | None = None
    _logged: set[str] = field(default_factory=set)
    _prepared: bool = False  # whether the file has the views of this configuration

    @property
    def location(self) -> StoreLocation:
        return cache_location(self.config)

    @cached_property
    def retrievals(self) -> Retrievals:
        """Methods of [cache] and of the variants. Blocks while it loads their embedders."""
        return Retrievals(
            self.config.cache, (one.cache.retrieve for one in self._variants.values()), self._draft
        )

    @cached_property
    def _variants(self) -> dict[str, Config]:
        """Configurations of the variants by id."""
        variants = self.config.experiment.variants
        return {id: self.config.of_variant(one) for id, one in variants.items()}

    def _draft(self) -> DraftModel:
        model = RequestDraftGenerator(self.tier_set.served[0], data_url_cache())
        prompt = default_prompter(model) if model.turns_only else InterleavedPrompter()
        return DraftModel(model, prompt)

    def open(self, namespace: str) -> OpenNamespace:
        """Open a namespace. Blocks; the first call loads the embedder."""
        base = self._base(namespace)
        try:
            return self._tenant(base, namespace), base
        except BaseException:
            base.close()
            raise

    def record_shadow_sample(
        self, record: RequestRecord, similarity: float | None, pair: AgreementPair, sampled: bool
    ) -> None:
        """Count and store a shadow sample, and the new state of a gate that is not shared. Without
        candidates there is no similarity, and no gate learns from the sample."""
        namespace = record.namespace
        config = self._variants.get(record.variant, self.config)
        retrieve = WITHOUT_CANDIDATES if similarity is None else config.cache.retrieve
        scores = similarity or 0.0, pair.shown, pair.hidden
        self.ledger.record_shadow(
            ShadowSample(
                *(time.time(), record.request_id, namespace, *scores),
                retrieve=retrieve,
                sampled=sampled,
                was_shown=pair.was_shown,
                judge=JUDGE_VERSION if pair.judged else 0,
            )
        )
        if sampled:
            self.metrics.compared[pair.served] += 1
        if self.shared_gates is None and similarity is not None:
            state = self._gates[namespace, retrieve].state()
            self.ledger.set_gate(namespace, retrieve, orjson.dumps(state).decode())

    def _base(self, namespace: str) -> KnowledgeBase:
        cache, main = self.config.cache, self.retrievals.main
        try:
            if not self._prepared:
                prepare_views(self.location, self.retrievals)
                self._prepared = True
            base = KnowledgeBase.open(
                self.location.target,
                self.retrievals.embed,
                metric="cosine",  # the thresholds of routes and gates are plain cosines
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
            base.set_note(NOTE, cache.embed if main.parts is None else name or "")
        return base

    def _tenant(self, base: KnowledgeBase, namespace: str) -> Tenant:
        """Return the tenant for requests outside of an experiment, with its variants. Each variant
        has its own router; variants with the same retrieval method share a search."""
        config = self.config
        recorder = CacheRecorder(
            base,
            stored_tiers=frozenset(config.stored_tiers),
            max_characters=config.cache.max_characters,
            tag=self.retrievals.tagger,
        )
        for tier in self.tier_set.tiers:
            share_features(tier.generator, base)
        left = max(0, config.route.cold_start - len(base))
        parts = NamespaceParts(
            namespace,
            base,
            {
                name: self._search(name, one.retriever(base))
                for name, one in self.retrievals.methods.items()
            },
            BudgetedExampleWriter(recorder, self.decoding, self.metrics.store.time),
            self._cold_start_claim(namespace, len(base), left),
            left,
        )
        variants = {id: self._view(parts, one) for id, one in self._variants.items()}
        return replace(self._view(parts, config), variants=variants)

    def _view(self, parts: NamespaceParts, config: Config) -> Tenant:
        """Return the tenant with the retrieval and the router of a configuration."""
        pipeline = self._pipeline(parts, config)
        tenant = Tenant(
            pipeline,
            parts.writer,
            frozenset(config.stored_tiers),
            best=parts.searches[config.cache.retrieve].best,
            example=partial(_example, parts.base),
            embed=parts.base.embed,
            can_embed=self._can_embed,
            confidence_fields=confidence_fields(config),
        )
        if not config.shadow.rate:
            return tenant
        gate = self._gate(parts.name, config.cache.retrieve)
        rate, eager = config.shadow.rate, config.shadow.gate
        shadow = ShadowSampler(gate, decided_agreement, rate=rate, eager=eager)
        if config.shadow.gate and not gate.is_measured and parts.name not in self._logged:
            self._logged.add(parts.name)
            log.info(
                "the gate of %r has too few samples: until it has enough, every answer of an"
                " apprentice is compared and no examples are shown",
                parts.name,
            )
        assert pipeline.rerank is not None
        gated = replace(pipeline, rerank=GatedReranker(pipeline.rerank, gate.shows))
        return replace(
            tenant,
            pipeline=gated if config.shadow.gate else pipeline,
            shadow=shadow,
            ungated=pipeline,
            charge=getattr(pipeline.route, "charge", None),
        )

    def _can_embed(self, query: Query) -> bool:
        # Methods without parts of their own embed by `cache.embed`, also if they search by words.
        by_images = parts_read(self.config.cache.embed) == IMAGE_ONLY
        return bool(query.images) or not by_images or self.retrievals.main.parts is not None

    def _search(self, name: Retrieve, search: Retriever) -> SharedRetriever:
        # One search for all: routers, demonstrations, searches and passages.
        max_shots = max(1, *(one.max_candidates for one in self.tier_set.served))
        budgeted = BudgetedRetriever(search, self.decoding, self.metrics.retrieval.time)
        found: Retriever = EmptyTolerantRetriever(SameContextFilter(budgeted))
        if name not in BY_QUESTION:
            found = UnreadFilter(found, replace(self.config.cache, retrieve=name).reads)
        return SharedRetriever(found, min_k=max_shots)

    def _pipeline(self, parts: NamespaceParts, config: Config) -> Pipeline:
        cache, tiers = config.cache, self.tier_set.tiers
        found = parts.searches[cache.retrieve]
        claim, left = parts.claim, parts.cold_start_left
        compared: Retriever = UnreadFilter(found, cache.reads)
        if "text" not in cache.reads:
            compared = SameTextFilter(found)
        route, escalate = build_router(config.route, tiers, compared, claim, left)
        retrieve: Retriever = found
        if cache.min_similarity is not None:
            retrieve = SimilarityFilter(found, cache.min_similarity)
        pipeline = cache_of_thought(
            parts.base,
            tiers=tiers,
            route=route,
            escalate=escalate,
            retrieve=retrieve,
            rerank=TopKReranker(cache.order or "nearest-last"),
            parse=FinalAnswerParser(),
            reasoning=False,
            remember=False,
            price=self.tier_set.prices,
            record=None if self.traces is None else self.traces.recorder(parts.name),
        )
        if config.route.samples is not None:
            pipeline = replace(pipeline, choose=most_frequent)
        return pipeline

    def _cold_start_claim(self, namespace: str, held: int, left: int) -> Claim:
        """Return the function that counts a query of the cold start, of all variants and, with a
        shared ledger, of all gateways. Examples that the cache holds count, too."""
        shared, limit = self.ledger.shared, self.config.route.cold_start
        numbers = iter(range(left))

        async def claim() -> bool:
            if shared is None:
                return next(numbers, None) is not None
            try:
                return await asyncio.to_thread(shared.claim_cold_start, namespace, held, limit)
            except StoreError as error:
                log.warning(
                    "a cold-start query cannot be counted and is routed as usual: %s", error
                )
                return False

        return claim

    def _gate(self, namespace: str, retrieve: str) -> BenefitGate:
        if self.shared_gates is not None:
            return self.shared_gates.open(namespace, retrieve)
        key = namespace, retrieve
        if key not in self._gates:
            gate = self._gates[key] = BenefitGate()
            if (state := self.ledger.gate(namespace, retrieve)) is not None:
                try:
                    gate.restore(orjson.loads(state))
                except (BottegaError, ValueError) as error:
                    log.warning("the gate of %r starts again without samples: %s", namespace, error)
        return self._gates[key]


def _example(base: KnowledgeBase, id: str) -> Example | None:
    """Return the example, None if it was deleted, evicted or replaced by a newer answer."""
    try:
        return base.get(id)
    except NotFoundError:
        return None


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
        self._turns = FairSemaphore(1)
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="bottega-open")
        self._closer = ThreadPoolExecutor(1, thread_name_prefix="bottega-close")
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self, namespace: str, /) -> Tenant:
        """Return the tenant of a namespace. Raises `StoreError`; the next call tries again."""
        return (await self._open(namespace))[0]

    def base(self, namespace: str) -> KnowledgeBase:
        """Return the gateway's own knowledge base, which stays open while the caller holds it. Call
        it from a thread other than the event loop's. Blocks. Raises `StoreError`."""
        if self._loop is None:
            raise StoreError("the gateway is still starting", hint="try again in a moment")
        opening = asyncio.run_coroutine_threadsafe(self._open(namespace), self._loop)
        tenant, base = opening.result()
        # The tenant holds the base: a reference back would be a cycle, which ends much later.
        held = copy(base)
        vars(held)["tenant"] = tenant
        return held

    def call_soon(self, work: Callable[[], None]) -> None:
        """Schedule work on the event loop, from any thread; do nothing once it is closed."""
        if self._loop is not None and not self._loop.is_closed():
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
        async with self._turns.hold():
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._opener, self._open_one, namespace)

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
        await asyncio.sleep(0)  # until all closings are submitted
        await asyncio.to_thread(self._closer.shutdown)
        self._opener.shutdown(wait=False)

    def _on_opened(self, namespace: str, done: asyncio.Future[OpenNamespace]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._opened.pop(namespace, None)  # the next request tries again
            return
        tenant, base = done.result()
        # Requests hold the tenant, so its end is the first moment when nothing reads the base.
        ending = weakref.finalize(tenant, self._close_soon, base, namespace)
        ending.atexit = False  # the executor accepts no work at exit
        self._endings = [*(one for one in self._endings if one.alive), ending]
        while len(self._opened) > self._limit:
            self._opened.popitem(last=False)

    def _close_soon(self, base: KnowledgeBase, namespace: str) -> None:
        # Garbage collection may call this anywhere, also within the `submit` of a pool, whose lock
        # is not reentrant.
        self.call_soon(lambda: self._submit_closing(base, namespace))

    def _submit_closing(self, base: KnowledgeBase, namespace: str) -> None:
        self._closer.submit(_close, base, namespace)


def _close(base: KnowledgeBase, namespace: str) -> None:
    try:
        base.close()
    except Exception:
        log.exception("closing the cache of the namespace %r failed", namespace)
