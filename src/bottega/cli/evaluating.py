"""Measuring methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import typer

from bottega import __version__
from bottega.cli.answering import parse_order
from bottega.cli.evaluation_options import (
    ANSWER_TOKENS,
    LABEL_TOKENS,
    UNREAD,
    AtOnce,
    BenchmarkSpec,
    Compared,
    ImageEmbed,
    ItemLimit,
    LabelNoise,
    MethodNames,
    Money,
    Overlap,
    Passages,
    PerClass,
    ResultFile,
    RoundSize,
    RunFolder,
    Samples,
    ShotCounts,
    Tokens,
    Unparsable,
)
from bottega.cli.measuring import Run, Work, check_output, measure, print_results
from bottega.cli.options import (
    DemonstrationOrder,
    Model,
    PriceOption,
    PromptStyle,
    Seed,
    TraceFile,
)
from bottega.cli.output import note, say, to_json, warn
from bottega.cli.resolving import check_retrieve, open_prices, open_prompt
from bottega.errors import BottegaError, SettingError
from bottega.evaluation.benchmark import Benchmark, fingerprint
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.benchmarks.passages import with_passages
from bottega.evaluation.budget import Budget
from bottega.evaluation.journal import Journal
from bottega.evaluation.ledger import Unkept
from bottega.evaluation.methods import METHODS, SAMPLES, check, default_methods
from bottega.evaluation.outcomes import titled
from bottega.evaluation.pairing import paired
from bottega.evaluation.runner import Conditions
from bottega.naming import BUNDLED, open_model
from bottega.recipes import Classification

SHOWN_FAILURES = 10


def evaluate(
    benchmark: BenchmarkSpec,
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
    samples: Samples = SAMPLES,
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

    top-k shows the nearest examples, which for labelled images is visual-rag; majority and
    best-of-n choose among several samples of its reply. in-context shows everything there is,
    oracle the right passage among others. swap-image and swap-question are visual-rag asked with
    another item's picture or question.
    """
    names = None if methods is None else [name.strip() for name in methods.split(",")]
    counts = _numbers(shots)
    check(METHODS if names is None else names, counts)
    check_retrieve(retrieve, embed)
    check_output(json)
    Budget(budget)  # refuses now what it would refuse after loading
    settings = _settings(model, concurrency, prompt, order, price, seed)
    spec = benchmark if unparsable == UNREAD else f"{benchmark},unparsable={unparsable}"
    data, skipped = _read(
        spec,
        passages,
        seed=seed,
        limit=limit,
        per_class=kb_per_class,
        label_noise=label_noise,
        allow_overlap=allow_overlap,
    )
    longest = max_tokens or (LABEL_TOKENS if data.labels else ANSWER_TOKENS)
    settings = replace(settings, sampling=replace(settings.sampling, max_tokens=longest))
    asked = {
        "benchmark": spec,
        "passages": passages,
        "skipped": skipped,
        "model": settings.generator.name,
        "embedder": embed,
        "retrieve": retrieve,
        "label_noise": label_noise,
        "limit": limit,
        "kb_per_class": kb_per_class,
        "prompt": prompt,
        "order": order,
        "seed": seed,
        "samples": samples,
        "max_tokens": longest,
        "round_size": round_size,
    }
    runs: list[Run] = []
    with _ledger(out, asked, data) as ledger:
        limits = _limits(budget, ledger)
        conditions = Conditions(concurrency, seed, round_size, ledger, limits)
        chosen = names or default_methods(data)
        work = Work(chosen, counts, retrieve, embed, traces, samples, conditions)
        try:
            measure(data, settings, work, runs)
        finally:
            _report(data, asked, runs, json)
            _say_failures(ledger, out)
    _say_what_is_missing(skipped, limits)
    _say_if_failed(data, runs, out)


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


def _read(
    spec: str,
    passages: str | None,
    *,
    seed: int,
    limit: int | None,
    per_class: int | None,
    label_noise: float,
    allow_overlap: bool,
) -> tuple[Benchmark, int]:
    """With the number of what could not be used, each of which is told."""
    skipped: list[BottegaError] = []

    def on_bad(error: BottegaError) -> None:
        skipped.append(error)
        warn(error)

    data = load_benchmark(
        spec,
        seed=seed,
        limit=limit,
        per_class=per_class,
        label_noise=label_noise,
        allow_overlap=allow_overlap,
        on_bad=on_bad,
    )
    if passages is not None:
        data = with_passages(data, passages, on_bad=on_bad)
    return data, len(skipped)


def _limits(budget: float | None, ledger: Journal | Unkept) -> Budget:
    """What an earlier part of the run has spent counts."""
    spent, dearest = ledger.spent() if isinstance(ledger, Journal) else (0.0, 0.0)
    return Budget(budget, spent=spent, dearest=dearest)


def _say_what_is_missing(skipped: int, limits: Budget) -> None:
    if skipped:
        say(f"{skipped} of what was read could not be used and is in no figure")
    if limits.is_spent:
        say(f"stopped at {limits.spent:.4f} USD; the same command with a larger --budget goes on")


def _say_if_failed(data: Benchmark, runs: Sequence[Run], out: Path | None) -> None:
    """And ends with 1."""
    failed = sum(result.failed for result, _ in runs)
    if failed:
        again = "the same command asks them again" if out else "--out DIR keeps what was answered"
        say(f"{failed} of {len(data.items) * len(runs)} requests failed; {again}")
        raise typer.Exit(1)


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


def _say_failures(ledger: Journal | Unkept, out: Path | None) -> None:
    failures = ledger.failures() if isinstance(ledger, Journal) else []
    for one in failures[:SHOWN_FAILURES]:
        say(f"failed: {titled(one.method, one.shots)}, item {one.place}: {one.error}")
    if len(failures) > SHOWN_FAILURES:
        say(f"and {len(failures) - SHOWN_FAILURES} more; bottega report {out} lists all")


def _report(
    data: Benchmark, asked: Mapping[str, object], runs: Sequence[Run], file: Path | None
) -> None:
    results, compared = [result for result, _ in runs], paired(runs)
    if results:
        say(f"{asked['model']}, examples by {asked['retrieve']} ({asked['embedder']})")
    print_results(data, results, compared)
    if file is not None and results:
        file.write_bytes(to_json({**asked, **_sizes(data), "results": results, "paired": compared}))


def _sizes(data: Benchmark) -> dict[str, int | str | None]:
    return {
        "knowledge_base": len(data.knowledge),
        "made_wrong": data.made_wrong,
        "items": len(data.items),
        "labels": len(data.labels),
        "bottega": __version__,
    }


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingError(f"--shots {text!r} is not a list of numbers", hint="5,10,20") from error
