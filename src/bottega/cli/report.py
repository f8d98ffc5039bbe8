"""The commands `bottega report` and `bottega dataset`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from bottega._util.progress import plural
from bottega.cli.options import BenchmarkSpec, ItemLimit, Seed
from bottega.cli.output import note, noting_interruption, say, waiting, warn
from bottega.cli.shown_progress import progress
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.report.exports import FORMATS, write_dataset, write_predictions
from bottega.evaluation.report.render import write_report


def report(
    folders: Annotated[
        list[Path], Argument(metavar="DIR", help="Run folders of bottega eval or stream --out.")
    ],
    out: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Write to this folder.",
            show_default="report/ in the first folder",
        ),
    ] = None,
    predictions: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Also write the answers as JSON for A-OKVQA's leaderboard. Pass one run, or one "
            "with answers=choices and one without.",
        ),
    ] = None,
) -> None:
    """Write a page about runs, with CSV, Markdown and plots.

    Several runs are compared, item by item if their items are equal. Runs may be in progress or
    have failures: the page lists missing items.
    """
    if predictions is not None:
        count = write_predictions(folders, predictions)
        say(f"{plural(count.questions, 'prediction')}: {predictions}")
        if count.missing:
            note(f"no prediction for {plural(count.missing, 'item')} without a valid answer")
    target = out or folders[0] / "report"
    with noting_interruption(lambda: f"{target} may be incomplete; repeat the command"):
        done = write_report(folders, target, progress)
    for section in done.sections:
        for row in section.rows:
            result = row.result
            if result.failed or result.missing:
                say(
                    f"{section.benchmark}, {row.title}: {result.n} of {section.item_count}"
                    f" answered, {result.failed} failed, {result.missing} missing"
                )
    for streams in done.streams:
        if streams.incomplete:
            say(
                f"{streams.config.benchmark}: {len(streams.incomplete)} of"
                f" {plural(streams.planned, 'stream')} unfinished"
            )
    if done.unplotted is not None:
        note(f"no plots: {done.unplotted} ({done.unplotted.hint})")
    say(f"page: {done.files[0]}")
    note(f"other files: {', '.join(file.name for file in done.files[1:])}")


def dataset(
    benchmark: BenchmarkSpec,
    format: Annotated[str, Option(metavar="NAME", help=f"Format: {' or '.join(FORMATS)}.")],
    out: Annotated[Path, Option(metavar="FOLDER", help="Write to this folder.")],
    limit: ItemLimit = None,
    seed: Seed = 0,
) -> None:
    """Export the evaluated items with their images for another program.

    inspect: JSONL for inspect_ai's json_dataset. vlmevalkit: a TSV for VLMEvalKit's LMUData folder.
    Knowledge-base examples and metrics with several right answers are not exported.
    """
    # Overlap is harmless here: no examples are shown.
    with waiting("reading the benchmark"):
        data = load_benchmark(benchmark, seed=seed, limit=limit, allow_overlap=True, on_error=warn)
    path = write_dataset(data, format, out)
    say(f"{plural(len(data.items), 'item')}: {path}")
    bare = sum(not item.query.images for item in data.items)
    if bare and format == "vlmevalkit":
        note(f"{bare} of them have no image; VLMEvalKit skips those")
