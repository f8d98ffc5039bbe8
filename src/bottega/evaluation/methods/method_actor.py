"""Actor that answers the items of an evaluation by its methods, in this process or in a worker."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

from bottega._util.caching import SingleFlight
from bottega._util.identity import request_key
from bottega._util.progress import SILENT, Display, ReportStep, plural
from bottega.errors import BottegaError, SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import ANSWER_TOKENS, EvaluatedMetric, RunConfig
from bottega.evaluation.methods.planning import needs_search, plan
from bottega.evaluation.methods.prompts import NEAREST_LAST, check_prompt, open_prompt, parse_order
from bottega.evaluation.methods.retrieval import (
    SET_RETRIEVE,
    nearest_retriever,
    open_retrieval,
    retriever_factory,
)
from bottega.evaluation.methods.specifications import COMPRESSION_METHODS
from bottega.evaluation.outcomes import (
    Budget,
    CostLimitedGenerator,
    Method,
    MethodKey,
    Outcome,
    add_cost,
)
from bottega.generation import ReplayGenerator, TransformersGenerator
from bottega.knowledge import KnowledgeBase
from bottega.knowledge.embedders.names import BUNDLED
from bottega.naming import ModelSpec, local_model
from bottega.pipeline import run_sync
from bottega.protocols import Generator, Pricer, Prompter, Reranker, turns_only
from bottega.recipes import Classifier, default_prompter, demonstration_guard
from bottega.recipes.cache_retrieval import (
    BY_DRAFT,
    BY_IMAGE,
    BY_RESPONSE,
    CacheRetrieval,
    DraftModel,
)
from bottega.recipes.racc import bundled_compressor_for, compressor_loader
from bottega.recording import PriceTable
from bottega.reranking import LabelCoverageReranker, MMRReranker
from bottega.retrieval import tag_keywords
from bottega.types import Prompt, Reply, Sampling, Trace


@dataclass(frozen=True)
class ItemAnswer:
    """Outcome of an item, the traces to record, and the warnings since the actor's last answer."""

    outcome: Outcome
    traces: tuple[Trace, ...]
    warnings: tuple[BottegaError, ...] = ()


class TraceCollector:
    """Recorder that collects the traces of the current call."""

    def __init__(self) -> None:
        self._traces: ContextVar[list[Trace]] = ContextVar("traces")

    def start(self) -> list[Trace]:
        """Return the list that collects the traces of this call."""
        traces: list[Trace] = []
        self._traces.set(traces)
        return traces

    async def __call__(self, trace: Trace, /) -> None:
        self._traces.get().append(trace)


class MethodActor:
    """Methods of a run over its knowledge base. A call takes the key of a method and the index of
    a benchmark item.

    The constructor loads a given compressor, and embeds the knowledge base. `display` notes the
    cost of drafts at the end, and warns of examples that cannot be embedded; `warnings` are
    returned to the caller of a worker process with the next answer.
    """

    def __init__(
        self,
        data: Benchmark,
        settings: Classifier,
        config: RunConfig,
        *,
        hyper: TransformersGenerator | None = None,
        budget: Budget | None = None,
        drafts_file: Path | None = None,
        display: Display = SILENT,
        warnings: list[BottegaError] | None = None,
    ) -> None:
        self._items, self._note, self._retrieve = data.items, display.note, config.retrieve
        self._warnings = [] if warnings is None else warnings
        self._models = [settings.generator, *([hyper] if hyper else [])]
        self._collector = TraceCollector()
        _check_compressor(config, settings.generator, hyper, display)
        self._drafts = _drafts(config, settings, budget or Budget(), drafts_file)
        step: ReportStep | None = None  # of the second embedding, by late interaction alone
        again = display.progress("embedding tokens", len(data.knowledge))
        retrieval = None  # for methods that search nothing
        if needs_search(config.methods, data):
            check_images(data, config.retrieve)
            draft = None
            if self._drafts is not None:
                draft = DraftModel(self._drafts, _draft_prompt(data, settings), settings.sampling)
            retrieval = open_retrieval(
                config.retrieve,
                config.embed or BUNDLED,
                config.embed_text,
                questions=(example.query.text for example in data.knowledge),
                draft=draft,
                groups=config.groups,
                seed=config.seed,
                progress=lambda count: step(count) if step else None,
                display=display,
            )
            data = with_response_keywords(data, retrieval)
        settings = replace(
            settings, labels=data.labels, multi_label=data.multi_label, record=self._collector
        )
        self._knowledge = filled_knowledge(data, retrieval, config.metric or "cosine", display)
        try:
            with again if config.retrieve == "hybrid" else nullcontext() as step:
                methods = _planned(data, settings, config, retrieval, self._knowledge, hyper)
        except BaseException:
            self._knowledge.close()
            raise
        self._methods = {method.key: method for method in methods}

    async def __call__(self, item: tuple[MethodKey, int], /) -> ItemAnswer:
        key, index = item
        traces = self._collector.start()
        outcome = await self._methods[key].answer(self._items[index].query)
        warnings = tuple(self._warnings)
        del self._warnings[: len(warnings)]
        return ItemAnswer(outcome, tuple(traces), warnings)

    async def aclose(self) -> None:
        """Close the models and the knowledge base, and report the cost of drafts."""
        for model in self._models:
            await model.aclose()
        await asyncio.to_thread(self._knowledge.close)
        if (drafts := self._drafts) is not None:
            cost = "unknown" if drafts.cost_usd is None else f"{drafts.cost_usd:.4f} USD"
            self._note(
                f"drafts of {self._retrieve}: {plural(drafts.calls, 'call')}, {drafts.tokens}"
                f" tokens, cost {cost}; not included in the results of the methods"
            )


