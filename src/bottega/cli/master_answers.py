"""The command `bottega answer`, and examples with a master's answers for `bottega eval`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from typer import Exit, Option

from bottega._util.event_loops import run_closing
from bottega._util.executor import LocalExecutor
from bottega._util.locations import StoreLocation
from bottega._util.progress import plural
from bottega.cli.components import (
    LOCAL,
    check_executor,
    open_executor,
    open_prices,
    with_synonyms,
)
from bottega.cli.knowledge_files import open_rows, open_to_add
from bottega.cli.options import (
    MODELS_HELP,
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
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.examples import labels_of
from bottega.evaluation.methods.master_answers import (
    MasterAnswers,
    QuestionKey,
    ask_master,
    labelled_questions,
    question_key,
    with_answers,
)
from bottega.evaluation.outcomes import Budget, check_priced
from bottega.knowledge import KnowledgeBase
from bottega.naming import ModelSpec, check_model, default_embedder
from bottega.pipeline import FixedRouter, Pipeline
from bottega.protocols import Generator, Parser, Tier
from bottega.recipes import cache_of_thought
from bottega.recording import CacheRecorder
from bottega.types import Example, Query, Sampling, Trace

MASTER = "master"
NOTE = "answers.model"  # key of the note that names the master of a file
ANSWER_TOKENS = 512
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
        _set_master(knowledge, file, model)
        found.by_question = {question_key(one.query, data.labels): one for one in knowledge}
        chosen = list(questions.items())[:limit]
        wanted = [query for key, query in chosen if key not in found.by_question]
        if before := len(questions.keys() & found.by_question):
            note(
                f"{file} already answers {before} of {plural(len(questions), 'labelled question')}"
            )
        spec = ModelSpec.of(model, concurrency=concurrency, trust_remote_code=trust_remote_code)
        check_priced(spec.open().name, limits, open_prices(price))
        master = MasterFactory(spec, data.labels, data.parse, max_tokens, price)
        keep = CacheRecorder(knowledge, stored_tiers={MASTER})
        with (
            open_executor(on, workers) as executor,
            noting_interruption(
                lambda: (
                    f"{plural(len(knowledge), 'answer')} in {file}; repeat the command to resume"
                )
            ),
            progress("answering", len(wanted), counts_money=True) as step,
        ):
            executor = executor or LocalExecutor()
            master = replace(master, model=spec.share(executor.count))
            ask = executor.start(master, concurrency=concurrency)
            work = ask_master(
                ask,
                wanted,
                found,
                concurrency=concurrency,
                budget=limits,
                keep=keep,
                done=lambda cost: step(1, cost),
            )
            run_closing(work, ask)
    _report(file, data, questions, found, limits)


def stored_answers(data: Benchmark, file: StoreLocation) -> Benchmark:
    """Return the benchmark with the answers of a file instead of the gold ones (`--answers-from`).

    Notes the questions without an answer, which are left out. Raises `SettingError`."""
    data, missing = with_answers(data, read_answers(file))
    if missing:
        note(
            f"{file} lacks answers to {plural(missing, 'labelled question')}: they are left out,"
            f" {len(data.knowledge)} remain"
        )
    return data


def read_answers(file: StoreLocation, master: str | None = None) -> list[Example]:
    """Return the examples of a file of `bottega answer`. Raises `SettingError` for a file with
    other examples, or with those of another model than `master`."""
    hint = f"run bottega answer {file} BENCHMARK --model MASTER"
    if not file.exists():
        raise SettingError(f"{file} does not exist", hint=hint)
    with open_rows(file) as rows:
        stored, examples = rows.note(NOTE), list(rows)
    gold = sum(not (one.source or "").startswith(f"{MASTER}:") for one in examples)
    if stored is None or gold:
        content = f"holds {plural(gold, 'example')} without a master's answer"
        raise SettingError(
            f"{file} {content if gold else 'was not written by bottega answer'}",
            hint=f"use another file: {hint}",
        )
    if master is not None and stored != master:
        raise SettingError(
            f"{file} holds the answers of {stored}, got --master {master}",
            hint=f"set --master {stored}, or use another file",
        )
    return examples


def _set_master(knowledge: KnowledgeBase, file: StoreLocation, model: str) -> None:
    """Store the master's name in the file. Raises `SettingError` for a file of another master or
    with other examples."""
    stored = knowledge.note(NOTE)
    if stored == model:
        return
    if stored is not None:
        raise SettingError(
            f"{file} holds the answers of {stored}, got --model {model}",
            hint=f"set --model {stored}, or use another file",
        )
    if len(knowledge):
        raise SettingError(
            f"{file} holds {plural(len(knowledge), 'example')} without a master's answer",
            hint="use another file",
        )
    knowledge.set_note(NOTE, model)


class MasterActor:
    """Master that answers queries without demonstrations."""

    def __init__(self, pipeline: Pipeline, generator: Generator, cache: KnowledgeBase) -> None:
        self._pipeline, self._generator, self._cache = pipeline, generator, cache

    async def __call__(self, query: Query, /) -> Trace:
        return await self._pipeline.trace(query)

    async def aclose(self) -> None:
        await self._generator.aclose()
        await asyncio.to_thread(self._cache.close)


@dataclass(frozen=True)
class MasterFactory:
    """Factory of a `MasterActor` from the name of a model and the settings of its pipeline."""

    model: ModelSpec
    labels: tuple[str, ...]
    parse: Parser
    max_tokens: int
    price: str | None

    def __call__(self) -> MasterActor:
        generator, empty = self.model.open(), KnowledgeBase.open(":memory:", embed=None)
        pipeline = cache_of_thought(
            empty,
            tiers=[Tier(MASTER, generator)],
            route=lambda tiers: FixedRouter(tiers[-1]),
            labels=self.labels,
            parse=self.parse,
            sampling=Sampling(max_tokens=self.max_tokens),
            price=open_prices(self.price),
            remember=False,
        )
        return MasterActor(replace(pipeline, record=None), generator, empty)


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
