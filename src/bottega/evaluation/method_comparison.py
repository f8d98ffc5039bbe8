"""Comparison of methods on a benchmark: what `bottega eval` runs, also for Python and the demo."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from bottega._util.event_loops import run_closing
from bottega._util.executor import Actor, Executor, LocalExecutor
from bottega._util.locations import StoreLocation
from bottega._util.progress import SILENT, Display, ReportStep, plural
from bottega.errors import BottegaError, NoticeError, OnError, SettingError
from bottega.evaluation.benchmark import Benchmark, fingerprint, with_synonyms
from bottega.evaluation.benchmarks.loading import (
    KNOWLEDGE_BASE,
    OWN_DATA,
    load_benchmark,
    with_label_noise,
)
from bottega.evaluation.benchmarks.passages import with_passages
from bottega.evaluation.config import (
    ANSWER_TOKENS,
    SEARCH_SHOTS,
    SHOTS,
    EvaluatedMetric,
    RunConfig,
    parse_shots,
)
from bottega.evaluation.knowledge_rows import check_filled, chosen, embedder_spec, open_rows
from bottega.evaluation.methods.leave_one_out import embedder_by_evidence
from bottega.evaluation.methods.master_answers import stored_answers
from bottega.evaluation.methods.method_actor import (
    ItemAnswer,
    MethodActor,
    MethodFactory,
    cost_of_drafts,
    open_classifier,
)
from bottega.evaluation.methods.planning import (
    check_benchmark_fit,
    check_compressor,
    check_methods,
    check_rerank,
    default_methods,
    max_calls,
    max_demonstrations,
    method_keys,
    passages_only,
    with_custom,
)
from bottega.evaluation.methods.prompts import (
    NEAREST_LAST,
    REASONED,
    REASONING_TOKENS,
    Description,
    check_prompt_images,
    describe_methods,
    images_per_prompt,
    rationale_source,
    with_rationales,
)
from bottega.evaluation.methods.retrieval import (
    check_retrieval_options,
    check_retrieve,
    open_embedder,
)
from bottega.evaluation.methods.specifications import METHODS, SEARCH_METHODS
from bottega.evaluation.outcomes import (
    Budget,
    Method,
    MethodKey,
    Outcome,
    ScoredAnswer,
    check_priced,
)
from bottega.evaluation.report.payload import keep_thumbnails
from bottega.evaluation.runs.paired import PairedDifference, ScoredRun, paired_differences
from bottega.evaluation.runs.run_store import Failure, RunStore
from bottega.evaluation.runs.runner import AnswerStore, MethodResult, RunState, evaluate
from bottega.generation import TransformersGenerator
from bottega.knowledge.embedders.names import BUNDLED, photo_tower
from bottega.knowledge.tuned_settings import tuned_settings
from bottega.naming import (
    SAMPLED,
    SIMULATED,
    ModelSpec,
    check_model,
    default_embedder,
    embedder_note,
    local_model,
    model_for,
)
from bottega.protocols import Generator, Pricer, Recorder
from bottega.recipes import Classifier
from bottega.recipes.cache_retrieval import BY_DRAFT
from bottega.recipes.visual_rag import LABEL_TOKENS
from bottega.recording import PriceTable
from bottega.types import Query

DRAFTS = "drafts.jsonl"  # in the folder of a run
MethodWorkers = Actor[tuple[MethodKey, int], ItemAnswer]


@dataclass(frozen=True)
class StoredDefaults:
    """Settings of a knowledge base that is evaluated, each None if not stored."""

    embed: str | None = None
    shots: int | None = None
    order: str | None = None


class MethodComparison:
    """Comparison of the methods of a run on its benchmark.

    The constructor checks the settings, reads the benchmark and chooses the settings that are not
    set; it opens the model without loading it. `on_error` receives the errors of unreadable
    examples, by default `display.warn`. `config`, `data` and `classifier` are those that
    `run` uses; `skipped` counts unreadable examples. `run` adds completed methods to `runs`, so
    their results are kept if a later one fails. It also sets `stored`, the number of answers in its
    folder, and `failures`, the failed items there. Raises `SettingError`.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        price: Pricer | None = None,
        display: Display = SILENT,
        on_error: OnError | None = None,
    ) -> None:
        self._display, self._price = display, price or PriceTable()
        own = stored_defaults(config.benchmark)
        config = _with_stored(config, own)
        _check(config)
        self._hyper = local_model(config.hyper, config.trust_remote_code) if config.hyper else None
        if config.model:
            check_model(config.model)  # before the benchmark is read
        self.skipped = 0
        self._on_error = on_error or display.warn
        data, self._source = _load(config, display, self._skip)
        data = with_synonyms(data, config.synonyms)
        if config.answers_from is not None:
            data = stored_answers(data, config.answers_from, display)
            if config.label_noise:  # of the answers that are shown
                data = with_label_noise(data, config.benchmark, config.label_noise, config.seed)
        if data.needs_answers:
            raise SettingError(
                f"the labelled questions of {data.name} have no published answers",
                hint="let a master answer them with bottega answer, then set --answers-from",
            )
        config = _with_embedder(config, own.embed, data, display)
        self.config = config = _with_defaults(config, data)
        self._model = ModelSpec.of(
            config.model or _default_model(config, display),
            concurrency=config.concurrency,
            trust_remote_code=config.trust_remote_code,
        )
        self.classifier = open_classifier(config, self._model, self._price)
        self.data = passages_only(data, config.methods)
        self.budget = Budget()
        self.runs: list[ScoredRun] = []
        self.stored: int | None = None
        self.failures: list[Failure] = []

    def _skip(self, error: BottegaError) -> None:
        self.skipped += not isinstance(error, NoticeError)
        self._on_error(error)

    @property
    def model(self) -> str:
        return self.classifier.generator.name

    @property
    def calls(self) -> int:
        """The maximum number of completions, without drafts of the retrieval. Raises
        `SettingError` for a method that the benchmark does not support."""
        check_benchmark_fit(self.config, self.data)
        labelled = replace(self.classifier, labels=self.data.labels)
        return max_calls(self.config, self.data, labelled)

    @cached_property
    def record(self) -> dict[str, object]:
        """The settings on which the answers depend."""
        hyper = self._hyper.name if self._hyper else None
        return self.config.record(model=self.model, hyper=hyper, skipped=self.skipped)

    @cached_property
    def descriptions(self) -> dict[str, Description]:
        """The settings of each method with demonstrations."""
        return describe_methods(self.data, self.classifier, self.config, self._source)

    @property
    def results(self) -> list[MethodResult]:
        """The results of the completed methods."""
        return [result for result, _ in self.runs]

    @property
    def differences(self) -> list[PairedDifference]:
        """The paired differences of the completed methods to their baselines."""
        return paired_differences(self.runs)

    @cached_property
    def factory(self) -> MethodFactory:
        """Factory of the methods for worker processes. Raises `SettingError` for retrieval by
        drafts."""
        return MethodFactory(self.data, self.config, self._model, self._price, self.config.hyper)

    def run(
        self,
        *,
        out: Path | None = None,
        budget_usd: float | None = None,
        record: Recorder | None = None,
        executor: Executor | None = None,
    ) -> list[MethodResult]:
        """Run the methods and return their results, in their order.

        The folder `out` stores each answer: the same run resumes there. The run ends early when
        the budget is spent, also by earlier runs in `out`. `record` receives the traces. The
        workers of `executor` answer instead of this process. Raises the first error that would
        affect every item, and `SettingError`.
        """
        shown = self.descriptions
        self.runs.clear()
        with self._opened(out) as store:
            spent, highest = 0.0, 0.0
            if isinstance(store, RunStore):
                store.describe(shown)
                spent, highest = store.spent()
            drafts = out and out / DRAFTS
            if drafts is not None:
                spent += cost_of_drafts(drafts, self.classifier.generator, self._price)
            self.budget = Budget(budget_usd, spent=spent, highest_cost=highest)
            check_priced(self.model, self.budget, self._price)
            state = RunState(store, self.budget)
            run_methods(
                self.data,
                self.classifier,
                self.config,
                self.runs,
                state=state,
                record=record,
                display=self._display,
                start=partial(self._start, state, drafts, executor),
            )
        return self.results

    def _start(
        self, state: RunState, drafts: Path | None, executor: Executor | None
    ) -> MethodWorkers:
        if executor is not None:
            factory = replace(self.factory, model=self._model.share(executor.count))
            return executor.start(factory, concurrency=self.config.concurrency)
        return _start_here(
            self.data,
            self.classifier,
            self.config,
            self._display,
            hyper=self._hyper,
            budget=state.budget,
            drafts_file=drafts,
        )

    @contextmanager
    def _opened(self, out: Path | None) -> Iterator[AnswerStore]:
        """Yield the store of the run in the folder `out`, else one in memory."""
        if out is None:
            yield AnswerStore()
            return
        data, note = self.data, self._display.note
        metrics = [metric.name for metric in data.metrics]
        settings = {**self.record, "metrics": metrics, "data": fingerprint(data)}
        with closing(RunStore.open(out, settings, data.items)) as store:
            if changed := store.score_again(data.metrics, data.items):
                note(f"{plural(changed, 'stored answer')} scored again: the metric has changed")
            keys = method_keys(self.config, data)
            if count := sum(len(store.answered(key, data.items)) for key in keys):
                note(
                    f"{plural(count, 'stored answer')} in {out} {'is' if count == 1 else 'are'}"
                    " reused"
                )
            try:
                yield store
            finally:
                self.stored, self.failures = store.count(), store.failures()


