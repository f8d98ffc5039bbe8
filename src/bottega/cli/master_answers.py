"""The command `bottega answer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from typer import Exit, Option

from bottega._util.locations import StoreLocation
from bottega._util.progress import plural
from bottega.cli.components import LOCAL, check_executor, open_executor, open_prices
from bottega.cli.knowledge_files import open_to_add
from bottega.cli.options import (
    BenchmarkSpec,
    BudgetOption,
    DryRun,
    Embed,
    KnowledgeFile,
    On,
    PriceOption,
    Seed,
    Synonyms,
    TrustRemoteCode,
    WorkerCount,
)
from bottega.cli.output import note, noting_interruption, say, waiting, warn
from bottega.cli.shown_progress import progress
from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark, with_synonyms
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.config import ANSWER_TOKENS, MODELS_HELP
from bottega.evaluation.methods.master_answers import (
    MasterAnswers,
    MasterFactory,
    QuestionKey,
    labelled_questions,
    question_key,
    set_master,
    store_answers,
)
from bottega.evaluation.metrics.metric import labels_of
from bottega.evaluation.outcomes import Budget, check_priced
from bottega.naming import ModelSpec, check_model, default_embedder
from bottega.types import Query

SHOWN_FAILURES = 10


def answer(
    file: KnowledgeFile,
    benchmark: BenchmarkSpec,
    model: Annotated[str, Option(metavar="NAME", help=f"The master: {MODELS_HELP}")],
    trust_remote_code: TrustRemoteCode = False,
    limit: Annotated[
        int | None, Option(min=1, help="Answer only the first labelled questions.")
    ] = None,
    kb_per_class: Annotated[
        int | None, Option(min=1, help="Maximum examples per label, as for eval.")
    ] = None,
    seed: Seed = 0,
    embed: Embed = None,
    max_tokens: Annotated[int, Option(min=1, help="Maximum tokens of a reply.")] = ANSWER_TOKENS,
    concurrency: Annotated[int, Option(min=1, help="Maximum concurrent questions.")] = 32,
    budget: BudgetOption = None,
    synonyms: Synonyms = None,
    dry_run: DryRun = False,
    price: PriceOption = None,
    on: On = LOCAL,
    workers: WorkerCount = None,
) -> None:
    """Store a master's answers to the labelled questions of a benchmark in a knowledge base.

    The master reasons before it answers, and never sees a gold answer. The file holds its answers
    with their reasoning. It is a warm cache for the gateway, `bottega stream --answers` and
    `bottega eval --answers-from`. The same command resumes an interrupted run."""
    check_model(model)
    Budget(budget)  # fail before anything is loaded
    check_executor(on, workers)
    with waiting("reading the benchmark"):
        data = load_benchmark(benchmark, seed=seed, per_class=kb_per_class, on_error=warn)
    data = with_synonyms(data, synonyms)
    questions = labelled_questions(data)
    if not questions:
        raise SettingError(
            f"{data.name} has no labelled questions, only passages", hint="use another benchmark"
        )
    if dry_run:
        calls = min(len(questions), limit or len(questions))
        labelled = plural(len(questions), "labelled question")
        say(f"{data.name}: {calls} of {labelled}; {model}; {plural(calls, 'call')}")
        return
    images = (image for query in questions.values() for image in query.images)
    limits, found = Budget(budget), MasterAnswers(data.labels)
    with file.locked(), open_to_add(file, embed, "", default_embedder(images)) as knowledge:
        set_master(knowledge, file, model)
        found.by_question = {question_key(one.query, data.labels): one for one in knowledge}
        chosen = list(questions.items())[:limit]
        wanted = [query for key, query in chosen if key not in found.by_question]
        if before := len(questions.keys() & found.by_question):
            note(
                f"{file} already answers {before} of {plural(len(questions), 'labelled question')}"
            )
        spec = ModelSpec.of(model, concurrency=concurrency, trust_remote_code=trust_remote_code)
        prices = open_prices(price)
        check_priced(spec.open().name, limits, prices)
        master = MasterFactory(spec, data.labels, data.parse, max_tokens, prices)
        with (
            open_executor(on, workers) as executor,
            noting_interruption(
                lambda: (
                    f"{plural(len(knowledge), 'answer')} in {file}; repeat the command to resume"
                )
            ),
            progress("answering", len(wanted), counts_money=True) as step,
        ):
            store_answers(
                knowledge,
                wanted,
                found,
                master,
                concurrency=concurrency,
                budget=limits,
                executor=executor,
                done=lambda cost: step(1, cost),
            )
    _report(file, data, questions, found, limits)


def _report(
    file: StoreLocation,
    data: Benchmark,
    questions: Mapping[QuestionKey, Query],
    found: MasterAnswers,
    budget: Budget,
) -> None:
    for error in list(found.failed.values())[:SHOWN_FAILURES]:
        warn(error)
    cost = "unknown" if found.cost_usd is None else f"{found.cost_usd:.4f} USD"
    answered = len(questions.keys() & found.by_question)
    say(
        f"{file}: answers to {answered} of {plural(len(questions), 'labelled question')}; this run:"
        f" {found.unusable} invalid or truncated, {len(found.failed)} failed, cost {cost}"
    )
    if data.labels and answered:
        gold = {question_key(one.query, data.labels): set(labels_of(one)) for one in data.knowledge}
        right = sum(
            set(labels_of(one)) == gold[key]
            for key, one in found.by_question.items()
            if key in gold
        )
        say(f"{right} of {answered} equal the gold answer ({right / answered:.3f})")
    if budget.is_spent:
        say(f"{budget}; repeat the command with a larger --budget to resume")
    if found.failed:
        say("repeat the command to ask the failed questions again")
        raise Exit(1)
