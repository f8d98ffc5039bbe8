"""Measuring methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from bottega.cli.answering import parse_order
from bottega.cli.asked import Asked, Material
from bottega.cli.compressor_models import local
from bottega.cli.evaluated import (
    report,
    say_failures,
    say_if_failed,
    say_what_is_missing,
    say_who_explains,
)
from bottega.cli.evaluation_options import (
    ANSWER_TOKENS,
    LABEL_TOKENS,
    UNREAD,
    AtOnce,
    BenchmarkSpec,
    Compared,
    CompressorFolder,
    Explained,
    ExplainedBy,
    HyperModel,
    ImageEmbed,
    ImageQuestion,
    ItemLimit,
    LabelNoise,
    MethodNames,
    Money,
    Overlap,
    Passages,
    PerClass,
    ResultFile,
    Rollouts,
    RoundSize,
    RunFolder,
    Samples,
    ShotCounts,
    StoreFolder,
    Tokens,
    Unparsable,
)
from bottega.cli.measuring import Run, Work, check_output, measure
from bottega.cli.options import (
    DemonstrationOrder,
    Model,
    PriceOption,
    PromptStyle,
    Seed,
    TraceFile,
)
from bottega.cli.output import note
from bottega.cli.resolving import check_retrieve, open_prices, open_prompt
from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark, fingerprint
from bottega.evaluation.benchmarks.loading import LABELLED_IMAGES
from bottega.evaluation.budget import Budget
from bottega.evaluation.compressing import check_compressing
from bottega.evaluation.journal import Journal
from bottega.evaluation.ledger import Unkept
from bottega.evaluation.methods import METHODS, alone, check, default_methods
from bottega.evaluation.prompts import explained
from bottega.evaluation.runner import Conditions
from bottega.evaluation.searches import ROLLOUTS
from bottega.naming import BUNDLED, open_model
from bottega.recipes import Classification


def evaluate(
    benchmark: BenchmarkSpec,
    question: ImageQuestion = None,
    methods: MethodNames = None,
    shots: ShotCounts = "5,10,20",
    kb_per_class: PerClass = None,
    limit: ItemLimit = None,
    model: Model = BUNDLED,
    embed: ImageEmbed = BUNDLED,
    retrieve: Compared = "image",
    label_noise: LabelNoise = 0.0,
    prompt: PromptStyle = "auto",
    order: DemonstrationOrder = "nearest-last",
    seed: Seed = 0,
    samples: Samples = None,
    rollouts: Rollouts = ROLLOUTS,
    rationales: Explained = None,
    rationales_from: ExplainedBy = None,
    compressor: CompressorFolder = None,
    hyper: HyperModel = None,
    store: StoreFolder = None,
    max_tokens: Tokens = None,
    concurrency: AtOnce = 32,
    round_size: RoundSize = None,
    allow_overlap: Overlap = False,
    passages: Passages = None,
    unparsable: Unparsable = UNREAD,
    budget: Money = None,
    out: RunFolder = None,
    json: ResultFile = None,
    price: PriceOption = None,
    traces: TraceFile = None,
) -> None:
    """Compare methods on a labelled image set or a drawn task, with 95 % intervals.

    A folder without train/ and test/ is split by the seed: a quarter of each class is asked. What
    was finished is printed and written even if a later method fails.

    vote, nearest and knn choose a label among the retrieved examples without a model; vote-strict
    counts ties as wrong. top-k shows the nearest examples, which for labelled images is visual-rag;
    majority and best-of-n choose among several samples of its reply. in-context shows everything
    there is, oracle the right passage among others. rcts searches for the examples that help;
    rcts-random and rcts-best-of-n have its reward and its budget without a tree. concat shows
    passages, racc has them compressed; racc-oracle and racc-flat have other retrieval scores,
    racc-swapped reads another item's passages. candidates answers from each passage alone and
    chooses the answer that is likeliest together with its passage; kv-reuse puts the keys and
    values of each passage before the question.
    swap-image and swap-question are visual-rag asked with another item's picture or question.
    """
    names = None if methods is None else [name.strip() for name in methods.split(",")]
    counts = _numbers(shots)
    check(METHODS if names is None else names, counts)
    check_retrieve(retrieve, embed)
    check_output(json)
    check_compressing(names or (), hyper, store, compressor)
    condensing = None if hyper is None else local(hyper)
    Budget(budget)  # refuses now what it would refuse after loading
    settings = _settings(model, concurrency, prompt, order, price, seed)
    spec = _spec(benchmark, question, unparsable)
    material = Material(spec, passages, limit, kb_per_class, label_noise, allow_overlap)
    data, skipped = material.read(seed, rationales_from)
    chosen = names or default_methods(data)
    data = alone(data, chosen)
    work = Work(
        chosen,
        counts,
        retrieve,
        embed,
        traces,
        samples,
        rollouts,
        rationales,
        compressor,
        condensing,
        store,
    )
    settings = _replying(settings, max_tokens or (LABEL_TOKENS if data.labels else ANSWER_TOKENS))
    asked = Asked(material, skipped, settings, prompt, order, work, round_size)
    _compare(data, asked, concurrency, budget, out, json)


def _compare(
    data: Benchmark,
    asked: Asked,
    concurrency: int,
    budget: float | None,
    out: Path | None,
    json: Path | None,
) -> None:
    """What was finished is told in any case."""
    settings, work, record = asked.settings, asked.work, asked.record()
    showing = explained(work.methods, data, settings, work.rationales)
    runs: list[Run] = []
    with _ledger(out, record, data) as ledger:
        limits = _limits(budget, ledger)
        conditions = Conditions(concurrency, settings.seed, asked.round_size, ledger, limits)
        try:
            measure(data, settings, replace(work, conditions=conditions), runs)
        finally:
            report(data, {**record, "explained": showing}, runs, json)
            say_who_explains(showing, runs)
            say_failures(ledger, out)
    say_what_is_missing(asked.skipped, limits, out)
    say_if_failed(data, runs, out)


def _spec(benchmark: str, question: str | None, unparsable: str) -> str:
    """Return the benchmark specification with these options appended."""
    kind = benchmark.partition(":")[0]
    if unparsable != UNREAD:
        if kind != "mmmu":
            raise SettingError(
                f"--unparsable applies only to mmmu, got {benchmark}",
                hint="remove --unparsable",
            )
        benchmark = f"{benchmark},unparsable={unparsable}"
    if question is not None:
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
        benchmark = f"{benchmark},question={question}"
    return benchmark


def _settings(
    model: str, concurrency: int, prompt: str, order: str, price: str | None, seed: int
) -> Classification:
    return Classification(
        open_model(model, concurrency=concurrency),
        labels=(),
        prompt=open_prompt(prompt),
        order=parse_order(order),
        price=open_prices(price),
        seed=seed,
    )


def _replying(settings: Classification, longest: int) -> Classification:
    return replace(settings, sampling=replace(settings.sampling, max_tokens=longest))


def _limits(budget: float | None, ledger: Journal | Unkept) -> Budget:
    """What an earlier part of the run has spent counts."""
    spent, dearest = ledger.spent() if isinstance(ledger, Journal) else (0.0, 0.0)
    return Budget(budget, spent=spent, dearest=dearest)


@contextmanager
def _ledger(
    out: Path | None, asked: Mapping[str, object], data: Benchmark
) -> Iterator[Journal | Unkept]:
    if out is None:
        yield Unkept()
        return
    metrics = [metric.name for metric in data.metrics]
    settings = {**asked, "metrics": metrics, "data": fingerprint(data)}
    with closing(Journal.open(out, settings, data.items)) as journal:
        if changed := journal.score_again(data.metrics, data.items):
            note(f"{changed} answers of the run are scored otherwise now than when they were given")
        yield journal


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingError(f"--shots {text!r} is not a list of numbers", hint="5,10,20") from error
