"""Evaluation runs of `eval` and `demo`: run the methods and report each result."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bottega._util.event_loops import run_closing
from bottega._util.executor import Actor, Executor, LocalExecutor
from bottega._util.locations import StoreLocation
from bottega._util.postgres import is_postgres_url
from bottega._util.progress import plural
from bottega._util.tracing import use_tracer
from bottega.cli.components import open_recorder
from bottega.cli.method_actor import ItemAnswer, MethodActor, MethodFactory
from bottega.cli.output import note, waiting, warn
from bottega.cli.shown_progress import CallCounter, progress
from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import KNOWLEDGE_BASE, LABELLED_IMAGES
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.image_limits import check_prompt_images, images_per_prompt
from bottega.evaluation.methods.planning import (
    check_benchmark_fit,
    max_calls,
    max_demonstrations,
    method_keys,
)
from bottega.evaluation.methods.specifications import METHODS
from bottega.evaluation.outcomes import Method, MethodKey, Outcome, ScoredAnswer
from bottega.evaluation.report.payload import keep_thumbnails
from bottega.evaluation.runs.paired import ScoredRun
from bottega.evaluation.runs.run_store import RunStore
from bottega.evaluation.runs.runner import RunState, evaluate
from bottega.generation import TransformersGenerator
from bottega.protocols import Generator, Recorder
from bottega.recipes import Classifier
from bottega.types import Query

WRONG = "none"  # value of --unparsable: an answer without a choice is wrong
MethodWorkers = Actor[tuple[MethodKey, int], ItemAnswer]


def check_output(path: Path | None) -> None:
    """Raise `SettingError` if the file cannot be written. Call it before expensive work."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SettingError(f"{path} is not writable", hint="set a file in an existing folder")


def run_methods(
    data: Benchmark,
    settings: Classifier,
    config: RunConfig,
    runs: list[ScoredRun],
    *,
    state: RunState,
    hyper: TransformersGenerator | None = None,
    traces: StoreLocation | None = None,
    drafts_file: Path | None = None,
    report: Callable[[str], None] = note,
    executor: Executor | None = None,
    remote: MethodFactory | None = None,
) -> None:
    """Run all methods. Each result is appended to `runs` when it is complete, so an error keeps the
    earlier ones. `report` receives one line per method. With `executor`, its workers answer with
    the actors of `remote`."""
    check_benchmark_fit(config, data)
    if executor is None:
        _check_images(data, config, settings.generator)
    if isinstance(state.store, RunStore):
        state.store.plan(method_keys(config, data))
    available = max_demonstrations(data)
    if max(config.shots) > available and any(METHODS[one].shots is None for one in config.methods):
        only = plural(available, "example")
        report(f"{max(config.shots)} shots requested; only {only} available")
    with open_recorder(traces) as record:
        if executor is None or remote is None:
            build = partial(MethodActor, data, settings, config)
            factory = partial(
                build, hyper=hyper, budget=state.budget, drafts_file=drafts_file, report=report
            )
            workers = LocalExecutor().start(factory, concurrency=config.concurrency)
        else:
            workers = executor.start(remote, concurrency=config.concurrency)
        methods = _methods(data, config, workers, record)
        counters = [
            CallCounter(
                max_calls(replace(config, methods=[m.name], shots=[m.shots]), data, settings)
            )
            for m in methods
        ]
        work = _run_all(data, methods, counters, config, state, runs, report)
        run_closing(work, workers)


def _check_images(data: Benchmark, config: RunConfig, generator: Generator) -> None:
    """Raise `SettingError` before the work if the model takes fewer images than its prompts have.
    Only loading a model tells its limit."""
    count = images_per_prompt(config.methods, config.shots, data)
    if count > 1 and isinstance(generator, TransformersGenerator) and not generator.turns_only:
        with waiting(f"loading {generator.name}"):
            asyncio.run(generator.load())
        check_prompt_images(count, generator.loaded, generator.name)


def _methods(
    data: Benchmark, config: RunConfig, workers: MethodWorkers, record: Recorder | None
) -> list[Method]:
    """Return the methods that the workers answer; this process records their traces."""
    index_of = {id(item.query): index for index, item in enumerate(data.items)}
    warned: set[str] = set()

    async def answer(key: MethodKey, query: Query) -> Outcome:
        answered = await workers((key, index_of[id(query)]))
        for error in answered.warnings:
            if str(error) not in warned:  # all workers embed the same examples
                warned.add(str(error))
                warn(error)
        if record is not None:
            for trace in answered.traces:
                await record(trace)
        return answered.outcome

    return [Method(*key, partial(answer, key)) for key in method_keys(config, data)]


async def _run_all(
    data: Benchmark,
    methods: Sequence[Method],
    counters: Sequence[CallCounter],
    config: RunConfig,
    state: RunState,
    runs: list[ScoredRun],
    report: Callable[[str], None],
) -> None:
    for method, calls in zip(methods, counters, strict=True):
        with (
            use_tracer(calls),
            progress(method.title, len(data.items), counts_money=True, calls=calls) as step,
        ):
            result, scored = await evaluate(
                data, method, config, state, done=lambda one: step(1, _cost(one))
            )
        runs.append((result, scored))
        value = "-" if result.value is None else f"{result.value:.3f}"
        cost = f", {result.cost_usd:.4f} USD" if result.cost_usd else ""
        report(f"{method.title}: {value} in {result.seconds:.1f} s{cost}")
        if isinstance(state.store, RunStore):
            await asyncio.to_thread(_store_thumbnails, state.store.path, data, method)


def _store_thumbnails(path: Path, data: Benchmark, method: Method) -> None:
    """Store thumbnails for the report. The measured times of the methods exclude this step."""
    started = time.perf_counter()
    with progress("thumbnails", None) as step:
        count = keep_thumbnails(path, data, method, progress=step, on_error=warn)
    if count:
        note(
            f"{plural(count, 'thumbnail')} for the report in {time.perf_counter() - started:.1f} s"
        )


def _cost(scored: ScoredAnswer | None) -> float:
    return 0.0 if scored is None else scored.cost_usd or 0.0


def with_options(benchmark: str, question: str | None, unparsable: str) -> str:
    """Return the benchmark specification with these options appended; K.db is a knowledge base."""
    own_file = benchmark.endswith(".db") and Path(benchmark).is_file()
    if own_file or is_postgres_url(benchmark):
        StoreLocation.from_argument(benchmark)
        benchmark = f"{KNOWLEDGE_BASE}:{benchmark}"
    kind = benchmark.partition(":")[0]
    if unparsable != WRONG:
        if kind != "mmmu":
            raise SettingError(
                f"--unparsable applies only to mmmu, got {benchmark}", hint="remove --unparsable"
            )
        benchmark = f"{benchmark},unparsable={unparsable}"
    if question is None:
        return benchmark
    if kind not in LABELLED_IMAGES:
        raise SettingError(
            f"{benchmark} has its own questions, got --question {question!r}",
            hint=f"remove --question, or use {' or '.join(LABELLED_IMAGES)}",
        )
    if ",question=" in benchmark:
        raise SettingError(
            f"{benchmark} already sets a question, got --question {question!r}",
            hint="remove one of the two questions",
        )
    return f"{benchmark},question={question}"
