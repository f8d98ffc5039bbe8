"""All commands on one app."""

from __future__ import annotations

from typing import Annotated

import typer

from bottega import __version__
from bottega.cli import (
    answering,
    compressing,
    demonstrating,
    evaluating,
    explaining,
    exporting,
    keeping,
    keys,
    knowledge,
    looking,
    rationalising,
    reporting,
    savings,
    serving,
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
    demonstrating.demo,
    knowledge.add,
    looking.ls,
    looking.show,
    knowledge.rm,
    looking.stats,
    answering.ask,
    answering.classify,
    looking.log,
    explaining.explain,
    looking.models,
    keeping.export,
    keeping.verify,
    keeping.reindex,
    keeping.pin,
    keeping.unpin,
    rationalising.rationales,
    reporting.report,
    exporting.dataset,
    savings.savings,
    serving.serve,
):
    app.command()(command)
app.command("import")(keeping.import_)
app.command("eval")(evaluating.evaluate)
app.add_typer(keys.keys, name="keys")
app.add_typer(compressing.compress, name="compress")
