"""Run of streams: the master's answers, the streams, and their results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from bottega._util.durable_files import make_out_folder
from bottega._util.event_loops import run_closing
from bottega._util.identity import identity, json_digest
from bottega._util.progress import SILENT, Display, ReportStep, plural
from bottega.errors import BottegaError, SettingError
from bottega.evaluation.benchmark import fingerprint, with_synonyms
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.methods.master_answers import (
    MasterAnswers,
    ask_master,
    labelled_questions,
    question_key,
    read_answers,
)
from bottega.evaluation.methods.method_actor import check_images
from bottega.evaluation.methods.retrieval import open_retrieval
from bottega.evaluation.outcomes import (
    Budget,
    CostLimitedGenerator,
    ScoredAnswer,
    add_cost,
    reply_cost,
)
from bottega.evaluation.runs.run_store import CORPUS, Failure, RunStore
from bottega.evaluation.streams.growing_cache import StreamResult
from bottega.evaluation.streams.stream_plan import (
    APPRENTICE,
    MASTER,
    Stream,
    StreamConfig,
    item_orders,
)
from bottega.evaluation.streams.stream_runs import StreamSetup, run_streams
from bottega.evaluation.streams.stream_summary import (
    CurvePoint,
    Trend,
    find_trends,
    summarize_streams,
)
from bottega.generation import ReplayGenerator
from bottega.knowledge import KnowledgeBase
from bottega.naming import ModelSpec
from bottega.pipeline import FixedRouter
from bottega.prompting import InterleavedPrompter
from bottega.protocols import Generator, Prompter, Tier, turns_only
from bottega.recipes import default_prompter
from bottega.recipes.cache_retrieval import BY_DRAFT, DraftModel
from bottega.recording import PriceTable
from bottega.types import Example, Reply, Sampling, Usage

REPLIES = "replies"
APPRENTICE_KEY = "APPRENTICE_API_KEY"
SHOWN_FAILURES = 10
IMAGE_TOKENS = 800  # of one image, to estimate the cost


class MissingAnswersError(BottegaError):
    """The master did not answer all labelled questions: a smaller cache would give other
    results."""


class StreamRun:
    """Run of the streams of a configuration on their benchmark.

    The constructor checks the settings, reads the benchmark and chooses the settings that are not
    set. `prices` are the price tables of `master` and of `apprentice`, which is any other model;
    with `apprentice_url`, all others have this endpoint, with the key `APPRENTICE_API_KEY`.
    `execute` adds complete streams to `results`, so they are kept if a later one fails. It also
    sets `replies`, all recorded replies of the models, of which `replies_before` come from earlier
    runs; `failed`, the number of failed answers; `stored` and `failures`, the number of answers and
    the failed items in the folder of the run. Raises `SettingError`.
    """

    def __init__(
        self,
        config: StreamConfig,
        *,
        prices: Mapping[str, PriceTable] | None = None,
        apprentice_url: str | None = None,
        concurrency: int = 32,
        display: Display = SILENT,
    ) -> None:
        config.check()
        with display.waiting("reading the benchmark"):
            data = load_benchmark(
                config.benchmark, seed=config.seed, limit=config.limit, on_error=display.warn
            )
        self.data = with_synonyms(data, config.synonyms)
        self.config = config = config.chosen(self.data)
        self.prices = prices or {MASTER: PriceTable(), APPRENTICE: PriceTable()}
        self.concurrency, self.apprentice_url = concurrency, apprentice_url
        most = config.max_cached(len(data.items), len(labelled_questions(self.data)))
        if config.shots > most:
            display.note(
                f"{config.shots} shots requested; a cache holds at most {plural(most, 'answer')}"
            )
        for name in config.retrieve:
            check_images(self.data, name)
        self._display = display
        self.models: list[ReplayGenerator] = []
        self.replies: list[Reply] = []
        self.replies_before = self.failed = 0
        self.stored: int | None = None
        self.failures: list[Failure] = []
        self._results: dict[Stream, StreamResult] = {}

    @property
    def calls(self) -> int:
        """The maximum number of completions, without drafts of the retrieval."""
        return len(self.config.streams()) * len(self.data.items) + self._corpus_calls

    @property
    def _corpus_calls(self) -> int:
        asked = self.config.answers is None and set(self.config.starts) - {"none"}
        return len(labelled_questions(self.data)) if asked else 0

    @property
    def results(self) -> dict[Stream, StreamResult]:
        """The complete streams in the order of the plan. Answers that were stored without a price
        have the cost of their tokens."""
        done = (stream for stream in self.config.streams() if stream in self._results)
        return {stream: self._priced_again(self._results[stream]) for stream in done}

    def curves(self) -> list[CurvePoint]:
        """Return the points of the curves of all complete streams."""
        return summarize_streams(self.results, self.config.master, seed=self.config.seed)

    def trends(self) -> list[Trend]:
        """Return the trends of all complete streams."""
        return find_trends(self.results, self.config.master)

    @property
    def cost_usd(self) -> float | None:
        """The cost of all recorded replies in US dollars; None if a price is unknown."""
        costs = [reply_cost(reply, self._price) for reply in self.replies]
        return None if None in costs else sum(cost or 0.0 for cost in costs)

    def execute(
        self,
        *,
        out: Path | None = None,
        budget_usd: float | None = None,
        confirm: Callable[[int, float | None], object] = lambda requests, cost_usd: None,
    ) -> list[CurvePoint]:
        """Run all streams and return the points of their curves.

        The folder `out` stores replies and answers: the same run resumes there. `confirm` receives
        the estimated number of paid requests and their cost, None if a price is unknown, before
        they are sent; it may raise. Raises `BudgetError` when the budget is spent,
        `MissingAnswersError`, and the first error that would affect every item.
        """
        with self._folder(out) as folder, self._store(out) as store:
            setup = self._open_setup(folder, budget_usd)
            confirm(*self._paid())
            try:
                run_closing(self._run(setup, store), *self.models)
            finally:
                self.replies = [reply for model in self.models for reply in model.replies()]
                if store is not None:
                    self.stored, self.failures = store.count(), store.failures()
        return self.curves()

    def _planned_calls(self) -> tuple[int, int]:
        """Estimate the requests to the cheaper models and to the master.

        Equal requests are sent once: each item needs one request to the master, and one to the
        apprentice without a cache.
        """
        items, streams = len(self.data.items), self.config.streams()
        drafts = bool(set(BY_DRAFT) & set(self.config.retrieve))
        alone = any(one.curve.control == "no-cache" for one in streams)
        cached = (1 - one.rate for one in streams if one.curve.control not in ("no-cache", "vote"))
        cheaper = round(items * (sum(cached) + alone + drafts))
        return cheaper, items * any(one.rate for one in streams) + self._corpus_calls

    def _paid(self) -> tuple[int, float | None]:
        """Estimate the number and the cost of the paid requests; the cost is None if unknown."""
        config, queries = self.config, [item.query for item in self.data.items]
        tokens = sum(len(q.text) // 4 + IMAGE_TOKENS * len(q.images) for q in queries)
        prompt = tokens // max(1, len(queries))
        groups = (self.models[:-1], prompt * (1 + config.shots)), (self.models[-1:], prompt)
        paid = 0
        usd: float | None = 0.0
        for planned, (models, length) in zip(self._planned_calls(), groups, strict=True):
            left = max(0, planned - sum(len(model.replies()) for model in models))
            used = Usage(length, config.max_tokens)
            costs = [self._price(model.name, used) for model in models]
            paid += left if any(cost != 0 for cost in costs) else 0
            usd = add_cost(
                usd, None if None in costs else left * max(cost or 0.0 for cost in costs)
            )
        return paid, usd

    @contextmanager
    def _folder(self, out: Path | None) -> Iterator[Path]:
        """Yield the folder of the recorded replies."""
        if out is None:
            with TemporaryDirectory(prefix="bottega-") as folder:
                yield Path(folder)
            return
        replies = out / REPLIES
        make_out_folder(replies)
        yield replies

    @contextmanager
    def _store(self, out: Path | None) -> Iterator[RunStore | None]:
        if out is None:
            yield None
            return
        settings = {
            **self.config.record(),
            "metrics": [metric.name for metric in self.data.metrics],
            "data": fingerprint(self.data),
            "item_orders": self.orders,
        }
        with closing(RunStore.open(out, settings, self.data.items)) as store:
            yield store

    @cached_property
    def orders(self) -> list[list[int]]:
        answers = [item.answer for item in self.data.items]
        return item_orders(answers, self.config.orders, self.config.seed, self.config.phases)

    @cached_property
    def _sampling(self) -> Sampling:
        return Sampling(max_tokens=self.config.max_tokens, stop=self.config.stop)

    def _priced_again(self, result: StreamResult) -> StreamResult:
        """Return the answers with the costs of their tokens, where they were stored without a
        price."""
        names = dict(zip((tier.name for tier in self._tiers()), self.models, strict=True))

        def priced(one: ScoredAnswer) -> ScoredAnswer:
            if one.cost_usd is not None or one.tier not in names or not one.prompt_tokens:
                return one
            usage = Usage(one.prompt_tokens, one.completion_tokens)
            return replace(one, cost_usd=self._price(names[one.tier].name, usage))

        return replace(result, scored=tuple(map(priced, result.scored)))

    def _price(self, model: str, usage: Usage) -> float | None:
        table = MASTER if model == self.models[-1].name else APPRENTICE
        return self.prices[table](model, usage)

    def _open_setup(self, folder: Path, budget_usd: float | None) -> StreamSetup:
        """Open the models, with the replies recorded in `folder`, and the embedders."""
        specs = self.config.tiers
        inner = [self._open_cheaper(spec) for spec in specs[:-1]]
        inner.append(ModelSpec(specs[-1], self.concurrency).open())
        tables = [self.prices[APPRENTICE]] * (len(specs) - 1) + [self.prices[MASTER]]
        # Replies of earlier runs are not paid for again.
        records = [folder / f"{position}.jsonl" for position in range(len(specs))]
        paid = [ReplayGenerator(p, m).replies() for p, m in zip(records, inner, strict=True)]
        self.replies_before = sum(map(len, paid))
        costs = [
            reply_cost(reply, table)
            for replies, table in zip(paid, tables, strict=True)
            for reply in replies
        ]
        budget = Budget(
            budget_usd,
            spent=sum(cost or 0.0 for cost in costs),
            highest_cost=max((cost or 0.0 for cost in costs), default=0.0),
        )
        self.models = [
            ReplayGenerator(path, CostLimitedGenerator(model, budget, table))
            for path, model, table in zip(records, inner, tables, strict=True)
        ]
        draft = self._draft()
        retrievals = {
            name: open_retrieval(
                name,
                self.config.embed,
                self.config.embed_text,
                questions=(example.query.text for example in self.data.knowledge),
                draft=draft,
                groups=self.config.groups,
                exclude="same-question",
                seed=self.config.seed,
                display=self._display,
            )
            for name in self.config.retrieve
        }
        return StreamSetup(
            self.data,
            self._tiers(),
            retrievals,
            self.orders,
            cold=self.config.cold or 0,
            router=self.config.router,
            capacity=self.config.capacity,
            metric=self.config.metric,
            sampling=self._sampling,
            price=self._price,
            seed=self.config.seed,
        )

    def _open_cheaper(self, spec: str) -> Generator:
        """Open a model other than the master. With --apprentice-url it gets its own key: the
        master's key goes to the master's endpoint only."""
        url = self.apprentice_url
        key = None if url is None else os.environ.get(APPRENTICE_KEY, "")
        return ModelSpec(spec, self.concurrency, url, key).open()

    def _tiers(self) -> tuple[Tier, ...]:
        """Return the tiers, named by their models if there are more than two."""
        specs = self.config.tiers
        names = (APPRENTICE, MASTER) if len(specs) == 2 else specs
        *cheaper, master = zip(names, self.models, strict=True)
        return (
            *(Tier(name, one, self.config.shots, self._prompt(one)) for name, one in cheaper),
            Tier(*master),
        )

    def _prompt(self, model: ReplayGenerator) -> Prompter | None:
        """Return the benchmark's prompt; None for the default of the recipe."""
        return None if turns_only(model) else self.data.prompt

    def _draft(self) -> DraftModel | None:
        if not set(BY_DRAFT).intersection(self.config.retrieve):
            return None
        model = self.models[0]
        prompt = default_prompter(model) if turns_only(model) else InterleavedPrompter()
        return DraftModel(model, self._prompt(model) or prompt, self._sampling)

    async def _run(self, setup: StreamSetup, store: RunStore | None) -> None:
        streams = self.config.streams()
        if set(self.config.starts) - {"none"}:
            setup = replace(setup, corpus=await self._corpus(setup))
            if store is not None:
                await self._restart_changed(store, setup.corpus)
        total = len(streams) * len(self.data.items)
        with self._display.progress("streams", total, counts_money=True) as step:
            await run_streams(
                setup,
                streams,
                concurrency=self.concurrency,
                store=store,
                done=lambda one: self._count(one, step),
                finished=self._results.__setitem__,
            )

    def _count(self, scored: ScoredAnswer | None, step: ReportStep) -> None:
        self.failed += scored is None
        step(1, 0.0 if scored is None else scored.cost_usd or 0.0)

    async def _corpus(self, setup: StreamSetup) -> list[Example]:
        """Return the master's answers to the labelled questions."""
        questions = labelled_questions(self.data)
        found = MasterAnswers(self.data.labels)
        if self.config.answers is not None:
            answers = read_answers(self.config.answers, self.config.tiers[-1])
            stored = {question_key(one.query, self.data.labels): one for one in answers}
            found.by_question = {key: one for key, one in stored.items() if key in questions}
            missing = len(questions) - len(found.by_question)
            if missing:
                self._display.note(
                    f"{self.config.answers} lacks answers to {missing} of"
                    f" {plural(len(questions), 'labelled question')}: they are left out"
                )
            return self._usable(found)
        with KnowledgeBase.open(":memory:", embed=None) as empty:
            ask = setup.pipeline(empty, lambda tiers: FixedRouter(tiers[-1]), remember=False)
            with self._display.progress(
                "the master's answers", len(questions), counts_money=True
            ) as step:
                await ask_master(
                    replace(ask, record=None).trace,
                    list(questions.values()),
                    found,
                    concurrency=self.concurrency,
                    done=lambda cost: step(1, cost),
                )
        for error in list(found.failed.values())[:SHOWN_FAILURES]:
            self._display.warn(error)
        cost = "an unknown amount" if found.cost_usd is None else f"{found.cost_usd:.4f}"
        self._display.note(
            f"the master answered {len(found.by_question)} of"
            f" {plural(len(questions), 'labelled question')} for {cost} USD;"
            f" {len(found.failed)} failed, {found.unusable} invalid or truncated"
        )
        if found.failed:  # a smaller cache would give other results
            raise MissingAnswersError(
                f"the master did not answer {plural(len(found.failed), 'labelled question')}",
                hint="repeat the command to ask the failed questions again",
            )
        return self._usable(found)

    async def _restart_changed(self, store: RunStore, corpus: Sequence[Example]) -> None:
        """Delete the stored answers of streams whose cache started with other answers of the
        master."""
        digest = json_digest([[identity(one), one.rationale] for one in corpus])
        if store.note(CORPUS, digest) in (None, digest):
            return
        self._display.note(
            "the master's answers have changed: streams that start with them run again"
        )
        for stream in self.config.streams():
            if stream.curve.start != "none":
                await store.forget((stream.name, self.config.shots))

    def _usable(self, found: MasterAnswers) -> list[Example]:
        answers = found.in_order(self.data.knowledge)
        if not answers:
            raise SettingError(
                f"--start {' and '.join(self.config.starts)} needs answers, and the master has no"
                f" usable answer to the labelled questions of {self.data.name}",
                hint="set --start none, or another master",
            )
        return answers