def stored_defaults(benchmark: str) -> StoredDefaults:
    """Return the settings stored in the knowledge base of `knowledge-base:FILE`."""
    kind, _, location = benchmark.partition(":")
    if kind != KNOWLEDGE_BASE or not location:
        return StoredDefaults()
    file = StoreLocation.from_argument(location)
    with open_rows(file) as rows:
        check_filled(rows, file, "")
        view = chosen(rows.views(), None, file)
        tuned = tuned_settings(rows)
        if tuned is None or tuned.embedder != view.fingerprint:
            return StoredDefaults(embedder_spec(rows, view))
        return StoredDefaults(embedder_spec(rows, view), tuned.shots, tuned.order)


def _with_stored(config: RunConfig, own: StoredDefaults) -> RunConfig:
    """Return the configuration with the stored settings in place of those that are not set."""
    searches = not set(SEARCH_METHODS).isdisjoint(config.methods)
    default = (own.shots,) if own.shots else parse_shots(SEARCH_SHOTS if searches else SHOTS)
    embed = own.embed if config.retrieve == "image" else None
    return replace(
        config,
        shots=config.shots or default,
        embed=config.embed or embed,
        order=config.order or own.order,
    )


def _check(config: RunConfig) -> None:
    """Raise `SettingError` for settings that are wrong for every benchmark."""
    check_methods(config.methods or tuple(METHODS), config.shots)
    check_retrieve(config.retrieve, config.embed or BUNDLED)
    check_retrieval_options(
        [config.retrieve],
        embed_text=config.embed_text,
        metric=config.metric,
        groups=config.groups,
    )
    check_rerank(config.rerank, config.methods)
    check_compressor(config, config.hyper)


