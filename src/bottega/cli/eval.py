"""What `bottega eval` was asked: what its work comes from, and what is kept beside its answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from bottega import __version__
from bottega.cli.answer import parse_order
from bottega.cli.compressor_jobs import local
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
from bottega.cli.measure import Run, Work, check_output, measure, print_results
from bottega.cli.opening import open_rows
from bottega.cli.output import (
    Model,
    OrderOption,
    PriceOption,
    PromptStyle,
    Seed,
    TraceFile,
    note,
    say,
    to_json,
    warn,
)
from bottega.cli.parts import check_retrieve, open_prices, open_prompt
from bottega.errors import BottegaError, SettingError
from bottega.evaluation.baselines import VOTES
from bottega.evaluation.benchmark import Benchmark, fingerprint
from bottega.evaluation.benchmarks.loading import LABELLED_IMAGES, load_benchmark
from bottega.evaluation.benchmarks.passages import with_passages
from bottega.evaluation.episodes import EXCLUDE
from bottega.evaluation.methods import METHODS, alone, check, default_methods
from bottega.evaluation.outcomes import Budget, method_title
from bottega.evaluation.paired import paired
from bottega.evaluation.prompts import explained, with_rationales
from bottega.evaluation.racc_methods import check_compressing, identities
from bottega.evaluation.run_store import RunStore, Unkept
from bottega.evaluation.runner import Conditions
from bottega.evaluation.search_methods import ROLLOUTS
from bottega.naming import BUNDLED, open_model
from bottega.recipes import Classifier


@dataclass(frozen=True)
class Material:
    """What is asked about, and what is known beside it."""

    benchmark: str
    passages: str | None
    limit: int | None
    per_class: int | None
    label_noise: float
    allow_overlap: bool

    def read(self, seed: int, rationales: Path | None) -> tuple[Benchmark, int]:
        """With the number of what could not be used, each of which is told."""
        skipped: list[BottegaError] = []

        def on_error(error: BottegaError) -> None:
            skipped.append(error)
            warn(error)

        data = load_benchmark(
            self.benchmark,
            seed=seed,
            limit=self.limit,
            per_class=self.per_class,
            label_noise=self.label_noise,
            allow_overlap=self.allow_overlap,
            on_error=on_error,
        )
        if self.passages is not None:
            data = with_passages(data, self.passages, on_error=on_error)
        return data if rationales is None else _explained(data, rationales), len(skipped)


@dataclass(frozen=True)
class Asked:
    """All that the answers depend on."""

    material: Material
    skipped: int
    settings: Classifier
    prompt: str
    order: str
    work: Work
    round_size: int | None

    def record(self) -> dict[str, object]:
        """Which other runs these answers belong with: a run goes on where this is the same."""
        material, settings, work = self.material, self.settings, self.work
        return {
            "benchmark": material.benchmark,
            "passages": material.passages,
            "skipped": self.skipped,
            "model": settings.generator.name,
            "embedder": work.embed,
            "retrieve": work.retrieve,
            "label_noise": material.label_noise,
            "limit": material.limit,
            "kb_per_class": material.per_class,
            "prompt": self.prompt,
            "order": self.order,
            "seed": settings.seed,
            "samples": work.samples,
            "rollouts": work.rollouts,
            "rationales": work.rationales,
            "compressor": None if work.compressor is None else str(work.compressor),
            "hyper": work.hyper and work.hyper.name,
            "store": None if work.store is None else str(work.store),
            **identities(work.compressor, work.store),
            "max_tokens": settings.sampling.max_tokens,
            "round_size": self.round_size,
        }


def _explained(data: Benchmark, file: Path) -> Benchmark:
    with open_rows(file) as knowledge:
        data, found = with_rationales(data, knowledge)
    note(f"{found} of {len(data.knowledge)} known examples have their rationale from {file}")
    return data


SHOWN_FAILURES = 10


def report(
    data: Benchmark, asked: Mapping[str, object], runs: Sequence[Run], file: Path | None
) -> None:
    results, compared = [result for result, _ in runs], paired(runs)
    if results:
        say(f"{asked['model']}, examples by {asked['retrieve']} ({asked['embedder']})")
    print_results(data, results, compared)
    if file is not None and results:
        head = {**asked, "exclude": EXCLUDE, **_sizes(data)}
        file.write_bytes(to_json({**head, "results": results, "paired": compared}))


def _sizes(data: Benchmark) -> dict[str, int | str | None]:
    return {
        "knowledge_base": len(data.knowledge),
        "corrupted_count": data.corrupted_count,
        "items": len(data.items),
        "labels": len(data.labels),
        "bottega": __version__,
    }


def say_who_explains(showing: Sequence[str], runs: Sequence[Run]) -> None:
    """Where methods differ in more than their names, a comparison has to say so."""
    shown = dict.fromkeys(result.method for result, _ in runs if result.shots)
    others = [name for name in shown if name not in showing and name not in VOTES]
    explaining = [name for name in shown if name in showing]
    if explaining and others:
        note(
            f"demonstrations of {', '.join(explaining)} show their"
            f" rationales, those of {', '.join(others)} do not: --rationales or --no-rationales"
            " compares like with like"
        )


def say_failures(ledger: RunStore | Unkept, out: Path | None) -> None:
    failures = ledger.failures() if isinstance(ledger, RunStore) else []
    for one in failures[:SHOWN_FAILURES]:
        say(f"failed: {method_title(one.method, one.shots)}, item {one.place}: {one.error}")
    if len(failures) > SHOWN_FAILURES:
        say(f"and {len(failures) - SHOWN_FAILURES} more; bottega report {out} lists all")


def say_what_is_missing(skipped: int, limits: Budget, out: Path | None) -> None:
    if skipped:
        say(f"{skipped} of what was read could not be used and is in no figure")
    if limits.is_spent:
        again = "goes on" if out else "begins again: without --out nothing was kept"
        say(f"stopped at {limits.spent:.4f} USD; the same command with a larger --budget {again}")


def say_if_failed(data: Benchmark, runs: Sequence[Run], out: Path | None) -> None:
    """And ends with 1."""
    failed = sum(result.failed for result, _ in runs)
    if failed:
        again = "the same command asks them again" if out else "--out DIR keeps what was answered"
        say(f"{failed} of {len(data.items) * len(runs)} requests failed; {again}")
        raise typer.Exit(1)


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
    order: OrderOption = "nearest-last",
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
) -> Classifier:
    return Classifier(
        open_model(model, concurrency=concurrency),
        labels=(),
        prompt=open_prompt(prompt),
        order=parse_order(order),
        price=open_prices(price),
        seed=seed,
    )


def _replying(settings: Classifier, longest: int) -> Classifier:
    return replace(settings, sampling=replace(settings.sampling, max_tokens=longest))


def _limits(budget: float | None, ledger: RunStore | Unkept) -> Budget:
    """What an earlier part of the run has spent counts."""
    spent, highest_cost = ledger.spent() if isinstance(ledger, RunStore) else (0.0, 0.0)
    return Budget(budget, spent=spent, highest_cost=highest_cost)


@contextmanager
def _ledger(
    out: Path | None, asked: Mapping[str, object], data: Benchmark
) -> Iterator[RunStore | Unkept]:
    if out is None:
        yield Unkept()
        return
    metrics = [metric.name for metric in data.metrics]
    settings = {**asked, "metrics": metrics, "data": fingerprint(data)}
    with closing(RunStore.open(out, settings, data.items)) as journal:
        if changed := journal.score_again(data.metrics, data.items):
            note(f"{changed} answers of the run are scored otherwise now than when they were given")
        yield journal


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingError(f"--shots {text!r} is not a list of numbers", hint="5,10,20") from error
