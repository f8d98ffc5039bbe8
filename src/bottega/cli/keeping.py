"""Keeping a knowledge base in order: copies, checks, new vectors, pins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bottega.cli.namespaces import counted, option_for, others, whole_name
from bottega.cli.opening import open_rows, open_to_add, open_to_repair
from bottega.cli.options import Embed, Json, KnowledgeFile, Namespace
from bottega.cli.output import note, print_json, progress, say, warn
from bottega.cli.resolving import open_embedder
from bottega.cli.views import note_maker, to_reindex
from bottega.errors import BottegaError

Ids = Annotated[list[str], typer.Argument(help="Ids, or the beginnings of ids, as ls shows.")]


def export(
    file: KnowledgeFile,
    folder: Annotated[Path, typer.Argument(help="A folder that is new or empty.")],
    namespace: Namespace = "",
    json: Json = False,
) -> None:
    """Write a namespace's examples as examples.jsonl and a folder of images. Exits with 1 if any is
    damaged: it is named, and the others are written."""
    bad: list[BottegaError] = []

    def on_bad(error: BottegaError) -> None:
        bad.append(error)
        warn(error)

    with open_rows(file, namespace) as knowledge, progress("exporting", len(knowledge)) as step:
        count = knowledge.export_to(folder, on_bad=on_bad, progress=step)
        left = others(knowledge, namespace)
    if json:
        skipped = [{"reason": str(error), "hint": error.hint} for error in bad]
        print_json({"examples": count, "skipped": skipped})
    else:
        say(f"{count} examples written to {folder}, {len(bad)} skipped")
    if left:
        note(f"not exported: {counted(left)}; name another folder and {option_for(left)}")
    if bad:
        raise typer.Exit(1)


def import_(
    file: KnowledgeFile,
    folder: Annotated[Path, typer.Argument(help="A folder that bottega export wrote.")],
    namespace: Namespace = "",
    embed: Embed = None,
    json: Json = False,
) -> None:
    """Add what export wrote, with pins and counters. Vectors are made anew."""
    bad: list[BottegaError] = []

    def on_bad(error: BottegaError) -> None:
        bad.append(error)
        warn(error)

    with open_to_add(file, embed, namespace) as knowledge, progress("adding", None) as step:
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
            f"{whole_name(file, namespace)} holds {total} examples"
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
    with open_to_repair(file, embed) if deep or repair else open_rows(file) as knowledge:
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
        if not repair:
            options = f"{'--deep ' * deep}--repair{f' --embed {embed}' if embed else ''}"
            note(f"bottega verify {file} {options} makes vectors, log and index files anew")
        raise typer.Exit(1)


def reindex(
    file: KnowledgeFile,
    embed: Embed = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="The view to make anew, or a new one (default: the only one, or 'default')."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Embed all examples of every namespace with another embedder.

    Stopped halfway, it goes on where it was.
    """
    with open_rows(file) as knowledge:
        name, spec = to_reindex(knowledge, embed, by, file)
        embedder = open_embedder(spec)
        total, done = sum(knowledge.namespaces().values()), 0
        with progress("embedding", total) as step:

            def count_and_step(steps: int) -> None:
                nonlocal done
                done += steps
                step(steps)

            try:
                count = knowledge.reindex(name, embedder, progress=count_and_step)
            except KeyboardInterrupt:
                note(f"stopped at {done} of {total} examples; the same command goes on from there")
                raise typer.Exit(130) from None
        note_maker(knowledge, name, spec)
    if json:
        print_json({"view": name, "embedded": count, "embedder": embedder.fingerprint})
    else:
        say(f"{count} examples embedded by {embedder.fingerprint} as {name}")


def pin(file: KnowledgeFile, ids: Ids, namespace: Namespace = "", json: Json = False) -> None:
    """Never evict these examples."""
    with open_rows(file, namespace) as knowledge:
        _say_pinned(knowledge.pin(ids), knowledge.stats().pinned, json)


def unpin(file: KnowledgeFile, ids: Ids, namespace: Namespace = "", json: Json = False) -> None:
    """Let these examples be evicted again."""
    with open_rows(file, namespace) as knowledge:
        _say_pinned(knowledge.unpin(ids), knowledge.stats().pinned, json)


def _say_pinned(changed: int, count: int, json: bool) -> None:
    if json:
        print_json({"changed": changed, "pinned": count})
    else:
        say(f"{changed} changed; {count} pinned")
