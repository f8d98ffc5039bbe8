"""The demonstration: handwritten digits in a table and on a page."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from bottega import __version__
from bottega.cli.measuring import Run, Work, check_output, measure, print_results
from bottega.cli.options import Json, Seed, TraceFile
from bottega.cli.output import note, print_json, say
from bottega.cli.resolving import open_prices
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.ledger import Shown
from bottega.evaluation.methods import PAPER
from bottega.evaluation.page import render
from bottega.evaluation.pairing import paired
from bottega.evaluation.runner import Conditions
from bottega.naming import BUNDLED, open_model
from bottega.recipes import Classification

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
    settings = Classification(open_model(BUNDLED), labels=(), price=open_prices(None), seed=seed)
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
