"""Keeping a knowledge base in order: copies, checks, new vectors, pins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bottega.cli.options import Embed, Json, KnowledgeFile
from bottega.cli.output import print_json, progress, say, warn
from bottega.cli.resolving import BUNDLED, open_embedder, open_knowledge, open_rows
from bottega.errors import BottegaError

Ids = Annotated[list[str], typer.Argument(help="Ids, or the beginnings of ids, as ls shows.")]


def export(
    file: KnowledgeFile,
    folder: Annotated[Path, typer.Argument(help="A folder that is new or empty.")],
    json: Json = False,
) -> None:
    """Write all examples as examples.jsonl and a folder of images. Exits with 1 if any is damaged:
    it is named, and the others are written."""
    bad: list[BottegaError] = []

    def on_bad(error: BottegaError) -> None:
        bad.append(error)
        warn(error)

    with open_rows(file) as knowledge, progress("exporting", len(knowledge)) as step:
        count = knowledge.export_to(folder, on_bad=on_bad, progress=step)
    if json:
        skipped = [{"reason": str(error), "hint": error.hint} for error in bad]
        print_json({"examples": count, "skipped": skipped})
    else:
        say(f"{count} examples written to {folder}, {len(bad)} skipped")
    if bad:
        raise typer.Exit(1)


def import_(
    file: KnowledgeFile,
    folder: Annotated[Path, typer.Argument(help="A folder that bottega export wrote.")],
    embed: Embed = None,
    json: Json = False,
) -> None:
    """Add what export wrote, with pins and counters. Vectors are made anew."""
    bad: list[BottegaError] = []

    def on_bad(error: BottegaError) -> None:
        bad.append(error)
        warn(error)

    with open_knowledge(file, embed, create=True) as knowledge, progress("adding", None) as step:
        added = knowledge.import_from(folder, on_bad=on_bad, progress=step)
        total = len(knowledge)
    if json:
        print_json(
            {
                "new": added.new,
                "duplicates": added.duplicates,
                "skipped": len(bad),
                "examples": total,
            }
        )
    else:
        say(
            f"{added.new} added, {added.duplicates} were there already, {len(bad)} skipped; "
            f"{file} holds {total} examples"
        )


def verify(
    file: KnowledgeFile,
    repair: Annotated[
        bool, typer.Option("--repair", help="Make vectors, log and index files again.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Embed every example again and compare the vectors.")
    ] = False,
    embed: Embed = None,
    json: Json = False,
) -> None:
    """Check images, vectors and index files against the rows. Exits with 1 if any is wrong."""
    # The embedder is only needed to make vectors again.
    with open_knowledge(file, embed) if deep or repair else open_rows(file) as knowledge:
        found = knowledge.verify(deep=deep, repair=repair)
    if json:
        print_json({"sound": found.sound, **vars(found)})
    else:
        for problem in found.problems:
            say(f"{'repaired' if problem.repaired else 'WRONG'}: {problem.what}")
        say(
            f"{found.examples} examples, {found.images} images, {found.vectors} vectors, "
            f"{found.snapshots} index files: {'sound' if found.sound else 'not sound'}"
        )
    if not found.sound:
        raise typer.Exit(1)


def reindex(
    file: KnowledgeFile,
    embed: Embed = None,
    by: Annotated[
        str | None, typer.Option(help="The view to make anew, or a new one (default: the first).")
    ] = None,
    json: Json = False,
) -> None:
    """Embed all examples with another embedder. Stopped halfway, it goes on where it was."""
    with open_rows(file) as knowledge:
        spec = embed or knowledge.note("embed") or BUNDLED
        name = by or next(iter(knowledge.stats().views), "default")
        embedder = open_embedder(spec)
        with progress("embedding", len(knowledge)) as step:
            count = knowledge.reindex(name, embedder, progress=step)
        if by is None:
            knowledge.set_note("embed", spec)
    if json:
        print_json({"view": name, "embedded": count, "embedder": embedder.fingerprint})
    else:
        say(f"{count} examples embedded by {embedder.fingerprint} as {name}")


def pin(file: KnowledgeFile, ids: Ids, json: Json = False) -> None:
    """Never evict these examples."""
    with open_rows(file) as knowledge:
        knowledge.pin(ids)
        _say_pinned(knowledge.stats().pinned, json)


def unpin(file: KnowledgeFile, ids: Ids, json: Json = False) -> None:
    """Let these examples be evicted again."""
    with open_rows(file) as knowledge:
        knowledge.unpin(ids)
        _say_pinned(knowledge.stats().pinned, json)


def _say_pinned(count: int, json: bool) -> None:
    if json:
        print_json({"pinned": count})
    else:
        say(f"{count} pinned")
