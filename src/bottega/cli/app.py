"""The command-line application with all commands."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from bottega import __version__
from bottega.cli import (
    answer,
    compress,
    demo,
    eval,
    explain,
    inspection,
    keys,
    knowledge,
    master_answers,
    rationales,
    report,
    savings,
    serve,
    stream,
    tune,
)

app = typer.Typer(
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
for command in (
    demo.demo,
    knowledge.add,
    inspection.ls,
    inspection.show,
    knowledge.rm,
    inspection.stats,
    answer.ask,
    answer.classify,
    inspection.log,
    explain.explain,
    inspection.models,
    knowledge.export,
    knowledge.import_,
    knowledge.verify,
    knowledge.reindex,
    tune.tune,
    knowledge.pin,
    knowledge.unpin,
    rationales.rationales,
    master_answers.answer,
    eval.evaluate,
    stream.stream,
    report.report,
    report.dataset,
    savings.savings,
    serve.serve,
):
    app.command(NAMES.get(command.__name__), help=_paragraphs(command.__doc__ or ""))(command)
app.add_typer(keys.keys, name="keys")
app.add_typer(compress.compress, name="compress")
