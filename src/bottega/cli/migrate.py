"""The command `bottega migrate`."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from bottega._util.locations import StoreLocation
from bottega._util.progress import plural
from bottega.cli.options import Json
from bottega.cli.output import note, noting_interruption, print_json, print_table, say
from bottega.cli.shown_progress import progress
from bottega.errors import StoreError
from bottega.knowledge.base_copy import BaseCopy, Comparison, open_copy

SHOWN_DIGITS = 16


def migrate(
    source: Annotated[
        StoreLocation,
        Argument(
            metavar="FROM",
            parser=StoreLocation.from_argument,
            help="Knowledge base: a file, or postgresql://USER@HOST/DATABASE.",
        ),
    ],
    target: Annotated[
        StoreLocation,
        Argument(
            metavar="TO",
            parser=StoreLocation.from_argument,
            help="New file, or URL of a database without a knowledge base.",
        ),
    ],
    json: Json = False,
) -> None:
    """Copy a knowledge base between files and PostgreSQL, and compare the two.

    Ids, vectors, pins, counters, settings and change numbers are copied. Stop processes that write
    to FROM first. After an interruption, the same command resumes. Exits with 1 if the copy
    differs."""
    with open_copy(source.target, target.target) as copy:
        kept = f"{copy.target_name} keeps the rows copied so far; repeat the command to resume"
        with noting_interruption(lambda: kept):
            with progress("copying", copy.total) as step:
                written = copy.run(step)
            with progress("comparing", copy.total) as step:
                compared = copy.finish(step)
        if json:
            _print_document(copy, written, compared)
        else:
            _print_text(copy, written, compared)
    for left in compared.uncopied:
        note(f"not copied: {left}")
    if not compared.equal:
        raise StoreError(
            f"{copy.target_name} differs from {copy.source_name}:"
            f" {'; '.join(compared.differences)}",
            hint="stop the processes that write to FROM or TO, and repeat the command",
        )


def _print_document(copy: BaseCopy, written: int, compared: Comparison) -> None:
    print_json(
        {
            "from": copy.source_name,
            "to": copy.target_name,
            "written": written,
            "equal": compared.equal,
            "parts": compared.parts,
            "differences": compared.differences,
            "not_copied": compared.uncopied,
        }
    )


def _print_text(copy: BaseCopy, written: int, compared: Comparison) -> None:
    print_table(
        ("part", "number", "sha256"),
        [(part.name, part.count, part.digest[:SHOWN_DIGITS]) for part in compared.parts],
    )
    outcome = "equal" if compared.equal else "DIFFERENT"
    say(
        f"{plural(written, 'example')} written to {copy.target_name}; {outcome} to"
        f" {copy.source_name}"
    )
