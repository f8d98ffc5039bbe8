"""What `bottega compress train` reads: one TOML file."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bottega.cli.evaluation_options import CompressorFolder
from bottega.cli.opening import check_filled, open_rows
from bottega.cli.output import Json, KnowledgeFile, Namespace, note, print_json, progress, say
from bottega.errors import SettingError
from bottega.evaluation.labels import is_passage
from bottega.evaluation.search_methods import RETRIEVE
from bottega.gateway.config.settings import (
    Place,
    Table,
    as_table,
    check_known,
    one_of,
    read,
    within,
)
from bottega.naming import BUNDLED, check_torch
from bottega.recipes.racc import bundled_for

if TYPE_CHECKING:
    from bottega.compression import CompressorConfig
    from bottega.compression.objective import TrainingConfig


EXAMPLE = "docs/compression.md shows a whole file"


@dataclass(frozen=True)
class Settings:
    """`hyper` compresses for `model`, which does it itself without. `layer` is the one of `hyper`
    whose states are read. `calibrate` lessons are looked at before the first step, 0: none."""

    benchmark: str
    out: Path
    model: str = BUNDLED
    hyper: str | None = None
    layer: int = -1
    seed: int = within(0, 0, 2**63 - 1)
    passages: str | None = None
    retrieve: str = one_of("hybrid", *RETRIEVE)
    embed: str = BUNDLED
    shots: int = within(5, 1)
    hard: float = within(0.5, 0, 1)
    batch: int = within(2, 1)
    calibrate: int = within(256, 0)
    validate: int = within(0, 0)


@dataclass(frozen=True)
class Plan:
    """The shape's width and geometry are still to be told by the two models."""

    settings: Settings
    shape: CompressorConfig
    course: TrainingConfig


def load_plan(file: Path) -> Plan:
    """Raises `SettingError` for all that can be seen before a model is loaded."""
    check_torch()
    from bottega.compression import CompressorConfig
    from bottega.compression.objective import TrainingConfig
    from bottega.kv_prefix import Geometry

    document, at = _parsed(file), Place(str(file))
    names = [one.name for one in fields(Settings)]
    check_known(document, [*names, "shape", "course"], at)
    top = {name: value for name, value in document.items() if name in names}
    _check_given(Settings, top, at)
    course = as_table(document.get("course", {}), at / "course")
    _check_given(TrainingConfig, course, at / "course")
    told = {"width": 0, "geometry": Geometry(0, 0, 0)}
    plan = Plan(
        read(Settings, top, at),
        read(CompressorConfig, document.get("shape", {}), at / "shape", **told),
        read(TrainingConfig, course, at / "course"),
    )
    _check_out(plan.settings.out, str(top["out"]), at / "out")
    _check_pairs(plan, at)
    return plan


def _parsed(file: Path) -> Table:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingError(f"{file} cannot be read: {reason}", hint=EXAMPLE) from error
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{file} is not TOML: {error}", hint=EXAMPLE) from error


def _check_given(kind: type[Settings] | type[TrainingConfig], table: Table, at: Place) -> None:
    for one in fields(kind):
        if one.default is MISSING and one.name not in table:
            raise (at / one.name).error("is missing", hint=EXAMPLE)


def _check_out(out: Path, written: str, at: Place) -> None:
    if not written.strip():
        raise at.error("is empty", hint='name a folder: out = "compressor"')
    if out.exists() and not out.is_dir():
        raise at.error("is a file", hint='name a folder: out = "compressor"')


def _check_pairs(plan: Plan, at: Place) -> None:
    """Settings that make no sense without another."""
    if plan.settings.validate and not plan.course.validate_every:
        raise (at / "validate").error(
            "sets questions aside, and nobody asks them", hint="[course] validate_every = 100"
        )
    if plan.course.validate_every and not plan.settings.validate:
        raise (at / "course" / "validate_every").error(
            "needs questions that are set aside", hint="validate = 50"
        )


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
    from bottega.cli.compressor_jobs import train_as_planned

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
    from bottega.cli.compressor_jobs import StoreBuilder, loaded, local

    generator = local(model)
    folder = compressor or bundled_for(generator)
    with open_rows(file, namespace) as knowledge:
        check_filled(knowledge, file, namespace)
        work = StoreBuilder.opened(folder, loaded(generator), store, int8=int8)
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
