"""The command `bottega demo`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from typer import Option

from bottega import __version__
from bottega.cli.components import open_prices
from bottega.cli.evaluation_run import MethodResult, check_output, print_results, run_methods
from bottega.cli.options import Json, Seed, TraceFile
from bottega.cli.output import note, print_json, say
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods import PAPER_METHODS, REFERENCE
from bottega.evaluation.page import render_demo
from bottega.evaluation.paired import paired_differences
from bottega.evaluation.run_store import DemonstrationRecorder
from bottega.evaluation.runner import RunState
from bottega.knowledge.embedders.names import BUNDLED
from bottega.naming import open_model
from bottega.recipes import Classifier

TITLE = "Bottega demo: Visual RAG"
BUNDLED_NOTE = (
    "The bundled model knows no label names, so zero-shot it answers unknown. Compare it with"
    " random and balanced to see learning from examples, and with vote to see the gain over its"
    " own retriever."
)


def demo(
    out: Annotated[Path, Option(help="Write the page to this file.")] = Path("bottega-demo.html"),
    limit: Annotated[int, Option(min=1, help="Items evaluated by each method.")] = 200,
    kb_per_class: Annotated[int, Option(min=1, help="Labelled examples of each digit.")] = 10,
    seed: Seed = 0,
    traces: TraceFile = None,
    json: Json = False,
) -> None:
    """Run Visual RAG on handwritten digits that the bundled model never saw; write a page."""
    check_output(out)
    data = load_benchmark("digits", seed=seed, limit=limit, per_class=kb_per_class)
    settings = Classifier(open_model(BUNDLED), labels=(), price=open_prices(None), seed=seed)
    config = RunConfig(methods=(*PAPER_METHODS, REFERENCE), shots=(1, 5, 10, 20), seed=seed)
    recorder = DemonstrationRecorder("visual-rag", 5)
    runs: list[MethodResult] = []
    run_methods(data, settings, config, runs, state=RunState(recorder), traces=traces)
    results = [result for result, _ in runs]
    rows = next(scored for r, scored in runs if (r.method, r.shots) == recorder.key)
    facts = {
        "model": settings.generator.name,
        "images": "handwritten digits of scikit-learn, not used in training",
        "knowledge base": f"{len(data.knowledge)} labelled images, {kb_per_class} of each digit",
        "seed": str(seed),
        "created": f"{datetime.now(UTC):%Y-%m-%d} by bottega {__version__}",
    }
    page = render_demo(
        results, rows, recorder.by_index, title=TITLE, facts=facts, note=BUNDLED_NOTE
    )
    out.write_text(page, encoding="utf-8")
    if json:
        print_json({"page": str(out), "results": results})
        return
    print_results(data, results, paired_differences(runs))
    note(BUNDLED_NOTE)
    say(f"page: {out}")
