"""All commands on one app."""

from __future__ import annotations

from typing import Annotated

import typer

from bottega import __version__
from bottega.cli import (
    answer,
    compress,
    eval,
    explain,
    keys,
    knowledge,
    look,
    measure,
    rationales,
    report,
    savings,
    serve,
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"bottega {__version__}")
        raise typer.Exit()


@app.callback()
def bottega(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")
    ] = False,
) -> None:
    """A small vision-language model answers like a large one: shown the right worked examples
    at the right moment."""


for command in (
    measure.demo,
    knowledge.add,
    look.ls,
    look.show,
    knowledge.rm,
    look.stats,
    answer.ask,
    answer.classify,
    look.log,
    explain.explain,
    look.models,
    knowledge.export,
    knowledge.verify,
    knowledge.reindex,
    knowledge.pin,
    knowledge.unpin,
    rationales.rationales,
    report.report,
    report.dataset,
    savings.savings,
    serve.serve,
):
    app.command()(command)
app.command("import")(knowledge.import_)
app.command("eval")(eval.evaluate)
app.add_typer(keys.keys, name="keys")
app.add_typer(compress.compress, name="compress")
