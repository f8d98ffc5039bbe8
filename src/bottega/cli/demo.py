"""The command `bottega demo`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Annotated

from typer import Option

from bottega import __version__
from bottega._util.locations import StoreLocation
from bottega._util.progress import plural
from bottega.cli.components import open_prices, open_recorder
from bottega.cli.options import Json, Seed, TraceFile
from bottega.cli.output import check_output, note, print_json, say, warn
from bottega.cli.shown_progress import TERMINAL
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.built_in import LICENCES
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.method_comparison import run_methods
from bottega.evaluation.methods.planning import max_demonstrations
from bottega.evaluation.report.explanation import DemoPart, render_demo
from bottega.evaluation.runs.paired import PairedDifference, ScoredRun, paired_differences
from bottega.evaluation.runs.runner import DemonstrationRecorder, MethodResult, RunState
from bottega.knowledge.embedders.names import BUNDLED
from bottega.knowledge.embedders.photo_embedder import default_photos
from bottega.naming import default_embedder, has_photos, model_for, open_model
from bottega.recipes import Classifier

TITLE = "Bottega demo: Visual RAG"
METHODS = ("zero-shot", "random", "balanced", "visual-rag", "knn", "vote", "nearest", "logreg")
SHOTS = (1, 5, 10, 20)
COMPARED = 10  # demonstrations in the comparison; fewer if the benchmark has fewer examples
DIGITS_PER_CLASS = 10
BUNDLED_NOTE = (
    "The model knows no label names, so zero-shot it answers unknown. Compare it with random and"
    " balanced to see learning from examples, and with knn to see the gain over its own retriever."
)
WITHOUT_PHOTOS = "install bottega-vlm[photos] to include photographs"


@dataclass(frozen=True)
class DemoDataset:
    """Labelled images of one part of the page, and the embedder that retrieves them. The embedder
    determines the model."""

    title: str
    description: str
    data: Benchmark
    embed: str

    @property
    def model(self) -> str:
        return model_for(self.embed)


def demo(
    out: Annotated[Path, Option(metavar="FILE", help="Write the page to this file.")] = Path(
        "bottega-demo.html"
    ),
    folder: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Show these images instead: a folder with one subfolder per class.",
        ),
    ] = None,
    limit: Annotated[int, Option(min=1, help="Images evaluated by each method.")] = 200,
    kb_per_class: Annotated[
        int | None,
        Option(min=1, help="Labelled images per class (default: 10 for digits, else all)."),
    ] = None,
    seed: Seed = 0,
    traces: TraceFile = None,
    json: Json = False,
) -> None:
    """Run Visual RAG on handwriting and photographs that the bundled models never saw, or on your
    own images; write a page."""
    check_output(out)
    datasets = _datasets(folder, limit, kb_per_class, seed)
    parts = [_run(dataset, seed, traces) for dataset in datasets]
    facts = {"seed": str(seed), "created": f"{datetime.now(UTC):%Y-%m-%d} by bottega {__version__}"}
    out.write_text(render_demo(parts, title=TITLE, facts=facts), encoding="utf-8")
    if json:
        results = [{"part": part.title, **vars(r)} for part in parts for r in part.results]
        print_json({"page": str(out), "results": results})
        return
    for dataset, part in zip(datasets, parts, strict=True):
        _print_summary(dataset, part)
    if folder is None and len(parts) == 1:
        note(WITHOUT_PHOTOS)
    say(f"page: {out}")


def _datasets(
    folder: Path | None, limit: int, kb_per_class: int | None, seed: int
) -> Sequence[DemoDataset]:
    if folder is not None:
        spec = f"image-folder:{folder}"
        data = load_benchmark(spec, seed=seed, limit=limit, per_class=kb_per_class, on_error=warn)
        images = chain.from_iterable(example.query.images for example in data.knowledge)
        title = folder.resolve().name
        return [DemoDataset(title, f"images of {folder}", data, default_embedder(images))]
    digits = load_benchmark(
        "digits", seed=seed, limit=limit, per_class=kb_per_class or DIGITS_PER_CLASS
    )
    handwriting = "handwritten digits of scikit-learn, not used in training"
    datasets = [DemoDataset("Handwriting", handwriting, digits, BUNDLED)]
    if has_photos():
        tiles = load_benchmark("tiles", seed=seed, limit=limit, per_class=kb_per_class)
        datasets.append(DemoDataset("Photographs", LICENCES, tiles, default_photos()))
    return datasets


def _run(dataset: DemoDataset, seed: int, traces: StoreLocation | None) -> DemoPart:
    data = dataset.data
    available = max_demonstrations(data)
    shots = tuple(n for n in SHOTS if n <= available)
    settings = Classifier(open_model(dataset.model), labels=(), price=open_prices(None), seed=seed)
    config = RunConfig(methods=METHODS, shots=shots, seed=seed, embed=dataset.embed)
    recorder = DemonstrationRecorder("visual-rag", max(n for n in shots if n <= 5))
    runs: list[ScoredRun] = []
    state = RunState(recorder)
    display = replace(TERMINAL, note=lambda text: None)  # the summary has the results
    with open_recorder(traces) as record:
        run_methods(data, settings, config, runs, state=state, record=record, display=display)
    rows = next(scored for r, scored in runs if (r.method, r.shots) == recorder.key)
    compared = max(n for n in shots if n <= COMPARED)
    return DemoPart(
        title=dataset.title,
        results=[result for result, _ in runs],
        differences=[d for d in paired_differences(runs) if d.shots == compared],
        scored=rows,
        shown=recorder.by_index,
        facts={
            "images": dataset.description,
            "model": settings.generator.name,
            "embedder": dataset.embed,
            "labelled": f"{len(data.knowledge)} in {len(data.labels)} classes",
            "evaluated": str(len(data.items)),
        },
        note=BUNDLED_NOTE,
    )


def _print_summary(dataset: DemoDataset, part: DemoPart) -> None:
    """Print the difference to knn first, then every method at the same number of demonstrations."""
    data, model = dataset.data, part.facts["model"]
    say(
        f"{part.title}: {len(data.knowledge)} labelled and {len(data.items)} evaluated images,"
        f" {len(data.labels)} classes, {model}"
    )
    shots = part.differences[0].shots
    for line in chain(_differences(part.differences), _values(part.results, shots)):
        say(f"  {line}")


def _differences(differences: Sequence[PairedDifference]) -> Iterator[str]:
    for d in differences:
        if (d.method, d.against) == ("visual-rag", "knn"):
            shots = plural(d.shots, "demonstration")
            yield f"visual-rag minus knn, {shots}: {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"


def _values(results: Sequence[MethodResult], shots: int) -> Iterator[str]:
    values = []
    for r in results:
        if r.value is None or r.low is None or r.high is None or r.shots not in (0, 1, shots):
            continue
        if r.method == "visual-rag" and r.shots == shots:
            yield f"visual-rag {r.value:.3f} [{r.low:.3f}, {r.high:.3f}]"
        elif r.shots == shots or r.method in ("zero-shot", "nearest", "logreg"):
            values.append(f"{r.method} {r.value:.3f}")
    yield ", ".join(values)
