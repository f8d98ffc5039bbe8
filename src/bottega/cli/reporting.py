"""What `eval --out` kept, for people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bottega.cli.output import note, say
from bottega.evaluation.report.writing import write_report


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