@dataclass(frozen=True)
class MethodFactory:
    """Factory of a `MethodActor` from names and settings, for workers in other processes.

    Raises `SettingError` for retrieval by drafts: workers share neither drafts nor a budget.
    """

    data: Benchmark = field(repr=False)
    config: RunConfig
    model: ModelSpec
    price: Pricer
    hyper: str | None

    def __post_init__(self) -> None:
        if self.config.retrieve in BY_DRAFT:
            raise SettingError(
                f"retrieval by {self.config.retrieve} drafts answers, which workers cannot share",
                hint="run without --on, or set another --retrieve",
            )

    def __call__(self) -> MethodActor:
        warnings: list[BottegaError] = []
        return MethodActor(
            self.data,
            open_classifier(self.config, self.model, self.price),
            self.config,
            hyper=None
            if self.hyper is None
            else local_model(self.hyper, self.model.trust_remote_code),
            display=Display(warn=warnings.append),
            warnings=warnings,
        )


def _check_compressor(
    config: RunConfig,
    generator: Generator,
    hyper: TransformersGenerator | None,
    display: Display,
) -> None:
    """Raise the errors of `CompressorLoader.open` before anything is embedded or answered."""
    if set(COMPRESSION_METHODS).isdisjoint(config.methods):
        return
    folder = config.compressor or bundled_compressor_for(generator)
    loader = compressor_loader(folder, generator, hyper=hyper, store=config.store)
    with display.waiting("loading the compressor"):
        run_sync(loader.open())


def _planned(
    data: Benchmark,
    settings: Classifier,
    config: RunConfig,
    retrieval: CacheRetrieval | None,
    knowledge: KnowledgeBase,
    hyper: TransformersGenerator | None,
) -> list[Method]:
    if retrieval is None:
        return plan(config, data, knowledge, settings, search=nearest_retriever, hyper=hyper)
    search = retriever_factory(retrieval)
    settings = replace(
        settings,
        guard=demonstration_guard(settings.generator, knowledge, multi_label=settings.multi_label),
        rerank=_reranker(config, settings, knowledge),
    )
    return plan(config, data, knowledge, settings, search=search, hyper=hyper)


def open_classifier(config: RunConfig, model: ModelSpec, price: Pricer) -> Classifier:
    """Return the settings of a classifier with this model."""
    classifier = Classifier(
        model.open(),
        labels=(),
        prompt=open_prompt(config.prompt),
        order=parse_order(config.order or NEAREST_LAST),
        price=price,
        seed=config.seed,
    )
    tokens = config.max_tokens or ANSWER_TOKENS
    sampling = replace(classifier.sampling, max_tokens=tokens, stop=config.stop)
    check_prompt(config.prompt, classifier.generator)
    return replace(classifier, sampling=sampling)


def _reranker(config: RunConfig, settings: Classifier, knowledge: KnowledgeBase) -> Reranker | None:
    """Return the re-ranker of --rerank, None for the nearest examples."""
    match config.rerank:
        case "cover":
            return LabelCoverageReranker(settings.order, seed=config.seed)
        case "mmr":
            return MMRReranker(knowledge.vectors, order=settings.order, seed=config.seed)
    return None


