"""The command-line application with all commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer import Option

from bottega import __version__
from bottega.cli.help import HelpGroup, LazyCommand

# By panel: the name of each command, its function or application in `bottega.cli`, and the first
# paragraph of its help.
PANELS = {
    "Classify and ask": (
        (
            "demo",
            "demo.demo",
            "Run Visual RAG on handwriting and photographs that the bundled models never saw, or on"
            " your own images; write a page.",
        ),
        (
            "add",
            "knowledge.add",
            "Add labelled images or passages to a knowledge base, which is created if missing."
            " Unreadable ones are reported and skipped.",
        ),
        (
            "classify",
            "answer.classify",
            "Classify images with the most similar labelled images as demonstrations (Visual RAG).",
        ),
        (
            "ask",
            "answer.ask",
            "Ask a question, with similar examples as demonstrations if --kb is given.",
        ),
        (
            "tune",
            "tune.tune",
            "Choose embedder, metric, shots, order and method by leave-one-out, and store the"
            " choice.",
        ),
        ("log", "inspection.log", "Show recent requests and their cost, newest first."),
        (
            "explain",
            "explain.explain",
            "Explain an answer: its demonstrations and the search tree that chose them.",
        ),
        ("models", "inspection.models", "List the models that --model accepts."),
    ),
    "Evaluate": (
        (
            "eval",
            "eval.application",
            "Compare methods on a labelled image set or a synthetic task, with 95 % intervals.",
        ),
        (
            "stream",
            "stream.stream",
            "Answer a stream of questions with an apprentice and a master whose answers fill a"
            " cache.",
        ),
        (
            "answer",
            "master_answers.answer",
            "Store a master's answers to the labelled questions of a benchmark in a knowledge"
            " base.",
        ),
        (
            "rationales",
            "rationales.rationales",
            "Write rationales for examples and keep those that lead to the right answer (RCTS).",
        ),
        ("report", "report.report", "Write a page about runs, with CSV, Markdown and plots."),
        (
            "dataset",
            "report.dataset",
            "Export the evaluated items with their images for another program.",
        ),
        (
            "compress",
            "compress.compress",
            "Train a passage compressor (RACC) and pre-compress passages.",
        ),
    ),
    "Serve": (
        (
            "serve",
            "serve.serve",
            "Serve several models to OpenAI clients at one base URL, with Cache-of-Thought.",
        ),
        (
            "savings",
            "gateway_reports.savings",
            "Report what requests cost and what the master alone would have cost.",
        ),
        (
            "ui",
            "ui.ui",
            "Open the console without a gateway, for a knowledge base, evaluation runs or traces.",
        ),
        ("keys", "keys.keys", "Create, list, rotate and revoke the gateway's keys."),
        ("feedback", "gateway_reports.feedback", "Read the feedback that clients have sent."),
        ("experiment", "gateway_reports.experiment", "Compare the variants of an experiment."),
    ),
    "Knowledge bases": (
        ("ls", "inspection.ls", "List the examples of a knowledge base."),
        ("show", "inspection.show", "Show one example with all its fields."),
        (
            "stats",
            "inspection.stats",
            "Count examples, images and labels; list the views and other namespaces.",
        ),
        ("rm", "knowledge.rm", "Remove examples from a knowledge base."),
        ("pin", "knowledge.pin", "Protect examples from eviction."),
        ("unpin", "knowledge.unpin", "Allow the eviction of pinned examples again."),
        (
            "export",
            "knowledge.export",
            "Export a namespace as examples.jsonl and a folder of images. Exits with 1 if examples"
            " are damaged; they are reported and skipped.",
        ),
        (
            "import",
            "knowledge.import_",
            "Import a folder of bottega export, with pins and counters; embed its examples again.",
        ),
        (
            "migrate",
            "migrate.migrate",
            "Copy a knowledge base between files and PostgreSQL, and compare the two.",
        ),
        (
            "verify",
            "knowledge.verify",
            "Check images, vectors and index files against the rows, or list doubtful labels.",
        ),
        (
            "reindex",
            "knowledge.reindex",
            "Embed all examples of every namespace with another embedder.",
        ),
    ),
}


def lazy_commands() -> Iterator[LazyCommand]:
    """Yield all commands in the order of the help screen, and the hidden ones."""
    for panel, rows in PANELS.items():
        for name, target, help in rows:
            yield LazyCommand(name, target, help=help, rich_help_panel=panel)
    yield LazyCommand("serve-worker", "serve.serve_worker", hidden=True)


class CommandGroup(HelpGroup):
    """Group of all commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for command in lazy_commands():
            self.add_command(command)


app = typer.Typer(
    cls=CommandGroup,
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
