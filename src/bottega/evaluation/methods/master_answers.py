"""Answers of a master to the labelled questions of a benchmark, instead of the gold ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from bottega._util.event_loops import for_each, run_closing
from bottega._util.executor import Executor, LocalExecutor
from bottega._util.identity import query_key
from bottega._util.locations import StoreLocation
from bottega._util.progress import SILENT, Display, plural
from bottega.errors import BottegaError, SettingError
from bottega.evaluation.benchmark import Benchmark, is_passage
from bottega.evaluation.knowledge_rows import open_rows
from bottega.evaluation.outcomes import Budget, EndpointCheck, add_cost, is_item_error
from bottega.knowledge import KnowledgeBase
from bottega.naming import ModelSpec
from bottega.pipeline import FixedRouter, Pipeline
from bottega.protocols import Generator, Parser, Pricer, Tier
from bottega.recipes import cache_of_thought
from bottega.recording import CacheRecorder, cached_example
from bottega.types import Example, Query, Sampling, Trace

MASTER = "master"
NOTE = "answers.model"  # key of the note that names the master of a file

QuestionKey = tuple[str, ...]


def question_key(query: Query, labels: Sequence[str]) -> QuestionKey:
    """Return text, images and choices; a query without choices may have the benchmark's labels."""
    choices = () if set(query.choices) == set(labels) else query.choices
    return *query_key(query), *choices


def labelled_questions(data: Benchmark) -> dict[QuestionKey, Query]:
    """Return the different labelled questions of a benchmark."""
    return {
        question_key(one.query, data.labels): one.query
        for one in data.knowledge
        if not is_passage(one)
    }


@dataclass
class MasterAnswers:
    """Answers by question. `failed` questions have no answer. `unusable` counts invalid, truncated
    and abstaining answers, from which an apprentice cannot learn. `cost_usd` is None if a price is
    unknown. `labels` are the labels of the benchmark."""

    labels: Sequence[str] = ()
    by_question: dict[QuestionKey, Example] = field(default_factory=dict)
    failed: dict[QuestionKey, BottegaError] = field(default_factory=dict)
    unusable: int = 0
    cost_usd: float | None = 0.0

    def in_order(self, examples: Iterable[Example]) -> list[Example]:
        """Return the answers to these questions, in their order."""
        found = (
            self.by_question.get(question_key(example.query, self.labels)) for example in examples
        )
        return [answer for answer in found if answer is not None]

    def add(self, trace: Trace) -> None:
        """Add the answer of a trace."""
        self.cost_usd = add_cost(self.cost_usd, trace.cost_usd)
        example = cached_example(trace)
        if example is None:
            self.unusable += 1
        else:
            self.by_question[question_key(trace.query, self.labels)] = example


async def ask_master(
    ask: Callable[[Query], Awaitable[Trace]],
    questions: Sequence[Query],
    found: MasterAnswers,
    *,
    concurrency: int,
    budget: Budget | None = None,
    keep: Callable[[Trace], Awaitable[None]] | None = None,
    done: Callable[[float], object] = lambda cost_usd: None,
) -> None:
    """Ask each question, such as by `Pipeline.trace`, and add its answer to `found`, until the
    budget is spent.

    `keep` stores each trace before its cost counts; `done` receives the cost of each question.
    Raises the first error that would affect every question.
    """
    budget, endpoint = budget or Budget(), EndpointCheck()

    async def add(query: Query) -> None:
        try:
            trace = await ask(query)
        except BottegaError as error:
            if not (is_item_error(error) or endpoint.tolerates(error, concurrency)):
                raise
            found.failed[question_key(query, found.labels)] = error
            budget.settle(0.0)
            done(0.0)
            return
        endpoint.answered = True
        if keep is not None:
            await keep(trace)
        found.add(trace)
        budget.settle(trace.cost_usd)
        done(trace.cost_usd or 0.0)

    # One question must show its cost before many run concurrently.
    first = questions[: int(budget.is_limited)]
    for part in (first, questions[len(first) :]):
        await for_each(part, add, limit=concurrency, starts=budget.reserve)


def store_answers(
    knowledge: KnowledgeBase,
    questions: Sequence[Query],
    found: MasterAnswers,
    master: MasterFactory,
    *,
    concurrency: int,
    budget: Budget | None = None,
    executor: Executor | None = None,
    done: Callable[[float], object] = lambda cost_usd: None,
) -> None:
    """Ask each question as `ask_master` does, in this process or by the workers of `executor`, and
    store its answer in the knowledge base."""
    executor = executor or LocalExecutor()
    shared = replace(master, model=master.model.share(executor.count))
    ask = executor.start(shared, concurrency=concurrency)
    keep = CacheRecorder(knowledge, stored_tiers={MASTER})
    work = ask_master(
        ask, questions, found, concurrency=concurrency, budget=budget, keep=keep, done=done
    )
    run_closing(work, ask)


def with_answers(data: Benchmark, answers: Iterable[Example]) -> tuple[Benchmark, int]:
    """Replace the gold answers of the labelled questions; return the benchmark and the number of
    questions without an answer, which are left out. Passages stay. Raises `SettingError` if no
    question has an answer."""
    by_question = {question_key(one.query, data.labels): one for one in answers}
    kept: list[Example] = []
    missing = 0
    for example in data.knowledge:
        answer = by_question.get(question_key(example.query, data.labels))
        if is_passage(example):
            kept.append(example)
        elif answer is None:
            missing += 1
        else:
            kept.append(
                replace(
                    example,
                    answer=answer.answer,
                    labels=answer.labels,
                    rationale=answer.rationale,
                    source=answer.source,
                )
            )
    if missing and not any(not is_passage(one) for one in kept):
        raise SettingError(
            f"the answers belong to other questions than the {missing} labelled ones of"
            f" {data.name}",
            hint="run bottega answer K.db BENCHMARK --model MASTER with the same options",
        )
    return replace(data, knowledge=tuple(kept), needs_answers=False), missing


def stored_answers(data: Benchmark, file: StoreLocation, display: Display = SILENT) -> Benchmark:
    """Return the benchmark with the answers of a file instead of the gold ones (`--answers-from`).

    Notes the questions without an answer, which are left out. Raises `SettingError`."""
    data, missing = with_answers(data, read_answers(file))
    if missing:
        display.note(
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


def set_master(knowledge: KnowledgeBase, file: StoreLocation, model: str) -> None:
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
    price: Pricer

    def __call__(self) -> MasterActor:
        generator, empty = self.model.open(), KnowledgeBase.open(":memory:", embed=None)
        pipeline = cache_of_thought(
            empty,
            tiers=[Tier(MASTER, generator)],
            route=lambda tiers: FixedRouter(tiers[-1]),
            labels=self.labels,
            parse=self.parse,
            sampling=Sampling(max_tokens=self.max_tokens),
            price=self.price,
            remember=False,
        )
        return MasterActor(replace(pipeline, record=None), generator, empty)
