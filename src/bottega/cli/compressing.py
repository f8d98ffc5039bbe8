"""Compressors: training them, and compressing the passages of a knowledge base ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bottega.cli.compressor_settings import load_plan
from bottega.cli.evaluation_options import CompressorFolder
from bottega.cli.namespaces import check_filled
from bottega.cli.opening import open_rows
from bottega.cli.options import Json, KnowledgeFile, Namespace
from bottega.cli.output import note, print_json, progress, say
from bottega.evaluation.labels import is_passage
from bottega.naming import BUNDLED, check_torch
from bottega.recipes.compressing import bundled_for

compress = typer.Typer(
    no_args_is_help=True, help="Train what compresses passages (RACC), and compress them ahead."
)


@compress.command()
def train(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="A TOML file; docs/compression.md, in the repository, shows one whole.",
        ),
    ],
) -> None:
    """Train a compressor in front of a frozen model. Stopped halfway (Ctrl-C), the same command
    goes on where it was."""
    plan = load_plan(config)
    from bottega.cli.compressor_training import train_as_planned

    if not train_as_planned(plan):
        note("stopped; the same command goes on from there")
        raise typer.Exit(130)
    settings = plan.settings
    say(f"the compressor: {settings.out}")
    hyper = f" --hyper {settings.hyper}" if settings.hyper else ""
    note(
        "bottega eval ... --methods concat,racc,racc-oracle,racc-flat,racc-swapped --shots"
        f" {settings.shots} --model {settings.model} --compressor {settings.out}{hyper}"
        " says whether it reads"
    )


@compress.command()
def build(
    file: KnowledgeFile,
    store: Annotated[Path, typer.Option(help="The folder of the store; a new one is made.")],
    compressor: CompressorFolder = None,
    model: Annotated[
        str, typer.Option(help="The model that it was trained to compress with: bundled, ...")
    ] = BUNDLED,
    int8: Annotated[
        bool, typer.Option("--int8", help="A byte a number in place of two; says what is lost.")
    ] = False,
    all_examples: Annotated[
        bool,
        typer.Option("--all", help="Demonstrations too: examples with an answer, and that answer."),
    ] = False,
    namespace: Namespace = "",
    json: Json = False,
) -> None:
    """Compress the passages of a knowledge base ahead, so that no answer has to.

    What is there and unchanged is skipped: stopped halfway, or after passages were added or
    changed, the same command does the rest.
    """
    check_torch()
    from bottega.cli.compressor_models import loaded, local
    from bottega.cli.stored_passages import Building

    generator = local(model)
    folder = compressor or bundled_for(generator)
    with open_rows(file, namespace) as knowledge:
        check_filled(knowledge, file, namespace)
        work = Building.opened(folder, loaded(generator), store, int8=int8)
        with work.alone(), progress("compressing", len(knowledge)) as step:
            for example in knowledge:
                if all_examples or is_passage(example):
                    work.take(str(example.id), example)
                step(1)
            work.finish()
    if not work.seen:
        note("no example is without an answer; --all compresses those with one, as demonstrations")
    if json:
        print_json(work.told)
    else:
        _say(work.told, store)


def _say(told: dict[str, float | None], store: Path) -> None:
    say(
        f"{told['passages']} passages, {told['compressed']} compressed now,"
        f" {told['kept']} in {store}"
    )
    if told["text_bytes"] is not None:
        say(
            f"a passage: {told['text_bytes']:.0f} bytes of text, {told['fp16_bytes']} as fp16,"
            f" {told['int8_bytes']} as int8"
        )
    if told["int8_error"] is not None:
        say(f"int8 is off by {told['int8_error']:.2%} of fp16 in the mean of those compressed now")
