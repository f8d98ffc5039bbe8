"""Benchmarks for other evaluation programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bottega.cli.evaluation_options import BenchmarkSpec, ItemLimit
from bottega.cli.options import Seed
from bottega.cli.output import note, say, warn
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.exporting import FORMATS, write_dataset


def dataset(
    benchmark: BenchmarkSpec,
    format: Annotated[str, typer.Option(help=f"{' or '.join(FORMATS)}.")],
    out: Annotated[Path, typer.Option(help="The folder to write to.")],
    limit: ItemLimit = None,
    seed: Seed = 0,
) -> None:
    """Write the items that eval would ask, with their pictures, for another program.

    inspect: JSONL for inspect_ai's json_dataset. vlmevalkit: a TSV for VLMEvalKit's LMUData folder.
    What may be shown as examples stays here, and so do metrics with several right answers.
    """
    # Nothing is shown to anybody here, so nothing can give an answer away.
    data = load_benchmark(benchmark, seed=seed, limit=limit, allow_overlap=True, on_bad=warn)
    path = write_dataset(data, format, out)
    say(f"{len(data.items)} items: {path}")
    bare = sum(not item.query.images for item in data.items)
    if bare and format == "vlmevalkit":
        note(f"{bare} of them have no picture; VLMEvalKit leaves those out")
