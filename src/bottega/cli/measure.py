"""What `eval` and `demo` share: run methods over a benchmark, print their figures."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from bottega import __version__
from bottega.cli.output import (
    Json,
    Seed,
    TraceFile,
    note,
    print_json,
    print_table,
    progress,
    say,
    warn,
)
from bottega.cli.parts import open_prices, open_recorder, open_retrieval, open_tokens
from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.episodes import EXCLUSION_RULE, nearest
from bottega.evaluation.memo import CachingEmbedder
from bottega.evaluation.methods import (
    PAPER,
    check_benchmark_fit,
    max_demonstrations,
    needs_search,
    plan,
)
from bottega.evaluation.outcomes import Method, ScoredAnswer
from bottega.evaluation.page import render
from bottega.evaluation.paired import PairedDifference, paired
from bottega.evaluation.report.payload import keep_thumbnails
from bottega.evaluation.run_store import RunStore, Shown
from bottega.evaluation.runner import Conditions, Result
from bottega.evaluation.runner import evaluate as run_method
from bottega.evaluation.search_methods import ROLLOUTS, RetrieverFactory, searching, stored
from bottega.generation import TransformersGenerator
from bottega.knowledge import KnowledgeBase
from bottega.naming import BUNDLED, open_model
from bottega.protocols import Generator
from bottega.recipes import Classifier

COLUMNS = ("method", "shots", "n", "value", "low", "high", "invalid", "failed", "calls", "seconds")
PAIRED_FIGURES = ("method", "against", "shots", "n", "value", "low", "high")
NOTES = {
    "vote": "vote is the majority label of the nearest examples, without a model; a tie goes to the"
    " nearer examples.",
    "vote-strict": "vote-strict counts a tie as wrong.",
    "nearest": "nearest is the label of the most similar example.",
    "knn": "knn is a vote weighted by similarity.",
}
PAIRED_TESTS = (
    "Newcombe's interval and McNemar's exact p-value where answers are right or wrong, else the "
    "bootstrap's and a permutation test's"
)
FOOTNOTE = "An invalid reply is wrong; a failed request is in no figure."

Run = tuple[Result, list[ScoredAnswer]]


@dataclass(frozen=True)
class Work:
    """Which methods, at which numbers of shots, over examples found by what."""

    methods: Sequence[str]
    shots: Sequence[int]
    retrieve: str = "image"
    embed: str = BUNDLED
    traces: Path | None = None
    samples: int | None = None
    rollouts: int = ROLLOUTS
    rationales: bool | None = None
    compressor: Path | None = None
    hyper: TransformersGenerator | None = None
    store: Path | None = None
    conditions: Conditions = field(default_factory=Conditions)


def check_output(path: Path | None) -> None:
    """Raises `SettingError` now rather than an error after the work."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SettingError(f"{path} cannot be written", hint="name a file in an existing folder")


def measure(data: Benchmark, settings: Classifier, work: Work, runs: list[Run]) -> None:
    """Appends each method's run as it is finished."""
    check_benchmark_fit(work.methods, data)
    known = max_demonstrations(data)
    if max(work.shots) > known:
        note(f"{max(work.shots)} shots: only {known} examples may be shown, which is all of them")
    embedder = _embedder(data, work)
    with (
        open_recorder(work.traces) as record,
        filled(data, embedder, work.retrieve) as knowledge,
    ):
        asked = replace(settings, labels=data.labels, multi_label=data.multi_label, record=record)
        seed = settings.seed
        with _embedding_tokens(data, work) as step:
            search: RetrieverFactory = nearest
            if embedder is not None:
                tokens = open_tokens(work.embed)
                search = searching(work.retrieve, embedder, tokens=tokens, seed=seed, progress=step)
            planned = plan(
                work.methods,
                work.shots,
                data,
                knowledge,
                asked,
                seed=seed,
                search=search,
                samples=work.samples,
                rollouts=work.rollouts,
                rationales=work.rationales,
                compressor=work.compressor,
                hyper=work.hyper,
                store=work.store,
            )
        models = [settings.generator, *([work.hyper] if work.hyper else [])]
        asyncio.run(_run_all(data, planned, models, work.conditions, runs))


def print_results(
    data: Benchmark, results: Sequence[Result], paired: Sequence[PairedDifference]
) -> None:
    if not results:
        return
    say(
        f"{data.name}: {len(data.knowledge)} examples known, {len(data.items)} asked, "
        f"{_answers(data)}; {results[0].metric.replace('_', ' ')} with 95 % intervals"
    )
    say(EXCLUSION_RULE)
    if data.corrupted_count is not None:
        say(
            f"label noise: {data.corrupted_count} of {len(data.knowledge)} known answers made wrong"
        )
    print_table(COLUMNS, [[getattr(result, name) for name in COLUMNS] for result in results])
    also = [[r.method, r.shots, *vars(figure).values()] for r in results for figure in r.also]
    if also:
        say("\nfurther figures, with 95 % intervals")
        print_table(("method", "shots", "metric", "value", "low", "high"), also)
    if paired:
        say(f"\ndifference on the same items: {PAIRED_TESTS}")
        rows = [[getattr(one, name) for name in PAIRED_FIGURES] for one in paired]
        for row, one in zip(rows, paired, strict=True):
            row.append(one.p_value if one.p_value >= 0.001 else "< 0.001")
        print_table((*PAIRED_FIGURES, "p_value"), rows)
    shown = {result.method for result in results}
    note(" ".join([*(text for name, text in NOTES.items() if name in shown), FOOTNOTE]))