def _load(config: RunConfig, display: Display, on_error: OnError) -> tuple[Benchmark, str]:
    """Return the benchmark and the source of its rationales."""
    with display.waiting("reading the benchmark"):
        data = load_benchmark(
            config.benchmark,
            seed=config.seed,
            limit=config.limit,
            per_class=config.kb_per_class,
            kb_share=config.kb_share,
            label_noise=0.0 if config.answers_from else config.label_noise,
            allow_overlap=config.allow_overlap,
            on_error=on_error,
        )
    if config.passages is not None:
        data = with_passages(data, config.passages, on_error=on_error)
    data = replace(data, relevance=config.relevance or data.relevance)
    source, file = rationale_source(data), config.rationales_from
    if file is not None:
        with open_rows(file) as knowledge:
            data, found = with_rationales(data, knowledge)
        others = found < sum(one.rationale is not None for one in data.knowledge)
        source = f"{source} and from {file}" if others else f"from {file}"
        labelled = plural(len(data.knowledge), "labelled example")
        display.note(f"rationales for {found} of {labelled} from {file}")
    return data, source


def _with_embedder(
    config: RunConfig, own: str | None, data: Benchmark, display: Display
) -> RunConfig:
    """Return the configuration with the default embedder if none is set, and note the choice."""
    command = f"bottega eval {shlex.quote(config.benchmark)} --embed"
    if config.embed is not None and config.embed == own:
        display.note(f"embedder {own}: that of the knowledge base; to change it: {command} NAME")
    if config.embed is not None:
        return config
    if config.retrieve == "hybrid":
        return replace(config, embed=BUNDLED)
    images = chain.from_iterable(example.query.images for example in data.knowledge)
    sample = list(islice(images, SAMPLED))
    default, reason = default_embedder(sample), ""
    if default == BUNDLED and config.benchmark.partition(":")[0] in OWN_DATA:
        found = embedder_by_evidence(data.knowledge, open_embedder, seed=config.seed)
        default, reason = found or (default, reason)
    if sample:
        display.note(embedder_note(default, sample, command, reason))
    return replace(config, embed=default)


