"""Measuring methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from bottega import __version__
from bottega.cli.answering import parse_order
from bottega.cli.measuring import CONCURRENCY, Run, Work, check_output, measure, print_results
from bottega.cli.options import (
    DemonstrationOrder,
    Model,
    PriceOption,
    PromptStyle,
    Seed,
    TraceFile,
)
from bottega.cli.output import say, to_json, warn
from bottega.cli.resolving import BUNDLED, check_retrieve, open_model, open_prices, open_prompt
from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.drawn import DRAWN
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.methods import METHODS, PAPER, check, default_methods
from bottega.evaluation.pairing import paired
from bottega.recipes import Classification

BenchmarkSpec = Annotated[
    str,
    typer.Argument(
        help="digits (or digits:half=second), image-folder:DIR, manyicl:DIR, or a drawn task "
        f"with its knobs, such as glyphs:ways=5,shots=5; drawn are {', '.join(DRAWN)}.",
    ),
]
MethodNames = Annotated[
    str | None,
    typer.Option(
        help=f"Comma-separated, of {', '.join(METHODS)}.",
        show_default=f"{','.join(PAPER)}; for facts zero-shot,random,oracle",
    ),
]
ShotCounts = Annotated[str, typer.Option(help="Numbers of demonstrations, comma-separated.")]
PerClass = Annotated[int | None, typer.Option(min=1, help="Keep this many examples a label.")]
ItemLimit = Annotated[int | None, typer.Option(min=1, help="Ask this many items.")]
ImageEmbed = Annotated[
    str, typer.Option(help="bundled, pixels, or a sentence-transformers id or folder.")
]
Compared = Annotated[
    str,
    typer.Option(
        help="What is compared: image (by --embed), text, dual (both), hybrid (late interaction "
        "of the bundled model's image and words), keywords (dual, the question cut to them), bm25 "
        "(words), or hashtag (dual, in groups of questions)."
    ),
]
LabelNoise = Annotated[
    float, typer.Option(min=0, max=1, help="Share of the known answers to make wrong.")
]
AtOnce = Annotated[int, typer.Option(min=1, help="Questions at once.")]
Overlap = Annotated[
    bool, typer.Option("--allow-overlap", help="Allow test images in the knowledge base.")
]
ResultFile = Annotated[Path | None, typer.Option(help="Write the results to this file.")]


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
    concurrency: AtOnce = CONCURRENCY,
    allow_overlap: Overlap = False,
    json: ResultFile = None,
    price: PriceOption = None,
    traces: TraceFile = None,
) -> None:
    """Compare methods on a labelled image set or a drawn task, with 95 % intervals.

    A folder without train/ and test/ is split by the seed: a quarter of each class is asked. What
    was finished is printed and written even if a later method fails.

    in-context shows everything there is, oracle the right passage among others. swap-image and
    swap-question are visual-rag asked with another item's picture or question.
    """
    names = None if methods is None else [name.strip() for name in methods.split(",")]
    counts = _numbers(shots)
    check(METHODS if names is None else names, counts)
    check_retrieve(retrieve, embed)
    check_output(json)
    settings = Classification(
        open_model(model),
        labels=(),
        prompt=open_prompt(prompt),
        order=parse_order(order),
        price=open_prices(price),
        seed=seed,
    )
    data = load_benchmark(
        benchmark,
        seed=seed,
        limit=limit,
        per_class=kb_per_class,
        label_noise=label_noise,
        allow_overlap=allow_overlap,
        on_bad=warn,
    )
    asked = {
        "benchmark": benchmark,
        "model": settings.generator.name,
        "embedder": embed,
        "retrieve": retrieve,
        "label_noise": label_noise,
        "prompt": prompt,
        "order": order,
        "seed": seed,
    }
    work = Work(names or default_methods(data), counts, retrieve, embed, traces, concurrency)
    runs: list[Run] = []
    try:
        measure(data, settings, work, runs)
    finally:
        _report(data, asked, runs, json)
    failed = sum(result.failed for result, _ in runs)
    if failed:
        say(f"{failed} requests failed; run the command again")
        raise typer.Exit(1)


def _report(
    data: Benchmark, asked: Mapping[str, object], runs: Sequence[Run], file: Path | None
) -> None:
    results, compared = [result for result, _ in runs], paired(runs)
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
