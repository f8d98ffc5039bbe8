"""The command `bottega eval`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from typer import Exit, Option, Typer
from typer.core import TyperOption

from bottega._util.locations import StoreLocation
from bottega._util.postgres import is_postgres_url
from bottega._util.progress import plural
from bottega.cli.components import LOCAL, check_executor, open_executor, open_prices, open_recorder
from bottega.cli.evaluation_output import print_plan, report_comparison, stored_text
from bottega.cli.help import HelpCommand
from bottega.cli.options import (
    BenchmarkSpec,
    BudgetOption,
    DryRun,
    JsonFile,
    On,
    PriceOption,
    TraceFile,
    WorkerCount,
    options_from_fields,
)
from bottega.cli.output import SkippedExamples, check_output, noting_interruption, say
from bottega.cli.shown_progress import TERMINAL
from bottega.errors import SettingError
from bottega.evaluation.benchmarks.loading import KNOWLEDGE_BASE, LABELLED_IMAGES
from bottega.evaluation.config import RunConfig
from bottega.evaluation.method_comparison import MethodComparison
from bottega.evaluation.methods.planning import check_method_options
from bottega.evaluation.methods.specifications import LABEL_METHODS, METHODS
from bottega.evaluation.outcomes import Budget
from bottega.evaluation.runs.run_store import FILE
from bottega.evaluation.search_config import SearchOptions
from bottega.recipes.cache_retrieval import BY_DRAFT
from bottega.types import IMAGE_QUESTION

WRONG = "none"  # value of --unparsable: an answer without a choice is wrong
# The options of each panel on the help screen, by the names of their fields.
PANELS = {
    "Benchmark": (
        *("question", "limit", "kb_per_class", "kb_share", "label_noise"),
        *("passages", "relevance"),
        *("allow_overlap", "synonyms", "unparsable", "seed"),
    ),
    "Methods": (
        *("methods", "pipeline", "shots", "samples", "round_size"),
        *("compressor", "hyper", "store"),
    ),
    "Tree search (rcts) and its controls": (
        *("preset", "rollouts", "reward", "alpha", "fetch"),
        *("children", "exploration", "variant", "early_stop"),
    ),
    "Model": ("model", "trust_remote_code", "max_tokens", "stop", "price", "budget"),
    "Retrieval": ("embed", "retrieve", "embed_text", "metric", "groups", "rerank"),
    "Prompt": ("prompt", "order", "rationales", "rationales_from", "answers_from"),
    "Run and results": ("out", "json", "traces", "concurrency", "on", "workers", "dry_run"),
}

application = Typer(add_completion=False)


class EvalCommand(HelpCommand):
    """Command whose help screen shows the options in panels."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        panel_of = {name: panel for panel, names in PANELS.items() for name in names}
        names = ["benchmark", *panel_of]
        self.params.sort(key=lambda one: names.index(one.name or ""))
        for option in self.params:
            if isinstance(option, TyperOption):
                option.rich_help_panel = panel_of[option.name or ""]


@dataclass(frozen=True)
class EvalOptions:
    """Options of `bottega eval` on which no answer depends, and parts of the benchmark's name."""

    question: Annotated[
        str | None,
        Option(
            help="Set the question about each image of image-folder:DIR or manyicl:DIR.",
            show_default=IMAGE_QUESTION,
        ),
    ] = None
    unparsable: Annotated[
        str,
        Option(
            metavar="NAME",
            help="Score unparsable multiple-choice replies of mmmu as none (wrong) or random (a "
            "random choice, as in MMMU's own code).",
        ),
    ] = WRONG
    budget: BudgetOption = None
    out: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Store every answer in this folder. The same command resumes the run and "
            "retries failed items; `bottega report` reads it.",
        ),
    ] = None
    json: JsonFile = None
    dry_run: DryRun = False
    price: PriceOption = None
    traces: TraceFile = None
    on: On = LOCAL
    workers: WorkerCount = None