def _with_defaults(config: RunConfig, data: Benchmark) -> RunConfig:
    """Return the configuration with the benchmark's methods, order and length of replies."""
    brief = data.labels and config.prompt != REASONED
    names = config.methods or default_methods(data, config.retrieve)
    return replace(
        config,
        metric=config.metric or _default_metric(config, data),
        order=config.order or (NEAREST_LAST if config.answers_from else data.order),
        methods=with_custom(names, config.pipeline),
        max_tokens=config.max_tokens or (LABEL_TOKENS if brief else ANSWER_TOKENS),
        reasoning_tokens=config.max_tokens or REASONING_TOKENS,
    )


def _default_metric(config: RunConfig, data: Benchmark) -> EvaluatedMetric:
    """Return the fitted metric for labelled photographs that all ask one question."""
    questions = {example.query.text for example in data.knowledge}
    photographs = config.retrieve == "image" and photo_tower(config.embed or BUNDLED) is not None
    labelled = bool(data.labels) and not data.multi_label and not data.episode_of
    return "fitted" if photographs and labelled and len(questions) == 1 else "cosine"


def _default_model(config: RunConfig, display: Display) -> str:
    """Return the name of the default model, and note the choice if a method uses it."""
    name = model_for(config.embed or BUNDLED, config.benchmark)
    why = f"that of {config.benchmark}" if name == SIMULATED else f"for embedder {config.embed}"
    command = f"bottega eval {shlex.quote(config.benchmark)} --model NAME"
    if config.retrieve in BY_DRAFT or any(METHODS[one].uses_model for one in config.methods):
        display.note(f"model {name}: {why}; to change it: {command}")
    return name


