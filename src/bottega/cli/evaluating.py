"""Measuring methods, and the demonstration."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from bottega import __version__
from bottega.cli.answering import parse_order
from bottega.cli.options import DemonstrationOrder, Model, PriceOption, PromptStyle, Seed, TraceFile
from bottega.cli.output import print_table, progress, say, to_json, warn
from bottega.cli.resolving import (
    BUNDLED,
    open_embedder,
    open_model,
    open_prices,
    open_prompt,
    open_traces,
)
from bottega.errors import SettingError
from bottega.evaluation.benchmarks import Benchmark, load_benchmark
from bottega.evaluation.memo import MemoEmbedder
from bottega.evaluation.methods import METHODS, Method, check, plan
from bottega.evaluation.page import render
from bottega.evaluation.runner import Result, Scored
from bottega.evaluation.runner import evaluate as run_method
from bottega.knowledge import KnowledgeBase
from bottega.protocols import Generator
from bottega.recipes import Classification

CONCURRENCY = 32
COLUMNS = ("method", "shots", "n", "value", "low", "high", "invalid", "calls", "seconds")


def evaluate(
    benchmark: Annotated[str, typer.Argument(help="digits, image-folder:DIR or manyicl:DIR.")],
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(METHODS),
    shots: Annotated[str, typer.Option(help="Numbers of demonstrations.")] = "5,10,20",
    kb_per_class: Annotated[
        int | None, typer.Option(min=1, help="Keep this many examples a label.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Ask this many items.")] = None,
    model: Model = BUNDLED,
    embed: Annotated[
        str, typer.Option(help="bundled, pixels, or a sentence-transformers id or folder.")
    ] = BUNDLED,
    prompt: PromptStyle = "auto",
    order: DemonstrationOrder = "nearest-last",
    seed: Seed = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions at once.")] = CONCURRENCY,
    allow_overlap: Annotated[
        bool, typer.Option("--allow-overlap", help="Allow test images in the knowledge base.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file.")] = None,
    price: PriceOption = None,
    traces: TraceFile = None,
) -> None:
    """Compare methods on a labelled image set, with 95 % intervals."""
    names, counts = methods.split(","), _numbers(shots)
    check(names, counts)
    if json is not None and not json.absolute().parent.is_dir():
        raise SettingError(f"there is no folder for {json}", hint=f"mkdir -p {json.parent}")
    data = load_benchmark(
        benchmark,
        seed=seed,
        limit=limit,
        per_class=kb_per_class,
        allow_overlap=allow_overlap,
        on_bad=warn,
    )
    generator = open_model(model)
    settings = Classification(
        generator,
        data.labels,
        open_prompt(prompt),
        multi_label=data.multi_label,
        order=parse_order(order),
        price=open_prices(price),
        seed=seed,
    )
    runs = _measure(data, settings, names, counts, embed, traces, concurrency)
    results = [result for result, _ in runs]
    if json is not None:
        document = {
            "benchmark": benchmark,
            "model": generator.name,
            "embedder": embed,
            "prompt": prompt,
            "order": order,
            "seed": seed,
            "knowledge_base": len(data.knowledge),
            "labels": len(data.labels),
            "bottega": __version__,
            "results": results,
        }
        json.write_text(to_json(document), encoding="utf-8")
    _print(results)
    failed = sum(result.failed for result in results)
    if failed:
        say(f"{failed} requests failed and are in no figure; run the command again")
        raise typer.Exit(1)


def demo(
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("bottega-demo.html"),
    limit: Annotated[int, typer.Option(min=1, help="Questions for each method.")] = 200,
    seed: Seed = 0,
    traces: TraceFile = None,
) -> None:
    """Visual RAG on handwritten digits that the bundled model never saw: a table and a page."""
    data = load_benchmark("digits", seed=seed, limit=limit)
    settings = Classification(
        open_model(BUNDLED),
        data.labels,
        price=open_prices(None),
        seed=seed,
    )
    runs = _measure(data, settings, METHODS, (1, 5, 10, 20), BUNDLED, traces, CONCURRENCY)
    results = [result for result, _ in runs]
    shown = next(scored for r, scored in runs if (r.method, r.shots) == ("visual-rag", 5))
    facts = {
        "model": "bottega-apprentice (bundled)",
        "images": "scikit-learn digits, never used in training",
        "knowledge base": f"{len(data.knowledge)} labelled images",
        "seed": str(seed),
        "made": f"{datetime.now(UTC):%Y-%m-%d} by bottega {__version__}",
    }
    page = render(results, shown, title="Bottega: it answers after looking", facts=facts)
    out.write_text(page, encoding="utf-8")
    _print(results)
    say(f"the page: {out}")


def _measure(
    data: Benchmark,
    settings: Classification,
    methods: Sequence[str],
    shots: Sequence[int],
    embed: str,
    traces: Path | None,
    concurrency: int,
) -> list[tuple[Result, list[Scored]]]:
    with _knowledge(data, embed) as knowledge, closing(open_traces(traces)) as store:
        recorded = replace(settings, record=store)
        planned = plan(methods, shots, knowledge, recorded, seed=settings.seed)
        return asyncio.run(_run_all(data, planned, settings.generator, concurrency, settings.seed))


def _knowledge(data: Benchmark, embed: str) -> KnowledgeBase:
    """The benchmark's knowledge base in memory, with its questions embedded ahead in batches."""
    embedder = MemoEmbedder(open_embedder(embed))
    knowledge = KnowledgeBase.open(":memory:", embed=embedder)
    with progress("embedding", len(data.knowledge) + len(data.items)) as step:
        knowledge.add(data.knowledge, progress=step, on_bad=warn)
        embedder.embed([item.query for item in data.items])
        step(len(data.items))
    return knowledge


async def _run_all(
    data: Benchmark, planned: Sequence[Method], generator: Generator, concurrency: int, seed: int
) -> list[tuple[Result, list[Scored]]]:
    try:
        return [await _run(data, method, concurrency, seed) for method in planned]
    finally:
        await generator.aclose()


async def _run(
    data: Benchmark, method: Method, concurrency: int, seed: int
) -> tuple[Result, list[Scored]]:
    with progress(f"{method.name} {method.shots or ''}".strip(), len(data.items)) as step:
        return await run_method(
            data, method, concurrency=concurrency, seed=seed, done=lambda: step(1)
        )


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingError(f"--shots {text!r} is not a list of numbers", hint="5,10,20") from error


def _print(results: Sequence[Result]) -> None:
    say(f"metric: {results[0].metric}, 95 % intervals")
    print_table(COLUMNS, [[getattr(result, name) for name in COLUMNS] for result in results])