@application.command("eval", cls=EvalCommand)
@options_from_fields(METHODS=", ".join(METHODS), LABEL_METHODS=", ".join(LABEL_METHODS))
def evaluate(
    benchmark: BenchmarkSpec, config: RunConfig, search: SearchOptions, options: EvalOptions
) -> None:
    """Compare methods on a labelled image set or a synthetic task, with 95 % intervals.

    A folder without split folders is split by the seed: a quarter of each class is evaluated.
    Results of completed methods are printed and written even if a later method fails.

    vote, nearest and knn choose a label among the retrieved examples without a model;
    vote-strict counts ties as wrong; logreg fits a logistic regression to all labelled vectors.
    top-k shows the nearest examples, the same as visual-rag for labelled images; majority and
    best-of-n choose among several samples of its reply. in-context shows all examples, oracle
    the gold passage among others. rcts searches for helpful examples; rcts-flat, rcts-random
    and rcts-best-of-n have its reward and its budget without a tree. concat shows passages,
    racc compresses them; racc-oracle and racc-flat change the retrieval scores, racc-swapped
    reads the passages of another item. candidates answers from each passage separately and
    chooses the answer with the best joint probability; kv-reuse puts the keys and values of
    each passage before the question. swap-image and swap-question are visual-rag with the image
    or the question of another item.
    """
    benchmark = with_options(benchmark, options.question, options.unparsable)
    config = replace(config, benchmark=benchmark, search=search.config(benchmark))
    comparison = _opened(config, options)
    # A resumed run repeats its options, also those of methods that are not run now.
    if options.out is None or not (options.out / FILE).exists():
        given = [*search.flags, *(["--samples"] if config.samples else [])]
        check_method_options(given, comparison.config, comparison.data, comparison.classifier)
    if options.dry_run:
        drafts = config.retrieve in BY_DRAFT
        print_plan(comparison.data, [comparison.model], comparison.calls, drafts=drafts)
        return
    _run(comparison, options)
    _print_rest(comparison, options.out)


def _opened(config: RunConfig, options: EvalOptions) -> MethodComparison:
    """Return the comparison, with a warning for each unreadable example."""
    check_output(options.json)
    check_executor(options.on, options.workers)
    Budget(options.budget)  # fail before anything is loaded
    skipped = SkippedExamples()
    prices = open_prices(options.price)
    comparison = MethodComparison(config, price=prices, display=TERMINAL, on_error=skipped)
    skipped.warn_of_rest()
    return comparison


def _run(comparison: MethodComparison, options: EvalOptions) -> None:
    """Run the methods, then report the completed ones, also after an error."""
    if options.on != LOCAL:
        _ = comparison.factory  # fails before the workers are started
    with (
        open_executor(options.on, options.workers) as executor,
        noting_interruption(lambda: stored_text(comparison.stored, options.out)),
        open_recorder(options.traces) as record,
    ):
        try:
            comparison.run(
                out=options.out, budget_usd=options.budget, record=record, executor=executor
            )
        finally:
            report_comparison(comparison, options.json, options.out)


def _print_rest(comparison: MethodComparison, out: Path | None) -> None:
    """Print what is missing in the results. Raises `Exit` if items failed."""
    if count := comparison.skipped:
        say(f"{plural(count, 'unreadable example')} {'is' if count == 1 else 'are'} excluded")
    if comparison.budget.is_spent:
        say(
            f"{comparison.budget}; repeat the command with a larger --budget to "
            + ("resume" if out else "start again (--out stores answers)")
        )
    if failed := sum(result.failed for result in comparison.results):
        hint = "repeat the command to retry them" if out else "store answers with --out FOLDER"
        requests = plural(len(comparison.data.items) * len(comparison.runs), "request")
        say(f"{failed} of {requests} failed; {hint}")
        raise Exit(1)


def with_options(benchmark: str, question: str | None, unparsable: str) -> str:
    """Return the benchmark specification with these options appended; K.db is a knowledge base."""
    own_file = benchmark.endswith(".db") and Path(benchmark).is_file()
    if own_file or is_postgres_url(benchmark):
        StoreLocation.from_argument(benchmark)
        benchmark = f"{KNOWLEDGE_BASE}:{benchmark}"
    kind = benchmark.partition(":")[0]
    if unparsable != WRONG:
        if kind != "mmmu":
            raise SettingError(
                f"--unparsable applies only to mmmu, got {benchmark}", hint="remove --unparsable"
            )
        benchmark = f"{benchmark},unparsable={unparsable}"
    if question is None:
        return benchmark
    if kind not in LABELLED_IMAGES:
        raise SettingError(
            f"{benchmark} has its own questions, got --question {question!r}",
            hint=f"remove --question, or use {' or '.join(LABELLED_IMAGES)}",
        )
    if ",question=" in benchmark:
        raise SettingError(
            f"{benchmark} already sets a question, got --question {question!r}",
            hint="remove one of the two questions",
        )
    return f"{benchmark},question={question}"
