"""What `eval --out` kept, for people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bottega.cli.options import BenchmarkSpec, ItemLimit, Seed
from bottega.cli.output import note, say, warn
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.export import FORMATS, write_dataset
from bottega.evaluation.report.render import write_report


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders that bottega eval --out filled.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write.", show_default="report/ in the first folder"),
    ] = None,
) -> None:
    """One page that shows what runs did, with CSV, Markdown and plots.

    Several runs are compared: item by item where they asked the same. A run may still be going on,
    or have failures: its page says what is missing.
    """
    done = write_report(folders, out or folders[0] / "report")
    for section in done.sections:
        for row in section.rows:
            result = row.result
            if result.failed or result.missing:
                say(
                    f"{section.benchmark}, {row.title}: {result.n} of {section.asked} answered,"
                    f" {result.failed} failed, {result.missing} not asked"
                )
    if done.unplotted is not None:
        note(f"no plots: {done.unplotted} ({done.unplotted.hint})")
    say(f"the page: {done.files[0]}")
    note(f"beside it: {', '.join(file.name for file in done.files[1:])}")


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
    data = load_benchmark(benchmark, seed=seed, limit=limit, allow_overlap=True, on_error=warn)
    path = write_dataset(data, format, out)
    say(f"{len(data.items)} items: {path}")
    bare = sum(not item.query.images for item in data.items)
    if bare and format == "vlmevalkit":
        note(f"{bare} of them have no picture; VLMEvalKit leaves those out")
