"""The commands `bottega compress train` and `bottega compress build`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

from typer import Argument, Exit, Option

from bottega._util.progress import ReportStep, plural
from bottega.cli.components import LOCAL, check_executor, open_executor
from bottega.cli.help import HelpCommand, command_group
from bottega.cli.options import (
    CompressorFolder,
    Json,
    KnowledgeFile,
    Namespace,
    On,
    TrustRemoteCode,
    WorkerCount,
)
from bottega.cli.output import note, noting_interruption, print_json, say, waiting
from bottega.cli.shown_progress import TERMINAL, ProgressStatus, progress
from bottega.evaluation.benchmark import is_passage
from bottega.evaluation.compressor_plan import load_plan
from bottega.evaluation.knowledge_rows import check_filled, open_rows
from bottega.knowledge.embedders.names import BUNDLED
from bottega.naming import check_torch, local_model
from bottega.recipes.racc import bundled_compressor_for, check_compressor_files
from bottega.types import Example

NO_PASSAGES = "all examples have an answer; compress them as demonstrations with --all"

compress = command_group("Train a passage compressor (RACC) and pre-compress passages.")


@compress.command(cls=HelpCommand)
def train(
    config: Annotated[
        Path,
        Argument(metavar="CONFIG", help="TOML file; see docs/compression.md for a complete one."),
    ],
    model: Annotated[
        str | None,
        Option(metavar="NAME", help="Frozen base model: bundled, a folder, or a Hugging Face id."),
    ] = None,
    hyper: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Frozen hyper model, which compresses the passages (default: the base model).",
        ),
    ] = None,
    out: Annotated[Path | None, Option(metavar="FOLDER", help="Folder of the compressor.")] = None,
    changes: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change a setting of the file, e.g. training.prdb=false; may be repeated.",
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run", help="Read the data and check the settings; load no model, train nothing."
        ),
    ] = False,
) -> None:
    """Train a compressor for a frozen model. After Ctrl-C, the same command resumes."""
    options = {"model": model, "hyper": hyper, "out": None if out is None else str(out)}
    plan = load_plan(config, changes or (), options)
    from bottega.evaluation.compressor_training import describe_training, train_compressor

    if dry_run:
        say("\n".join(describe_training(plan, TERMINAL)))
        return
    settings = plan.settings
    resume = f"{settings.out} keeps the last checkpoint, if any; repeat the command to resume"
    with noting_interruption(lambda: resume):
        finished = train_compressor(
            plan,
            trust_remote_code=trust_remote_code,
            display=TERMINAL,
            describe=say,
            interruption=_interruption,
        )
    if not finished:
        note("stopped; repeat the command to resume")
        raise Exit(130)
    say(f"compressor: {settings.out}")
    hyper = f" --hyper {settings.hyper}" if settings.hyper else ""
    note(
        "to test whether it uses the passages: bottega eval ... --methods"
        f" concat,racc,racc-oracle,racc-flat,racc-swapped --shots {settings.shots}"
        f" --model {settings.model} --compressor {settings.out}{hyper}"
    )


@compress.command(cls=HelpCommand)
def build(
    file: KnowledgeFile,
    store: Annotated[
        Path, Option(metavar="FOLDER", help="Folder of the store; created if missing.")
    ],
    compressor: CompressorFolder = None,
    model: Annotated[
        str,
        Option(
            metavar="NAME",
            help="Hyper model of the compressor: bundled, a folder, or a Hugging Face id.",
        ),
    ] = BUNDLED,
    int8: Annotated[
        bool,
        Option(
            "--int8", help="Store one byte per number instead of two; report the rounding error."
        ),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    all_examples: Annotated[
        bool,
        Option("--all", help="Include examples with an answer; the answer is compressed too."),
    ] = False,
    namespace: Namespace = "",
    on: On = LOCAL,
    workers: WorkerCount = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Check the store and count the passages; compress nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Pre-compress the passages of a knowledge base. Unchanged passages are skipped: after an
    interruption or changes, the same command compresses the rest."""
    check_torch()
    check_executor(on, workers)
    from bottega.compression import load
    from bottega.recipes.racc_store import CompressorFactory, StoreBuilder, open_store

    folder = compressor or bundled_compressor_for(local_model(model))
    check_compressor_files(folder, None)
    if dry_run:
        if store.exists():
            open_store(load(folder), store, int8=int8)
        with open_rows(file, namespace) as knowledge:
            check_filled(knowledge, file, namespace)
            count = sum(all_examples or is_passage(example) for example in knowledge)
        say(f"{file}: {plural(count, 'passage')}; {model} with {folder}; store {store}")
        if not count:
            note(NO_PASSAGES)
        return
    factory = CompressorFactory(folder, partial(local_model, model, trust_remote_code), waiting)
    with open_rows(file, namespace) as knowledge:
        check_filled(knowledge, file, namespace)
        status = ProgressStatus(len(knowledge))
        with (
            noting_interruption(
                lambda: (
                    f"{status.count('example')} of {file} are done, and {store} keeps their"
                    " compressed passages; repeat the command to compress the rest"
                )
            ),
            open_executor(on, workers) as executor,
            closing(StoreBuilder(factory, store, int8=int8, executor=executor)) as builder,
            progress("compressing", status),
        ):
            builder.build(_chosen(knowledge, all_examples, status), status)
    summary = builder.summary()
    if not summary["passages"]:
        note(NO_PASSAGES)
    if json:
        print_json(summary)
        return
    passages = plural(int(summary["passages"] or 0), "passage")
    say(f"{passages}, {summary['compressed']} compressed now, {summary['kept']} in {store}")
    if summary["passages"]:
        say(f"per passage: {builder.sizes}")
    if summary["int8_error"] is not None:
        say(f"mean error of int8 relative to fp16: {summary['int8_error']:.2%} (compressed now)")


def _chosen(
    knowledge: Iterable[Example], all_examples: bool, step: ReportStep
) -> Iterator[tuple[str, Example]]:
    """Yield the examples to compress with their ids; `step` counts the others."""
    for example in knowledge:
        if all_examples or is_passage(example):
            yield str(example.id), example
        else:
            step(1)


@contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed, so the current step can finish. The
    second Ctrl-C ends the process at once."""
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
