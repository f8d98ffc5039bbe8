"""Evaluation runs of `eval` and `demo`: run the methods, print their results."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from bottega.cli.components import open_recorder, open_retrieval
from bottega.cli.output import Step, note, plural, progress, warn
from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.drafts import DraftGenerator
from bottega.evaluation.outcomes import BudgetedGenerator, Method, ScoredAnswer
from bottega.evaluation.planning import check_benchmark_fit, max_demonstrations, needs_search, plan
from bottega.evaluation.report.payload import keep_thumbnails
from bottega.evaluation.retrieval import nearest_retriever
from bottega.evaluation.retriever_factory import retriever_factory
from bottega.evaluation.run_store import RunStore
from bottega.evaluation.runner import Result, RunState, evaluate
from bottega.generation import ReplayGenerator, TransformersGenerator
from bottega.knowledge import KnowledgeBase
from bottega.knowledge.index import Metric
from bottega.protocols import Generator, Pricer, Prompter, Reranker, turns_only
from bottega.recipes import Classifier, default_prompter, novelty_gate
from bottega.recipes.cache_retrieval import (
    BY_DRAFT,
    BY_IMAGE,
    BY_RESPONSE,
    CacheRetrieval,
    DraftModel,
)
from bottega.recording import PriceTable
from bottega.reranking import LabelCoverageReranker, MMRReranker
from bottega.retrieval import tag_keywords

MethodResult = tuple[Result, list[ScoredAnswer]]


def check_output(path: Path | None) -> None:
    """Raise `SettingError` before the work if the file cannot be written."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SettingError(f"{path} is not writable", hint="set a file in an existing folder")


def run_methods(
    data: Benchmark,
    settings: Classifier,
    config: RunConfig,
    runs: list[MethodResult],
    *,
    state: RunState,
    hyper: TransformersGenerator | None = None,
    traces: Path | None = None,
    drafts_file: Path | None = None,
    report: Callable[[str], None] = note,
) -> None:
    """Run all methods; append each result when it is complete, so an error keeps the others.
    `report` gets one line per method."""
    check_benchmark_fit(config.methods, data, config.retrieve)
    available = max_demonstrations(data)
    if max(config.shots) > available:
        report(f"{max(config.shots)} shots requested; all {available} available examples are shown")
    drafts = _drafts(config, settings, state, drafts_file)
    draft = None
    if drafts is not None:
        draft = DraftModel(drafts, _draft_prompt(data, settings), settings.sampling)
    retrieval = None  # for methods that search nothing
    step: Step | None = None  # of the second embedding, by late interaction alone
    again = progress("embedding tokens", len(data.knowledge))
    if needs_search(config.methods, data):
        check_images(data, config.retrieve)
        retrieval = open_retrieval(
            config.retrieve,
            config.embed,
            config.embed_text,
            questions=(example.query.text for example in data.knowledge),
            draft=draft,
            groups=config.groups,
            seed=config.seed,
            progress=lambda count: step(count) if step else None,
        )
        data = with_response_keywords(data, retrieval)
    with (
        open_recorder(traces) as record,
        filled_knowledge(data, retrieval, config.metric) as knowledge,
    ):
        settings = replace(
            settings, labels=data.labels, multi_label=data.multi_label, record=record
        )
        with again if config.retrieve == "hybrid" else nullcontext() as step:
            search = retriever_factory(retrieval) if retrieval else nearest_retriever
            gate = novelty_gate(settings.generator, knowledge) if retrieval else None
            rerank = _reranker(config, settings, knowledge) if retrieval else None
            settings = replace(settings, shows=gate.shows if gate else None, rerank=rerank)
            methods = plan(config, data, knowledge, settings, search=search, hyper=hyper)
        models = [settings.generator, *([hyper] if hyper else [])]
        asyncio.run(_run_all(data, methods, models, config, state, runs, report))
    if drafts is not None:
        cost = "unknown" if drafts.cost_usd is None else f"{drafts.cost_usd:.4f} USD"
        report(
            f"drafts of {config.retrieve}: {plural(drafts.calls, 'call')}, {drafts.tokens} tokens,"
            f" cost {cost}; not in the figures of the methods"
        )


def _reranker(config: RunConfig, settings: Classifier, knowledge: KnowledgeBase) -> Reranker | None:
    """Return the re-ranker of --rerank, None for the nearest examples."""
    match config.rerank:
        case "cover":
            return LabelCoverageReranker(settings.order, seed=config.seed)
        case "mmr":
            return MMRReranker(knowledge.vectors, order=settings.order, seed=config.seed)
    return None


def _drafts(
    config: RunConfig, settings: Classifier, state: RunState, file: Path | None
) -> DraftGenerator | None:
    """Return the model that drafts answers for the retrieval, within the budget of the run. Drafts
    are recorded in `file`, and not sent again."""
    if config.retrieve not in BY_DRAFT:
        return None
    price = settings.price or PriceTable()
    model: Generator = BudgetedGenerator(settings.generator, state.budget, price)
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
    data: Benchmark, retrieval: CacheRetrieval | None, metric: Metric = "cosine"
) -> KnowledgeBase:
    """Return the benchmark's knowledge base in memory; it is empty without a retrieval.

    The items' questions are embedded in advance, in batches.
    """
    if retrieval is None:
        return KnowledgeBase.open(":memory:", embed=None)
    knowledge = KnowledgeBase.open(":memory:", embed=retrieval.views(), metric=metric)
    with progress("embedding", len(data.knowledge) + len(data.items)) as step:
        knowledge.add(data.knowledge, progress=step, on_error=warn)
        retrieval.embedder.embed([item.query for item in data.items])
        step(len(data.items))
    return knowledge


def check_images(data: Benchmark, retrieve: str) -> None:
    """Raise `SettingError` if retrieval by image meets questions or passages without one."""
    missing = sum(not e.query.images for e in (*data.knowledge, *data.items))
    if missing and retrieve in BY_IMAGE:
        raise SettingError(
            f"retrieval by {retrieve} needs images, got {missing} questions or passages of"
            f" {data.name} without one",
            hint="set --retrieve text, dual or hybrid",
        )


async def _run_all(
    data: Benchmark,
    methods: Sequence[Method],
    models: Sequence[Generator],
    config: RunConfig,
    state: RunState,
    runs: list[MethodResult],
    report: Callable[[str], None],
) -> None:
    try:
        for method in methods:
            with progress(method.title, len(data.items), counts_money=True) as step:
                result, scored = await evaluate(
                    data, method, config, state, done=lambda one: step(1, _cost(one))
                )
            runs.append((result, scored))
            value = "-" if result.value is None else f"{result.value:.3f}"
            cost = f", {result.cost_usd:.4f} USD" if result.cost_usd else ""
            report(f"{method.title}: {value} in {result.seconds:.1f} s{cost}")
            if isinstance(state.store, RunStore):
                await asyncio.to_thread(_keep_thumbnails, state.store.path, data, method)
    finally:
        for model in models:
            await model.aclose()


def _keep_thumbnails(path: Path, data: Benchmark, method: Method) -> None:
    """Store the thumbnails of the report; the results exclude this time."""
    started = time.perf_counter()
    with progress("thumbnails", None) as step:
        count = keep_thumbnails(path, data, method, progress=step, on_error=warn)
    if count:
        note(f"{count} thumbnails for the report in {time.perf_counter() - started:.1f} s")


def _cost(scored: ScoredAnswer | None) -> float:
    return 0.0 if scored is None else scored.cost_usd or 0.0
