"""The command-line application with all commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer
from typer import Option

from bottega import __version__
from bottega.cli import (
    answer,
    compress,
    demo,
    eval,
    experiment,
    explain,
    feedback,
    inspection,
    keys,
    knowledge,
    master_answers,
    migrate,
    rationales,
    report,
    savings,
    serve,
    stream,
    tune,
    ui,
)
from bottega.cli.eval_options import EvalCommand
from bottega.cli.help import HelpCommand, HelpGroup

app = typer.Typer(
    cls=HelpGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"bottega {__version__}")
        raise typer.Exit()


@app.callback()
def bottega(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, Option("--debug", help="Show tracebacks; allowed anywhere.")] = False,
) -> None:
    """Let a small vision-language model answer like a large one, by showing it the right
    demonstrations."""


def _paragraphs(text: str) -> str:
    """Return the text with one line per paragraph: the help screen keeps line breaks."""
    return "\n\n".join(" ".join(one.split()) for one in text.split("\n\n"))


NAMES = {"import_": "import", "evaluate": "eval"}
CLASSES: dict[str, type[HelpCommand]] = {"evaluate": EvalCommand}
PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Classify and ask": (
        demo.demo,
        knowledge.add,
        answer.classify,
        answer.ask,
        tune.tune,
        inspection.log,
        explain.explain,
        inspection.models,
    ),
    "Evaluate": (
        eval.evaluate,
        stream.stream,
        master_answers.answer,
        rationales.rationales,
        report.report,
        report.dataset,
    ),
    "Serve": (serve.serve, savings.savings, ui.ui),
    "Knowledge bases": (
        inspection.ls,
        inspection.show,
        inspection.stats,
        knowledge.rm,
        knowledge.pin,
        knowledge.unpin,
        knowledge.export,
        knowledge.import_,
        migrate.migrate,
        knowledge.verify,
        knowledge.reindex,
    ),
}
for panel, commands in PANELS.items():
    for command in commands:
        app.command(
            NAMES.get(command.__name__),
            help=_paragraphs(command.__doc__ or ""),
            rich_help_panel=panel,
            cls=CLASSES.get(command.__name__, HelpCommand),
        )(command)
app.command("serve-worker", hidden=True)(serve.serve_worker)
app.add_typer(keys.keys, name="keys", rich_help_panel="Serve")
app.add_typer(feedback.feedback, name="feedback", rich_help_panel="Serve")
app.add_typer(experiment.experiment, name="experiment", rich_help_panel="Serve")
app.add_typer(compress.compress, name="compress", rich_help_panel="Evaluate")
