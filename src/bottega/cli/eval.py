"""The command `bottega eval`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

from typer import Exit, Typer

from bottega._util.locations import StoreLocation
from bottega._util.progress import plural
from bottega.cli.answer import NEAREST_LAST
from bottega.cli.components import (
    LOCAL,
    REASONED,
    REASONING_TOKENS,
    check_executor,
    check_rerank,
    check_retrieval_options,
    check_retrieve,
    explain_embedder,
    local_model,
    open_executor,
    with_synonyms,
)
from bottega.cli.eval_options import (
    SEARCH_SHOTS,
    SHOTS,
    AllowOverlapOption,
    AlphaOption,
    AnswersFromOption,
    ChildrenOption,
    ConcurrencyOption,
    EarlyStopOption,
    EmbedOption,
    EmbedTextOption,
    EvalCommand,
    ExplorationOption,
    FetchOption,
    GroupsOption,
    HyperOption,
    KnowledgePerClassOption,
    KnowledgeShareOption,
    LabelNoiseOption,
    MaxTokensOption,
    MethodsOption,
    MetricOption,
    OrderOption,
    OutOption,
    PassagesOption,
    PipelineOption,
    PresetOption,
    QuestionOption,
    RationalesFromOption,
    RationalesOption,
    RelevanceOption,
    RerankOption,
    RetrieveOption,
    RewardOption,
    RolloutsOption,
    RoundSizeOption,
    SamplesOption,
    ShotsOption,
    StoreOption,
    UnparsableOption,
    VariantOption,
)
from bottega.cli.evaluation_output import (
    answer_store,
    note_prompts,
    note_rationales,
    print_plan,
    report_failures,
    report_results,
    stored_text,
)
from bottega.cli.evaluation_run import (
    WRONG,
    check_output,
    run_methods,
    with_options,
)
from bottega.cli.knowledge_files import evaluation_defaults, open_rows
from bottega.cli.master_answers import stored_answers
from bottega.cli.method_actor import ANSWER_TOKENS, MethodFactory, cost_of_drafts, open_classifier
from bottega.cli.options import (
    BenchmarkSpec,
    BudgetOption,
    CompressorFolder,
    DefaultModel,
    DryRun,
    ItemLimit,
    JsonFile,
    On,
    PriceOption,
    PromptStyle,
    Seed,
    Stop,
    Synonyms,
    TraceFile,
    TrustRemoteCode,
    WorkerCount,
    parse_numbers,
    parse_stop,
)
from bottega.cli.output import SkippedExamples, note, noting_interruption, say, waiting
from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import (
    load_benchmark,
    with_label_noise,
)
from bottega.evaluation.benchmarks.passages import with_passages
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.planning import (
    check_benchmark_fit,
    check_compressor,
    check_method_options,
    check_methods,
    default_methods,
    max_calls,
    method_keys,
    passages_only,
    with_custom,
)
from bottega.evaluation.methods.prompts import (
    NONE,
    RATIONALES,
    Description,
    describe_methods,
    rationale_source,
    with_rationales,
)
from bottega.evaluation.methods.specifications import METHODS, SEARCH_METHODS
from bottega.evaluation.outcomes import Budget, check_priced
from bottega.evaluation.runs.paired import ScoredRun
from bottega.evaluation.runs.run_store import FILE, RunStore
from bottega.evaluation.runs.runner import RunState
from bottega.evaluation.search_config import search_config
from bottega.generation import TransformersGenerator
from bottega.knowledge.embedders.names import BUNDLED
from bottega.naming import (
    SAMPLED,
    SIMULATED,
    ModelSpec,
    check_model,
    default_embedder,
    model_for,
)
from bottega.recipes import Classifier
from bottega.recipes.cache_retrieval import BY_DRAFT
from bottega.recipes.visual_rag import LABEL_TOKENS
from bottega.recording import PriceTable

DRAFTS = "drafts.jsonl"  # in the folder of a run

application = Typer(add_completion=False)


@application.command("eval", cls=EvalCommand)
def evaluate(
    benchmark: BenchmarkSpec,
    question: QuestionOption = None,
    methods: MethodsOption = None,
    shots: ShotsOption = None,
    kb_per_class: KnowledgePerClassOption = None,
    kb_share: KnowledgeShareOption = 1.0,
    limit: ItemLimit = None,
    model: DefaultModel = None,
    trust_remote_code: TrustRemoteCode = False,
    embed: EmbedOption = None,
    retrieve: RetrieveOption = "image",
    embed_text: EmbedTextOption = None,
    metric: MetricOption = "cosine",
    groups: GroupsOption = None,
    label_noise: LabelNoiseOption = 0.0,
    prompt: PromptStyle = "auto",
    order: OrderOption = None,
    rerank: RerankOption = "none",
    seed: Seed = 0,
    samples: SamplesOption = None,
    preset: PresetOption = "paper",
    rollouts: RolloutsOption = None,
    reward: RewardOption = None,
    alpha: AlphaOption = None,
    fetch: FetchOption = None,
    children: ChildrenOption = None,
    exploration: ExplorationOption = None,
    variant: VariantOption = None,
    early_stop: EarlyStopOption = True,
    rationales: RationalesOption = None,
    rationales_from: RationalesFromOption = None,
    answers_from: AnswersFromOption = None,
    compressor: CompressorFolder = None,
    hyper: HyperOption = None,
    store: StoreOption = None,
    max_tokens: MaxTokensOption = None,
    stop: Stop = None,
    concurrency: ConcurrencyOption = 32,
    round_size: RoundSizeOption = None,
    pipeline: PipelineOption = None,
    allow_overlap: AllowOverlapOption = False,
    passages: PassagesOption = None,
    relevance: RelevanceOption = None,
    unparsable: UnparsableOption = WRONG,
    budget: BudgetOption = None,
    out: OutOption = None,
    json: JsonFile = None,
    synonyms: Synonyms = None,
    dry_run: DryRun = False,
    price: PriceOption = None,
    traces: TraceFile = None,
    on: On = LOCAL,
    workers: WorkerCount = None,
) -> None:
    """Compare methods on a labelled image set or a synthetic task, with 95 % intervals.

    A folder without split folders is split by the seed: a quarter of each class is evaluated.
    Results of completed methods are printed and written even if a later method fails.

    vote, nearest and knn choose a label among the retrieved examples without a model;
    vote-strict counts ties as wrong; logreg fits a logistic regression to all labelled vectors.
    top-k shows the nearest examples, the same as visual-rag for labelled images; majority and
    best-of-n choose among several samples of its reply. in-context shows all examples, oracle
    the gold passage among others. rcts searches for helpful examples; rcts-flat, rcts-random
    and rcts-best-of-n have its reward and its budget without a tree. concat shows passages,
    racc compresses them; racc-oracle and racc-flat change the retrieval scores, racc-swapped
    reads the passages of another item. candidates answers from each passage separately and
    chooses the answer with the best joint probability; kv-reuse puts the keys and values of
    each passage before the question. swap-image and swap-question are visual-rag with the image
    or the question of another item.
    """
    benchmark = with_options(benchmark, question, unparsable)
    own_embed, own_shots, own_order = evaluation_defaults(benchmark)
    embed = embed or (own_embed if retrieve == "image" else None)
    names = tuple(name.strip() for name in methods.split(",")) if methods else ()
    searches = not set(SEARCH_METHODS).isdisjoint(names)
    shots = shots or own_shots or (SEARCH_SHOTS if searches else SHOTS)
    order = order or own_order
    config = RunConfig(
        benchmark=benchmark,
        methods=names,
        shots=parse_numbers(shots),
        passages=passages,
        relevance=relevance,
        limit=limit,
        kb_per_class=kb_per_class,
        kb_share=kb_share,
        rerank=rerank,
        label_noise=label_noise,
        allow_overlap=allow_overlap,
        embed=embed or BUNDLED,
        retrieve=retrieve,
        embed_text=embed_text,
        metric=metric,
        groups=groups,
        prompt=prompt,
        order=order or NEAREST_LAST,
        seed=seed,
        samples=samples,
        search=search_config(
            preset,
            benchmark,
            rollouts=rollouts,
            reward=reward,
            alpha=alpha,
            fetch=fetch,
            children=children,
            exploration=exploration,
            variant=variant,
            early_stop=early_stop,
        ),
        rationales=rationales,
        answers_from=answers_from,
        synonyms=synonyms,
        compressor=compressor,
        hyper=hyper,
        store=store,
        max_tokens=max_tokens,
        stop=parse_stop(stop),
        pipeline=pipeline,
        round_size=round_size,
        concurrency=concurrency,
    )
    check_methods(config.methods or tuple(METHODS), config.shots)
    check_retrieve(retrieve, config.embed)
    check_retrieval_options([retrieve], embed_text=embed_text, metric=metric, groups=groups)
    check_rerank(rerank, config.methods)
    check_output(json)
    check_executor(on, workers)
    check_compressor(config, hyper)
    hyper_model = None if hyper is None else local_model(hyper, trust_remote_code)
    Budget(budget)  # fail before anything is loaded
    if model:
        check_model(model)  # before the benchmark is read
    data, skipped, source = _load(config, rationales_from)
    data = with_synonyms(data, synonyms)
    if answers_from is not None:
        data = stored_answers(data, answers_from)
        if config.label_noise:  # of the answers that are shown
            data = with_label_noise(data, config.benchmark, config.label_noise, config.seed)
    if data.needs_answers:
        raise SettingError(
            f"the labelled questions of {data.name} have no published answers",
            hint="let a master answer them with bottega answer, then set --answers-from",
        )
    config = _with_embedder(config, embed, own_embed, data)
    if order is None and answers_from is None:
        config = replace(config, order=data.order)
    brief = data.labels and prompt != REASONED
    config = replace(
        config,
        methods=with_custom(config.methods or default_methods(data, retrieve), pipeline),
        max_tokens=max_tokens or (LABEL_TOKENS if brief else ANSWER_TOKENS),
        reasoning_tokens=max_tokens or REASONING_TOKENS,
    )
    spec = ModelSpec.of(
        model or _default_model(config),
        concurrency=concurrency,
        trust_remote_code=trust_remote_code,
    )
    settings = open_classifier(config, spec, price)
    options = {
        "--preset": preset if preset != "paper" else None,
        "--rollouts": rollouts,
        "--reward": reward,
        "--alpha": alpha,
        "--fetch": fetch,
        "--children": children,
        "--exploration": exploration,
        "--variant": variant,
        "--no-early-stop": None if early_stop else True,
        "--samples": samples,
    }
    # A resumed run repeats its options, also those of methods that are not run now.
    if out is None or not (out / FILE).exists():
        given = [name for name, value in options.items() if value is not None]
        check_method_options(given, config, data, settings)
    data = passages_only(data, config.methods)
    if dry_run:
        check_benchmark_fit(config, data)
        calls = max_calls(config, data, replace(settings, labels=data.labels))
        print_plan(data, [settings.generator.name], calls, drafts=retrieve in BY_DRAFT)
        return
    shown = describe_methods(data, settings, config, source)
    remote = None if on == LOCAL else MethodFactory(data, config, spec, price, hyper)
    with open_executor(on, workers) as executor:
        if executor and remote:
            remote = replace(remote, model=spec.share(executor.count))
        run = partial(run_methods, hyper=hyper_model, executor=executor, remote=remote)
        _compare(
            data, config, settings, shown, hyper_model, skipped, budget, out, json, traces, run
        )


def _with_embedder(
    config: RunConfig, given: str | None, own: str | None, data: Benchmark
) -> RunConfig:
    """Return the configuration with the default embedder if none is given, and note the choice."""
    command = f"bottega eval {shlex.quote(config.benchmark)} --embed"
    if given is not None and given == own:
        note(f"embedder {given}: that of the knowledge base; to change it: {command} NAME")
    if given is not None or config.retrieve == "hybrid":
        return config
    images = chain.from_iterable(example.query.images for example in data.knowledge)
    sample = list(islice(images, SAMPLED))
    if sample:
        explain_embedder(default_embedder(sample), sample, command)
    return replace(config, embed=default_embedder(sample))


def _default_model(config: RunConfig) -> str:
    """Return the name of the default model, and note the choice if a method uses it."""
    name = model_for(config.embed, config.benchmark)
    why = f"that of {config.benchmark}" if name == SIMULATED else f"for embedder {config.embed}"
    command = f"bottega eval {shlex.quote(config.benchmark)} --model NAME"
    if config.retrieve in BY_DRAFT or any(METHODS[one].uses_model for one in config.methods):
        note(f"model {name}: {why}; to change it: {command}")
    return name


def _load(config: RunConfig, rationales: StoreLocation | None) -> tuple[Benchmark, int, str]:
    """Return the benchmark, the number of unreadable examples, each with a warning, and the source
    of the rationales."""
    skipped = SkippedExamples()
    with waiting("reading the benchmark"):
        data = load_benchmark(
            config.benchmark,
            seed=config.seed,
            limit=config.limit,
            per_class=config.kb_per_class,
            kb_share=config.kb_share,
            label_noise=0.0 if config.answers_from else config.label_noise,
            allow_overlap=config.allow_overlap,
            on_error=skipped,
        )
    if config.passages is not None:
        data = with_passages(data, config.passages, on_error=skipped)
    skipped.warn_of_rest()
    data = replace(data, relevance=config.relevance or data.relevance)
    source = rationale_source(data)
    if rationales is not None:
        with open_rows(rationales) as knowledge:
            data, found = with_rationales(data, knowledge)
        others = found < sum(one.rationale is not None for one in data.knowledge)
        source = f"{source} and from {rationales}" if others else f"from {rationales}"
        labelled = plural(len(data.knowledge), "labelled example")
        note(f"rationales for {found} of {labelled} from {rationales}")
    return data, len(skipped), source


def _compare(
    data: Benchmark,
    config: RunConfig,
    settings: Classifier,
    shown: Mapping[str, Description],
    hyper: TransformersGenerator | None,
    skipped: int,
    budget: float | None,
    out: Path | None,
    json: Path | None,
    traces: StoreLocation | None,
    run: Callable[..., None],
) -> None:
    """Run the methods, then report the completed ones, also after an error."""
    record = config.record(
        model=settings.generator.name, hyper=hyper.name if hyper else None, skipped=skipped
    )
    explained = [name for name, what in shown.items() if what[RATIONALES] != NONE]
    runs: list[ScoredRun] = []
    with (
        answer_store(out, record, data, method_keys(config, data)) as store,
        noting_interruption(lambda: stored_text(store, out)),
    ):
        spent, highest = 0.0, 0.0
        if isinstance(store, RunStore):
            store.describe(shown)
            spent, highest = store.spent()
        drafts, price = out and out / DRAFTS, settings.price or PriceTable()
        if drafts is not None:
            spent += cost_of_drafts(drafts, settings.generator, price)
        limits = Budget(budget, spent=spent, highest_cost=highest)
        check_priced(settings.generator.name, limits, price)
        state = RunState(store, limits)
        try:
            run(data, settings, config, runs, state=state, traces=traces, drafts_file=drafts)
        finally:
            report_results(data, {**record, "explained": explained}, shown, runs, json)
            note_rationales(explained, runs)
            note_prompts(shown, runs)
            report_failures(store, out)
    if skipped:
        say(f"{plural(skipped, 'unreadable example')} {'is' if skipped == 1 else 'are'} excluded")
    if limits.is_spent:
        say(
            f"{limits}; repeat the command with a larger --budget to "
            + ("resume" if out else "start again (--out stores answers)")
        )
    if failed := sum(result.failed for result, _ in runs):
        hint = "repeat the command to retry them" if out else "store answers with --out FOLDER"
        say(f"{failed} of {plural(len(data.items) * len(runs), 'request')} failed; {hint}")
        raise Exit(1)