def _answers(data: Benchmark) -> str:
    if data.labels:
        return f"{len(data.labels)} labels"
    own = any(item.query.choices for item in data.items)
    return "choices of each question" if own else "free answers"


def _embedder(data: Benchmark, work: Work) -> CachingEmbedder | None:
    """None where no method will look into the knowledge base."""
    if not needs_search(work.methods, data):
        return None
    check_retrieval(data, work.retrieve)
    return CachingEmbedder(open_retrieval(work.retrieve, work.embed))


def filled(data: Benchmark, embedder: CachingEmbedder | None, retrieve: str) -> KnowledgeBase:
    """The benchmark's knowledge base in memory, with its questions embedded ahead in batches.
    Empty without an embedder."""
    if embedder is None:
        return KnowledgeBase.open(":memory:", embed=None)
    knowledge = KnowledgeBase.open(":memory:", embed=stored(retrieve, embedder))
    with progress("embedding", len(data.knowledge) + len(data.items)) as step:
        knowledge.add(data.knowledge, progress=step, on_error=warn)
        embedder.embed([item.query for item in data.items])
        step(len(data.items))
    return knowledge


def _embedding_tokens(
    data: Benchmark, work: Work
) -> AbstractContextManager[Callable[[int], None] | None]:
    """Only late interaction embeds the examples a second time."""
    if work.retrieve != "hybrid":
        return nullcontext()
    return progress("embedding tokens", len(data.knowledge))


def check_retrieval(data: Benchmark, retrieve: str) -> None:
    textual = sum(not e.query.images for e in (*data.knowledge, *data.items))
    if textual and retrieve == "image":
        raise SettingError(
            f"{textual} questions or passages of {data.name} have no image, so that nothing can be"
            " found by image",
            hint="--retrieve text, dual or hybrid",
        )


async def _run_all(
    data: Benchmark,
    planned: Sequence[Method],
    models: Sequence[Generator],
    conditions: Conditions,
    runs: list[Run],
) -> None:
    try:
        for method in planned:
            with progress(method.title, len(data.items), counts_money=True) as step:
                run = await run_method(data, method, conditions, done=lambda s: step(1, _cost(s)))
            runs.append(run)
            note(_line(method, run[0]))
            if isinstance(conditions.ledger, RunStore):
                await asyncio.to_thread(_keep_thumbnails, conditions.ledger.path, data, method)
    finally:
        for model in models:
            await model.aclose()


def _keep_thumbnails(path: Path, data: Benchmark, method: Method) -> None:
    """What the report shows; its time is in no figure."""
    started = time.perf_counter()
    with progress("thumbnails", None) as step:
        made = keep_thumbnails(path, data, method, progress=step, on_error=warn)
    if made:
        note(f"{made} thumbnails for the report in {time.perf_counter() - started:.1f} s")


def _cost(scored: ScoredAnswer | None) -> float:
    return 0.0 if scored is None else scored.cost_usd or 0.0


def _line(method: Method, result: Result) -> str:
    value = "-" if result.value is None else f"{result.value:.3f}"
    cost = f", {result.cost_usd:.4f} USD" if result.cost_usd else ""
    return f"{method.title}: {value} in {result.seconds:.1f} s{cost}"


TITLE = "Bottega: it learned by looking"
BUNDLED_NOTE = (
    "The bundled model knows no names: zero-shot it says unknown. Its learning from examples shows "
    "beside random and balanced; what it adds to its own retriever shows beside vote."
)


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
    settings = Classifier(open_model(BUNDLED), labels=(), price=open_prices(None), seed=seed)
    runs: list[Run] = []
    shown = Shown("visual-rag", 5)
    conditions = Conditions(seed=seed, ledger=shown)
    measure(data, settings, Work(PAPER, (1, 5, 10, 20), traces=traces, conditions=conditions), runs)
    results = [result for result, _ in runs]
    rows = next(scored for r, scored in runs if (r.method, r.shots) == shown.key)
    facts = {
        "model": settings.generator.name,
        "images": "scikit-learn's handwritten digits, never used in training",
        "knowledge base": f"{len(data.knowledge)} labelled images, {kb_per_class} of each digit",
        "seed": str(seed),
        "made": f"{datetime.now(UTC):%Y-%m-%d} by bottega {__version__}",
    }
    page = render(results, rows, shown.by_place, title=TITLE, facts=facts, note=BUNDLED_NOTE)
    out.write_text(page, encoding="utf-8")
    if json:
        print_json({"page": str(out), "results": results})
        return
    print_results(data, results, paired(runs))
    note(BUNDLED_NOTE)
    say(f"the page: {out}")
