"""The commands `bottega compress train` and `bottega compress build`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field, NonNegativeInt, PositiveInt

from bottega._util.settings import (
    FilePath,
    SettingPath,
    as_table,
    check_names,
    one_of,
    read_settings,
    read_toml,
)
from bottega.cli.components import local_model
from bottega.cli.knowledge_files import check_filled, open_rows
from bottega.cli.options import CompressorFolder, Json, KnowledgeFile, Namespace
from bottega.cli.output import note, print_json, progress, say
from bottega.evaluation.examples import is_passage
from bottega.evaluation.retriever_factory import RETRIEVE
from bottega.naming import BUNDLED, check_torch
from bottega.recipes.racc import bundled_compressor_for

if TYPE_CHECKING:
    from bottega.compression import CompressorConfig
    from bottega.compression.objective import TrainingConfig


EXAMPLE = "docs/compression.md shows a whole file"


@dataclass(frozen=True)
class Settings:
    """Top-level settings of a training file. `hyper` compresses for `model`; without it, `model`
    compresses itself. `layer` of `hyper` provides the hidden states. `calibrate` is the number of
    lessons measured before the first step, or 0."""

    benchmark: str
    out: FilePath
    model: str = BUNDLED
    hyper: str | None = None
    layer: int = -1
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    passages: str | None = None
    retrieve: Annotated[str, one_of(*RETRIEVE)] = "hybrid"
    embed: str = BUNDLED
    shots: PositiveInt = 5
    hard: Annotated[float, Field(ge=0, le=1)] = 0.5
    batch: PositiveInt = 2
    calibrate: NonNegativeInt = 256
    validate: NonNegativeInt = 0


@dataclass(frozen=True)
class Plan:
    """Settings of a training. Width and geometry of the shape are filled in from the models."""

    settings: Settings
    shape: CompressorConfig
    course: TrainingConfig


def load_plan(file: Path) -> Plan:
    """Read the TOML file. Raises `SettingError` for errors visible before a model is loaded."""
    check_torch()
    from bottega.compression import CompressorConfig
    from bottega.compression.objective import TrainingConfig
    from bottega.kv_prefix import Geometry

    document, path = read_toml(file, hint=EXAMPLE), SettingPath(str(file))
    names = [one.name for one in fields(Settings)]
    check_names(document, [*names, "shape", "course"], path)
    top = {name: value for name, value in document.items() if name in names}
    course = as_table(document.get("course", {}), path / "course")
    settings = read_settings(Settings, top, path, missing=EXAMPLE)
    training = read_settings(TrainingConfig, course, path / "course", missing=EXAMPLE)
    plan = Plan(
        settings,
        read_settings(
            CompressorConfig,
            document.get("shape", {}),
            path / "shape",
            width=0,
            geometry=Geometry(0, 0, 0),
        ),
        training,
    )
    _check_out(plan.settings.out, str(top["out"]), path / "out")
    _check_pairs(plan, path)
    return plan


def _check_out(out: Path, written: str, path: SettingPath) -> None:
    if not written.strip():
        raise path.error("is empty", hint='name a folder: out = "compressor"')
    if out.exists() and not out.is_dir():
        raise path.error("is a file", hint='name a folder: out = "compressor"')


def _check_pairs(plan: Plan, path: SettingPath) -> None:
    """Check settings that require each other."""
    if plan.settings.validate and not plan.course.validate_every:
        raise (path / "validate").error(
            "holds out questions, but validate_every is not set",
            hint="[course] validate_every = 100",
        )
    if plan.course.validate_every and not plan.settings.validate:
        raise (path / "course" / "validate_every").error(
            "needs validation questions", hint="validate = 50"
        )


compress = typer.Typer(
    no_args_is_help=True, help="Train a passage compressor (RACC) and pre-compress passages."
)


@compress.command()
def train(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="TOML file; see docs/compression.md for a complete one.",
        ),
    ],
) -> None:
    """Train a compressor for a frozen model. After Ctrl-C, the same command resumes."""
    plan = load_plan(config)
    from bottega.cli.compressor_training import train_as_planned

    if not train_as_planned(plan):
        note("stopped; repeat the command to resume")
        raise typer.Exit(130)
    settings = plan.settings
    say(f"compressor: {settings.out}")
    hyper = f" --hyper {settings.hyper}" if settings.hyper else ""
    note(
        "bottega eval ... --methods concat,racc,racc-oracle,racc-flat,racc-swapped --shots"
        f" {settings.shots} --model {settings.model} --compressor {settings.out}{hyper}"
        " measures its accuracy"
    )


@compress.command()
def build(
    file: KnowledgeFile,
    store: Annotated[Path, typer.Option(help="Folder of the store; created if missing.")],
    compressor: CompressorFolder = None,
    model: Annotated[
        str, typer.Option(help="Model that the compressor was trained with: bundled, ...")
    ] = BUNDLED,
    int8: Annotated[
        bool,
        typer.Option("--int8", help="Store one byte per number instead of two; report the loss."),
    ] = False,
    all_examples: Annotated[
        bool,
        typer.Option(
            "--all", help="Include demonstrations: examples with an answer, and the answer."
        ),
    ] = False,
    namespace: Namespace = "",
    json: Json = False,
) -> None:
    """Pre-compress the passages of a knowledge base.

    Unchanged passages are skipped: after an interruption or changes, the same command compresses
    the rest.
    """
    check_torch()
    from bottega.cli.compressor_training import StoreBuilder, loaded

    generator = local_model(model)
    folder = compressor or bundled_compressor_for(generator)
    with open_rows(file, namespace) as knowledge:
        check_filled(knowledge, file, namespace)
        builder = StoreBuilder.open(folder, loaded(generator), store, int8=int8)
        with builder.lock(), progress("compressing", len(knowledge)) as step:
            for example in knowledge:
                if all_examples or is_passage(example):
                    builder.add(str(example.id), example)
                step(1)
            builder.finish()
    if not builder.seen:
        note("all examples have an answer; compress them as demonstrations with --all")
    if json:
        print_json(builder.summary)
    else:
        _print_summary(builder.summary, store)


def _print_summary(summary: dict[str, float | None], store: Path) -> None:
    say(
        f"{summary['passages']} passages, {summary['compressed']} compressed now,"
        f" {summary['kept']} in {store}"
    )
    if summary["text_bytes"] is not None:
        say(
            f"a passage: {summary['text_bytes']:.0f} bytes of text,"
            f" {summary['fp16_bytes']} as fp16, {summary['int8_bytes']} as int8"
        )
    if summary["int8_error"] is not None:
        error = summary["int8_error"]
        say(f"int8 differs from fp16 by {error:.2%} on average, over passages compressed now")