def run_methods(
    data: Benchmark,
    settings: Classifier,
    config: RunConfig,
    runs: list[ScoredRun],
    *,
    state: RunState,
    record: Recorder | None = None,
    display: Display = SILENT,
    start: Callable[[], MethodWorkers] | None = None,
) -> None:
    """Run all methods of `config`, whose settings must be set. Each result is appended to `runs`
    when it is complete, so an error keeps the earlier ones. `start` starts the workers that answer,
    by default an actor in this process."""
    check_benchmark_fit(config, data)
    if isinstance(state.store, RunStore):
        state.store.plan(method_keys(config, data))
    available = max_demonstrations(data)
    if max(config.shots) > available and any(METHODS[one].shots is None for one in config.methods):
        only = plural(available, "example")
        display.note(f"{max(config.shots)} shots requested; only {only} available")
    here = partial(_start_here, data, settings, config, display, budget=state.budget)
    workers = (start or here)()
    methods = _methods(data, config, workers, record, display)
    run_closing(_run_all(data, settings, methods, config, state, runs, display), workers)


def _start_here(
    data: Benchmark, settings: Classifier, config: RunConfig, display: Display, **more: Any
) -> MethodWorkers:
    """Start an actor in this process; `more` are further arguments of `MethodActor`."""
    _check_images(data, config, settings.generator, display)
    factory = partial(MethodActor, data, settings, config, display=display, **more)
    return LocalExecutor().start(factory, concurrency=config.concurrency)


def _check_images(
    data: Benchmark, config: RunConfig, generator: Generator, display: Display
) -> None:
    """Raise `SettingError` before the work if the model takes fewer images than its prompts have.
    Only loading a model tells its limit."""
    count = images_per_prompt(config.methods, config.shots, data)
    if count > 1 and isinstance(generator, TransformersGenerator) and not generator.turns_only:
        with display.waiting(f"loading {generator.name}"):
            asyncio.run(generator.load())
        check_prompt_images(count, generator.loaded, generator.name)


def _methods(
    data: Benchmark,
    config: RunConfig,
    workers: MethodWorkers,
    record: Recorder | None,
    display: Display,
) -> list[Method]:
    """Return the methods that the workers answer; this process records their traces."""
    index_of = {id(item.query): index for index, item in enumerate(data.items)}
    warned: set[str] = set()

    async def answer(key: MethodKey, query: Query) -> Outcome:
        answered = await workers((key, index_of[id(query)]))
        for error in answered.warnings:
            if str(error) not in warned:  # all workers embed the same examples
                warned.add(str(error))
                display.warn(error)
        if record is not None:
            for trace in answered.traces:
                await record(trace)
        return answered.outcome

    return [Method(*key, partial(answer, key)) for key in method_keys(config, data)]


async def _run_all(
    data: Benchmark,
    settings: Classifier,
    methods: Sequence[Method],
    config: RunConfig,
    state: RunState,
    runs: list[ScoredRun],
    display: Display,
) -> None:
    for method in methods:
        alone = replace(config, methods=[method.name], shots=[method.shots])
        with display.progress(
            method.title,
            len(data.items),
            counts_money=True,
            most_calls=max_calls(alone, data, settings),
        ) as step:
            result, scored = await evaluate(data, method, config, state, done=partial(_count, step))
        runs.append((result, scored))
        value = "-" if result.value is None else f"{result.value:.3f}"
        cost = f", {result.cost_usd:.4f} USD" if result.cost_usd else ""
        display.note(f"{method.title}: {value} in {result.seconds:.1f} s{cost}")
        if isinstance(state.store, RunStore):
            await asyncio.to_thread(_store_thumbnails, state.store.path, data, method, display)


def _count(step: ReportStep, scored: ScoredAnswer | None) -> None:
    step(1, 0.0 if scored is None else scored.cost_usd or 0.0)


def _store_thumbnails(path: Path, data: Benchmark, method: Method, display: Display) -> None:
    """Store thumbnails for the report. The measured times of the methods exclude this step."""
    started = time.perf_counter()
    with display.progress("thumbnails", None) as step:
        count = keep_thumbnails(path, data, method, progress=step, on_error=display.warn)
    if count:
        seconds = time.perf_counter() - started
        display.note(f"{plural(count, 'thumbnail')} for the report in {seconds:.1f} s")
