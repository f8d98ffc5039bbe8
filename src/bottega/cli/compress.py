"""The commands `bottega compress train` and `bottega compress build`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeInt, PositiveInt
from typer import Argument, Exit, Option, Typer

from bottega._util.settings import (
    FilePath,
    SettingPath,
    check_names,
    one_of,
    read_settings,
    read_toml,
)
from bottega.cli.components import LOCAL, check_executor, local_model, open_executor
from bottega.cli.knowledge_files import check_filled, open_rows
from bottega.cli.options import CompressorFolder, Json, KnowledgeFile, Namespace, On, WorkerCount
from bottega.cli.output import note, print_json, say
from bottega.cli.progress import Step, progress
from bottega.evaluation.examples import is_passage
from bottega.knowledge.embedders.names import BUNDLED
from bottega.naming import check_torch
from bottega.recipes.cache_retrieval import BY_DRAFT
from bottega.recipes.cache_retrieval import RETRIEVE as ALL_RETRIEVE
from bottega.recipes.racc import bundled_compressor_for
from bottega.types import Example

if TYPE_CHECKING:
    from bottega.compression import CompressorConfig
    from bottega.compression.objective import TrainingConfig


RETRIEVE = tuple(name for name in ALL_RETRIEVE if name not in BY_DRAFT)
HELP = "see docs/compression.md for a complete file"


@dataclass(frozen=True)
class Settings:
    """Settings of a training. `hyper` is the model that compresses, `model` by default; `layer` is
    the layer of `hyper` whose states are read. `calibrate` training examples set the scales before
    the first step; 0 disables it."""

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
    hard_negatives: Annotated[float, Field(ge=0, le=1)] = 0.5
    batch: PositiveInt = 2
    calibrate: NonNegativeInt = 256
    validate: NonNegativeInt = 0


@dataclass(frozen=True)
class Plan:
    """Settings, architecture and optimizer of a training. The models set the architecture's width
    and geometry later."""

    settings: Settings
    compressor: CompressorConfig
    training: TrainingConfig


def load_plan(file: Path) -> Plan:
    """Read the TOML file. Raises `SettingError` for errors visible before a model is loaded."""
    check_torch()
    from bottega.compression import CompressorConfig
    from bottega.compression.objective import TrainingConfig
    from bottega.compression.persistence import RENAMED
    from bottega.kv_prefix import Geometry

    document, path = read_toml(file, hint=HELP), SettingPath(str(file))
    names = [one.name for one in fields(Settings)]
    check_names(document, [*names, "compressor", "training"], path, RENAMED)
    top = {name: value for name, value in document.items() if name in names}
    plan = Plan(
        read_settings(Settings, top, path, missing=HELP),
        training=read_settings(
            TrainingConfig,
            document.get("training", {}),
            path / "training",
            missing=HELP,
            renamed=RENAMED,
        ),
        compressor=read_settings(
            CompressorConfig,
            document.get("compressor", {}),
            path / "compressor",
            width=0,
            geometry=Geometry(0, 0, 0),
        ),
    )
    out, validate_every = plan.settings.out, plan.training.validate_every
    if not str(top["out"]).strip() or (out.exists() and not out.is_dir()):
        problem = "must be a folder, got a file" if out.is_file() else "is empty"
        raise (path / "out").error(problem, hint='name a folder: out = "compressor"')
    if plan.settings.validate and not validate_every:
        raise (path / "validate").error(
            "needs validate_every in [training]",
            hint="set validate_every = 100 in [training]",
        )
    if validate_every and not plan.settings.validate:
        raise (path / "training" / "validate_every").error(
            "needs validation questions", hint="set validate = 50"
        )
    return plan


compress = Typer(
    no_args_is_help=True, help="Train a passage compressor (RACC) and pre-compress passages."
)


@compress.command()
def train(
    config: Annotated[
        Path,
        Argument(metavar="CONFIG", help="TOML file; see docs/compression.md for a complete one."),
    ],
) -> None:
    """Train a compressor for a frozen model. After Ctrl-C, the same command resumes."""
    plan = load_plan(config)
    from bottega.cli.compressor_training import train_compressor

    if not train_compressor(plan):
        note("stopped; repeat the command to resume")
        raise Exit(130)
    settings = plan.settings
    say(f"compressor: {settings.out}")
    hyper = f" --hyper {settings.hyper}" if settings.hyper else ""
    note(
        "to test whether it uses the passages: bottega eval ... --methods"
        f" concat,racc,racc-oracle,racc-flat,racc-swapped --shots {settings.shots}"
        f" --model {settings.model} --compressor {settings.out}{hyper}"
    )


@compress.command()
def build(
    file: KnowledgeFile,
    store: Annotated[Path, Option(help="Folder of the store; created if missing.")],
    compressor: CompressorFolder = None,
    model: Annotated[
        str,
        Option(help="Model of the compressor: bundled, a folder, or a Hugging Face id."),
    ] = BUNDLED,
    int8: Annotated[
        bool, Option("--int8", help="Store one byte per number instead of two; report the loss.")
    ] = False,
    all_examples: Annotated[
        bool,
        Option("--all", help="Include examples with an answer; the answer is compressed too."),
    ] = False,
    namespace: Namespace = "",
    on: On = LOCAL,
    workers: WorkerCount = None,
    json: Json = False,
) -> None:
    """Pre-compress the passages of a knowledge base. Unchanged passages are skipped: after an
    interruption or changes, the same command compresses the rest."""
    check_torch()
    check_executor(on, workers)
    from bottega.cli.compressor_training import StoreBuilder

    folder = compressor or bundled_compressor_for(local_model(model))
    with open_rows(file, namespace) as knowledge:
        check_filled(knowledge, file, namespace)
        with (
            open_executor(on, workers) as executor,
            closing(StoreBuilder(folder, model, store, int8=int8, executor=executor)) as builder,
            progress("compressing", len(knowledge)) as step,
        ):
            builder.build(_chosen(knowledge, all_examples, step), step)
    summary = builder.summary()
    if not summary["passages"]:
        note("all examples have an answer; compress them as demonstrations with --all")
    if json:
        print_json(summary)
        return
    say(
        f"{summary['passages']} passages, {summary['compressed']} compressed now,"
        f" {summary['kept']} in {store}"
    )
    if summary["text_bytes"] is not None:
        say(
            f"a passage: {summary['text_bytes']:.0f} bytes of text, {summary['fp16_bytes']} as"
            f" fp16, {summary['int8_bytes']} as int8"
        )
    if summary["int8_error"] is not None:
        say(f"mean error of int8 relative to fp16: {summary['int8_error']:.2%} (compressed now)")


def _chosen(
    knowledge: Iterable[Example], all_examples: bool, step: Step
) -> Iterator[tuple[str, Example]]:
    """Yield the examples to compress with their ids; `step` counts the others."""
    for example in knowledge:
        if all_examples or is_passage(example):
            yield str(example.id), example
        else:
            step(1)
