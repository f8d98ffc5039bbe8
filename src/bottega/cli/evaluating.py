"""Measuring methods, and the demonstration."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from bottega import __version__
from bottega.cli.answering import parse_order
from bottega.cli.options import (
    DemonstrationOrder,
    Json,
    Model,
    PriceOption,
    PromptStyle,
    Seed,
    TraceFile,
)
from bottega.cli.output import note, print_json, print_table, progress, say, to_json, warn
from bottega.cli.resolving import (
    BUNDLED,
    open_embedder,
    open_model,
    open_prices,
    open_prompt,
    open_recorder,
)
from bottega.errors import SettingError
from bottega.evaluation.benchmarks import Benchmark, load_benchmark
from bottega.evaluation.memo import MemoEmbedder
from bottega.evaluation.methods import METHODS, Method, check, plan
from bottega.evaluation.page import render
from bottega.evaluation.runner import Result, Scored
from bottega.evaluation.runner import evaluate as run_method
from bottega.knowledge import KnowledgeBase
from bottega.recipes import Classification

CONCURRENCY = 32
COLUMNS = ("method", "shots", "n", "value", "low", "high", "invalid", "failed", "calls", "seconds")
TITLE = "Bottega: it learned by looking"
FOOTNOTE = (
    "vote is the majority label of the nearest examples, without a model; a tie is wrong. "
    "An invalid reply is wrong; a failed request is in no figure."
)
BUNDLED_NOTE = (
    "The bundled model knows no names: zero-shot it says unknown. Its learning from examples shows "
    "beside random and balanced; what it adds to its own retriever shows beside vote."
)

Run = tuple[Result, list[Scored]]


def evaluate(
    benchmark: Annotated[str, typer.Argument(help="digits, image-folder:DIR or manyicl:DIR.")],
    methods: Annotated[
        str, typer.Option(help=f"Comma-separated, of {', '.join(METHODS)}.", show_default="all")
    ] = ",".join(METHODS),
    shots: Annotated[
        str, typer.Option(help="Numbers of demonstrations, comma-separated.")
    ] = "5,10,20",
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
    """Compare methods on a labelled image set, with 95 % intervals.

    A folder without train/ and test/ is split by the seed: a quarter of each class is asked. What
    was finished is printed and written even if a later method fails.
    """
    names = [name.strip() for name in methods.split(",")]
    counts = _numbers(shots)
    check(names, counts)
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
        allow_overlap=allow_overlap,
        on_bad=warn,
    )
    runs: list[Run] = []
    try:
        _measure(data, settings, names, counts, embed, traces, concurrency, runs)
    finally:
        results = [result for result, _ in runs]
        _print(data, results)
        if json is not None and results:
            document = {
                "benchmark": benchmark,
                "model": settings.generator.name,
                "embedder": embed,
                "prompt": prompt,
                "order": order,
                "seed": seed,
                "knowledge_base": len(data.knowledge),
                "items": len(data.items),
                "labels": len(data.labels),
                "bottega": __version__,
                "results": results,
            }
            json.write_bytes(to_json(document))
    failed = sum(result.failed for result in results)
    if failed:
        say(f"{failed} requests failed; run the command again")
        raise typer.Exit(1)


def demo(
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("bottega-demo.html"),
    limit: Annotated[int, typer.Option(min=1, help="Questions for each method.")] = 200,
    kb_per_class: Annotated[int, typer.Option(min=1, help="Labelled examples of each digit.")] = 10,
    seed: Seed = 0,
    traces: TraceFile = None,
    json: Json = False,
) -> None:
    """Visual RAG on handwritten digits that the bundled model never saw: a table and a page."""
    check_output(out)
    data = load_benchmark("digits", seed=seed, limit=limit, per_class=kb_per_class)
    settings = Classification(open_model(BUNDLED), labels=(), price=open_prices(None), seed=seed)
    runs: list[Run] = []
    _measure(data, settings, METHODS, (1, 5, 10, 20), BUNDLED, traces, CONCURRENCY, runs)
    results = [result for result, _ in runs]
    shown = next(scored for r, scored in runs if (r.method, r.shots) == ("visual-rag", 5))
    facts = {
        "model": settings.generator.name,
        "images": "scikit-learn's handwritten digits, never used in training",
        "knowledge base": f"{len(data.knowledge)} labelled images, {kb_per_class} of each digit",
        "seed": str(seed),
        "made": f"{datetime.now(UTC):%Y-%m-%d} by bottega {__version__}",
    }
    page = render(results, shown, title=TITLE, facts=facts, note=BUNDLED_NOTE)
    out.write_text(page, encoding="utf-8")
    if json:
        print_json({"page": str(out), "results": results})
        return
    _print(data, results)
    note(BUNDLED_NOTE)
    say(f"the page: {out}")


def check_output(path: Path | None) -> None:
    """Raises `SettingError` now rather than an error after the work."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SettingError(f"{path} cannot be written", hint="name a file in an existing folder")


def _measure(
    data: Benchmark,
    settings: Classification,
    methods: Sequence[str],
    shots: Sequence[int],
    embed: str,
    traces: Path | None,
    concurrency: int,
    runs: list[Run],
) -> None:
    """Appends each method's run as it is finished."""
    with open_recorder(traces) as record, _knowledge(data, embed) as knowledge:
        asked = replace(settings, labels=data.labels, multi_label=data.multi_label, record=record)
        planned = plan(methods, shots, knowledge, asked, seed=settings.seed)
        asyncio.run(_run_all(data, planned, settings, concurrency, runs))


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
    data: Benchmark,
    planned: Sequence[Method],
    settings: Classification,
    concurrency: int,
    runs: list[Run],
) -> None:
    try:
        for method in planned:
            runs.append(await _run(data, method, settings.seed, concurrency))
    finally:
        await settings.generator.aclose()


async def _run(data: Benchmark, method: Method, seed: int, concurrency: int) -> Run:
    name = f"{method.name} {method.shots or ''}".strip()
    with progress(name, len(data.items)) as step:
        run = await run_method(
            data, method, concurrency=concurrency, seed=seed, done=lambda: step(1)
        )
    value = run[0].value
    note(f"{name}: {'-' if value is None else f'{value:.3f}'} in {run[0].seconds:.1f} s")
    return run


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingError(f"--shots {text!r} is not a list of numbers", hint="5,10,20") from error


def _print(data: Benchmark, results: Sequence[Result]) -> None:
    if not results:
        return
    say(
        f"{data.name}: {len(data.knowledge)} examples known, {len(data.items)} asked, "
        f"{len(data.labels)} labels; {results[0].metric.replace('_', ' ')} with 95 % intervals"
    )
    print_table(COLUMNS, [[getattr(result, name) for name in COLUMNS] for result in results])
    note(FOOTNOTE)
