"""Evaluation runs of `eval` and `demo`: run the methods, print their results."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from bottega.cli.components import open_recorder, open_retrieval, open_tokens
from bottega.cli.output import note, print_table, progress, say, warn
from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods import METHODS
from bottega.evaluation.outcomes import Method, ScoredAnswer
from bottega.evaluation.paired import PairedDifference
from bottega.evaluation.planning import check_benchmark_fit, max_demonstrations, needs_search, plan
from bottega.evaluation.report.payload import keep_thumbnails
from bottega.evaluation.retrieval import EXCLUSION_RULE, nearest_retriever
from bottega.evaluation.retriever_factory import (
    CachingEmbedder,
    RetrieverFactory,
    knowledge_views,
    retriever_factory,
)
from bottega.evaluation.run_store import RunStore
from bottega.evaluation.runner import Result, RunState, evaluate
from bottega.generation import TransformersGenerator
from bottega.knowledge import KnowledgeBase
from bottega.protocols import Generator
from bottega.recipes import Classifier, novelty_gate

COLUMNS = ("method", "shots", "n", "value", "low", "high", "invalid", "failed", "calls", "seconds")
PAIRED_FIELDS = ("method", "against", "shots", "n", "value", "low", "high", "p_value")
PAIRED_COLUMNS = ("method", "baseline", "shots", "n", "difference", "low", "high", "p_value")
PAIRED_TESTS = (
    "Newcombe's interval and McNemar's exact p-value for right or wrong answers, else the"
    " bootstrap's interval and a permutation test's p-value"
)
FOOTNOTE = "Invalid replies count as wrong; failed requests are excluded."

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
    report: Callable[[str], None] = note,
) -> None:
    """Run all methods; append each result when it is complete, so an error keeps the others.
    `report` gets one line per method."""
    check_benchmark_fit(config.methods, data, config.retrieve)
    available = max_demonstrations(data)
    if max(config.shots) > available:
        report(f"{max(config.shots)} shots requested; all {available} available examples are shown")
    embedder = None  # for methods that search nothing
    if needs_search(config.methods, data):
        check_images(data, config.retrieve)
        embedder = CachingEmbedder(open_retrieval(config.retrieve, config.embed))
    # Late interaction alone embeds the examples a second time.
    again = progress("embedding tokens", len(data.knowledge))
    with (
        open_recorder(traces) as record,
        filled_knowledge(data, embedder, config.retrieve) as knowledge,
    ):
        settings = replace(
            settings, labels=data.labels, multi_label=data.multi_label, record=record
        )
        with again if config.retrieve == "hybrid" else nullcontext() as step:
            search: RetrieverFactory = nearest_retriever
            if embedder is not None:
                search = retriever_factory(
                    config.retrieve,
                    embedder,
                    tokens=open_tokens(config.embed),
                    seed=config.seed,
                    progress=step,
                )
            gate = novelty_gate(settings.generator, knowledge) if embedder else None
            settings = replace(settings, shows=gate.shows if gate else None)
            methods = plan(config, data, knowledge, settings, search=search, hyper=hyper)
        models = [settings.generator, *([hyper] if hyper else [])]
        asyncio.run(_run_all(data, methods, models, config, state, runs, report))


def print_results(
    data: Benchmark, results: Sequence[Result], differences: Sequence[PairedDifference]
) -> None:
    """Print the results, further metrics and paired differences of a run."""
    if not results:
        return
    if data.labels:
        kind = f"{len(data.labels)} labels"
    elif any(item.query.choices for item in data.items):
        kind = "choices of each question"
    else:
        kind = "free answers"
    say(
        f"{data.name}: {len(data.knowledge)} labelled examples, {len(data.items)} evaluated items, "
        f"{kind}; {results[0].metric.replace('_', ' ')} with 95 % intervals"
    )
    say(EXCLUSION_RULE)
    if data.corrupted_count is not None:
        say(f"label noise: {data.corrupted_count} of {len(data.knowledge)} answers corrupted")
    print_table(COLUMNS, [[getattr(result, name) for name in COLUMNS] for result in results])
    also = [[r.method, r.shots, *vars(figure).values()] for r in results for figure in r.also]
    if also:
        say("\nfurther metrics, with 95 % intervals")
        print_table(("method", "shots", "metric", "value", "low", "high"), also)
    if differences:
        say(f"\npaired differences on the same items: {PAIRED_TESTS}")
        rows = [[getattr(one, name) for name in PAIRED_FIELDS] for one in differences]
        for row in rows:
            row[-1] = row[-1] if row[-1] >= 0.001 else "< 0.001"
        print_table(PAIRED_COLUMNS, rows)
    run = {result.method for result in results}
    notes = [spec.note for spec in METHODS.values() if spec.note and spec.name in run]
    note(" ".join([*notes, FOOTNOTE]))


def filled_knowledge(
    data: Benchmark, embedder: CachingEmbedder | None, retrieve: str
) -> KnowledgeBase:
    """Return the benchmark's knowledge base in memory; it is empty without an embedder.

    The items' questions are embedded in advance, in batches.
    """
    if embedder is None:
        return KnowledgeBase.open(":memory:", embed=None)
    knowledge = KnowledgeBase.open(":memory:", embed=knowledge_views(retrieve, embedder))
    with progress("embedding", len(data.knowledge) + len(data.items)) as step:
        knowledge.add(data.knowledge, progress=step, on_error=warn)
        embedder.embed([item.query for item in data.items])
        step(len(data.items))
    return knowledge


def check_images(data: Benchmark, retrieve: str) -> None:
    """Raise `SettingError` if retrieval by image meets questions or passages without one."""
    missing = sum(not e.query.images for e in (*data.knowledge, *data.items))
    if missing and retrieve == "image":
        raise SettingError(
            f"retrieval by image needs images, got {missing} questions or passages of {data.name}"
            " without one",
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