def _drafts(
    config: RunConfig, settings: Classifier, budget: Budget, file: Path | None
) -> DraftGenerator | None:
    """Return the model that drafts answers for the retrieval, within the budget of the run. Drafts
    are recorded in `file`, and not sent again."""
    if config.retrieve not in BY_DRAFT:
        return None
    price = settings.price or PriceTable()
    model: Generator = CostLimitedGenerator(settings.generator, budget, price)
    return DraftGenerator(model if file is None else ReplayGenerator(file, model), price)


def cost_of_drafts(file: Path, model: Generator, price: Pricer) -> float:
    """Return the known cost of recorded drafts in US dollars."""
    replies = ReplayGenerator(file, model).replies() if file.exists() else []
    return sum(price(one.model, one.usage) or 0.0 for one in replies)


def _draft_prompt(data: Benchmark, settings: Classifier) -> Prompter:
    own = None if turns_only(settings.generator) else data.prompt
    return settings.prompt or own or default_prompter(settings.generator)


def with_response_keywords(data: Benchmark, retrieval: CacheRetrieval) -> Benchmark:
    """Tag the labelled examples with the keywords of their responses if the retrieval compares
    them with those of a draft."""
    if retrieval.name not in set(BY_DRAFT) & set(BY_RESPONSE):
        return data
    tagged = asyncio.run(tag_keywords(data.knowledge, retrieval.extract))
    return replace(data, knowledge=tuple(tagged))


def filled_knowledge(
    data: Benchmark,
    retrieval: CacheRetrieval | None,
    metric: EvaluatedMetric = "cosine",
    display: Display = SILENT,
) -> KnowledgeBase:
    """Return the benchmark's knowledge base in memory; it is empty without a retrieval. The metric
    "fitted" is fitted to its labels.

    The items' questions are embedded in advance, in batches.
    """
    if retrieval is None:
        return KnowledgeBase.open(":memory:", embed=None)
    plain: EvaluatedMetric = "l2" if metric == "l2" else "cosine"
    knowledge = KnowledgeBase.open(":memory:", embed=retrieval.views(), metric=plain)
    with display.progress("embedding", len(data.knowledge) + len(data.items)) as step:
        knowledge.add(data.knowledge, progress=step, on_error=display.warn)
        queries = [item.query for item in data.items]
        retrieval.embedder.embed(queries)
        step(len(data.items))
    if metric == "fitted":
        evaluated = set(chain.from_iterable(map(knowledge.excluded_ids, queries)))
        if knowledge.fit_metric(without=evaluated) is None:
            display.note(
                "metric cosine: too few examples that are not evaluated share their label to fit a"
                " metric; --limit evaluates fewer"
            )
    return knowledge


def check_images(data: Benchmark, retrieve: str) -> None:
    """Raise `SettingError` if retrieval by image meets questions or passages without one."""
    missing = sum(not e.query.images for e in (*data.knowledge, *data.items))
    if missing and retrieve in BY_IMAGE:
        raise SettingError(
            f"retrieval by {retrieve} needs images, got {missing} questions or passages of"
            f" {data.name} without one",
            hint=f"{SET_RETRIEVE} text, dual or hybrid",
        )


class DraftGenerator:
    """Generator wrapper that answers each prompt once for all methods of a run.

    `calls`, `tokens` and `cost_usd` count the requests sent; the methods' own figures exclude
    drafts. `cost_usd` is None if the price is unknown.
    """

    def __init__(self, inner: Generator, price: Pricer | None = None) -> None:
        self._inner = inner
        self._price = price
        self._replies: dict[str, Reply] = {}
        self._flights: SingleFlight[str, Reply] = SingleFlight()
        self.name = inner.name
        self.turns_only = turns_only(inner)
        self.calls = self.tokens = 0
        self.cost_usd: float | None = 0.0

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        key = request_key(self.name, prompt, sampling)
        if (reply := self._replies.get(key)) is not None:
            return reply
        return await self._flights.run(key, partial(self._send, key, prompt, sampling))

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _send(self, key: str, prompt: Prompt, sampling: Sampling) -> Reply:
        reply = await self._inner.generate(prompt, sampling)
        cost = self._price(reply.model, reply.usage) if self._price else 0.0
        self.calls += 1
        self.tokens += reply.usage.prompt_tokens + reply.usage.completion_tokens
        self.cost_usd = add_cost(self.cost_usd, cost)
        self._replies[key] = reply
        return reply
