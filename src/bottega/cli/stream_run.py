"""Execution of `bottega stream`: the master's answers, the streams, and their results."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import typer
from typer import Exit

from bottega import __version__
from bottega._util.durable_files import make_out_folder
from bottega._util.event_loops import run_closing
from bottega._util.identity import identity, json_digest
from bottega._util.progress import plural
from bottega.cli.components import open_retrieval
from bottega.cli.evaluation_output import print_plan, stored_text
from bottega.cli.master_answers import read_answers
from bottega.cli.output import (
    at_terminal,
    format_usd,
    note,
    noting_interruption,
    print_table,
    say,
    to_json,
    warn,
)
from bottega.cli.shown_progress import ReportStep, progress
from bottega.errors import BudgetError, SettingError
from bottega.evaluation.benchmark import Benchmark, fingerprint
from bottega.evaluation.methods.master_answers import (
    MasterAnswers,
    ask_master,
    labelled_questions,
    question_key,
)
from bottega.evaluation.metrics.intervals import bounds
from bottega.evaluation.outcomes import (
    Budget,
    CostLimitedGenerator,
    ScoredAnswer,
    add_cost,
    reply_cost,
)
from bottega.evaluation.runs.run_store import CORPUS, RunStore
from bottega.evaluation.streams.growing_cache import StreamResult
from bottega.evaluation.streams.stream_plan import (
    APPRENTICE,
    MASTER,
    Stream,
    StreamConfig,
    item_orders,
)
from bottega.evaluation.streams.stream_runs import StreamSetup, run_streams
from bottega.evaluation.streams.stream_summary import CurvePoint, summarize_streams
from bottega.evaluation.streams.stream_trends import COLUMNS as TREND_COLUMNS
from bottega.evaluation.streams.stream_trends import find_trends
from bottega.generation import ReplayGenerator
from bottega.knowledge import KnowledgeBase
from bottega.naming import ModelSpec
from bottega.pipeline import FixedRouter
from bottega.prompting import InterleavedPrompter
from bottega.protocols import Generator, Prompter, Tier, turns_only
from bottega.recipes import default_prompter
from bottega.recipes.cache_retrieval import BY_DRAFT, DraftModel
from bottega.recording import PriceTable
from bottega.types import Example, Sampling, Usage

REPLIES = "replies"
APPRENTICE_KEY = "APPRENTICE_API_KEY"
SHOWN_FAILURES = 10
MOST_UNCONFIRMED = 1000  # paid requests
IMAGE_TOKENS = 800  # of one image, to estimate the cost
COLUMNS = (
    *("curve", "master", "streams", "n", "accuracy", "low", "high"),
    *("gain", "low", "high", "sent", "agreement", "USD"),
)
PART_COLUMNS = ("curve", "master", "third 1", "third 2", "third 3", "growth", "low", "high")
FOOTNOTE = (
    "master is the planned share of the items that go to the master, sent the actual one. gain is"
    " the apprentice's score minus the score without a cache, on the items that it answered; third"
    " 1 to 3 are the gains in each third of the streams. growth is the apprentice's score in the"
    " last third minus that in the first. agreement is the share of the apprentice's answers that"
    " equal the master's. USD is the mean cost of a stream if every request is sent. p is that of"
    " Page's trend test, with one block per order."
)


@dataclass
class StreamRun:
    """One execution of `bottega stream`. `prices` are the price tables of `master` and of
    `apprentice`, which is any other model; `out` is the folder of the run."""

    config: StreamConfig
    data: Benchmark
    prices: Mapping[str, PriceTable]
    out: Path | None
    budget_usd: float | None
    concurrency: int
    apprentice_url: str | None = None
    asks: bool = False
    models: list[ReplayGenerator] = field(default_factory=list)
    replies_before: int = 0
    failed: int = 0

    def print_plan(self) -> None:
        """Print the size of the run for `--dry-run`."""
        calls = len(self.config.streams()) * len(self.data.items) + self._corpus_calls
        drafts = bool(set(BY_DRAFT) & set(self.config.retrieve))
        tiers, orders = self.config.tiers, len(self.orders)
        print_plan(self.data, tiers, calls, drafts=drafts, orders=orders)

    @property
    def _corpus_calls(self) -> int:
        asked = self.config.answers is None and set(self.config.starts) - {"none"}
        return len(labelled_questions(self.data)) if asked else 0

    def execute(self, json: Path | None) -> None:
        """Run all streams, then report the completed ones, also after an error."""
        streams = self.config.streams()
        with (
            self._folder() as folder,
            self._store() as store,
            noting_interruption(lambda: stored_text(store, self.out)),
        ):
            setup = self._open_setup(folder)
            self._confirm()
            results: dict[Stream, StreamResult] = {}
            try:
                run_closing(self._run(setup, streams, store, results), *self.models)
            except BudgetError as error:
                say(f"{error}; {error.hint}")
            finally:
                done = {stream: results[stream] for stream in streams if stream in results}
                self._report(done, setup, json)
                self._report_failures(store)
        if self.failed:
            raise Exit(1)

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

    def _confirm(self) -> None:
        """Note the number and cost of the paid requests. Ask before more than `MOST_UNCONFIRMED`;
        raise `Exit` if the user declines, and `SettingError` without a terminal."""
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
        if not paid:
            return
        cost = "an unknown price (set --master-price and --apprentice-price)"
        if usd is not None:
            cost = f"{format_usd(usd)} USD if replies have {plural(config.max_tokens, 'token')}"
        requests = plural(paid, "paid request", ",")
        note(f"about {requests} for {cost}")
        if not self.asks or paid <= MOST_UNCONFIRMED:
            return
        if not at_terminal():
            problem = f"{requests}, more than {MOST_UNCONFIRMED:,}, need confirmation"
            raise SettingError(problem, hint="add --yes")
        if not typer.confirm("Continue?", err=True):
            raise Exit(1)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """Yield the folder of the recorded replies."""
        if self.out is None:
            with TemporaryDirectory(prefix="bottega-") as folder:
                yield Path(folder)
            return
        replies = self.out / REPLIES
        make_out_folder(replies)
        yield replies

    @contextmanager
    def _store(self) -> Iterator[RunStore | None]:
        if self.out is None:
            yield None
            return
        settings = {
            **self.config.record(),
            "metrics": [metric.name for metric in self.data.metrics],
            "data": fingerprint(self.data),
            "item_orders": self.orders,
        }
        with closing(RunStore.open(self.out, settings, self.data.items)) as store:
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

    def _open_setup(self, folder: Path) -> StreamSetup:
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
            self.budget_usd,
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

    async def _run(
        self,
        setup: StreamSetup,
        streams: Sequence[Stream],
        store: RunStore | None,
        results: dict[Stream, StreamResult],
    ) -> None:
        if set(self.config.starts) - {"none"}:
            setup = replace(setup, corpus=await self._corpus(setup))
            if store is not None:
                await self._restart_changed(store, setup.corpus)
        total = len(streams) * len(self.data.items)
        with progress("streams", total, counts_money=True) as step:
            await run_streams(
                setup,
                streams,
                concurrency=self.concurrency,
                store=store,
                done=lambda one: self._count(one, step),
                finished=results.__setitem__,
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
                note(
                    f"{self.config.answers} lacks answers to {missing} of"
                    f" {plural(len(questions), 'labelled question')}: they are left out"
                )
            return self._usable(found)
        with KnowledgeBase.open(":memory:", embed=None) as empty:
            ask = setup.pipeline(empty, lambda tiers: FixedRouter(tiers[-1]), remember=False)
            with progress("the master's answers", len(questions), counts_money=True) as step:
                await ask_master(
                    replace(ask, record=None).trace,
                    list(questions.values()),
                    found,
                    concurrency=self.concurrency,
                    done=lambda cost: step(1, cost),
                )
        for error in list(found.failed.values())[:SHOWN_FAILURES]:
            warn(error)
        cost = "an unknown amount" if found.cost_usd is None else f"{found.cost_usd:.4f}"
        note(
            f"the master answered {len(found.by_question)} of"
            f" {plural(len(questions), 'labelled question')} for {cost} USD;"
            f" {len(found.failed)} failed, {found.unusable} invalid or truncated"
        )
        if found.failed:  # a smaller cache would give other results
            say("repeat the command to ask the failed questions again")
            raise Exit(1)
        return self._usable(found)

    async def _restart_changed(self, store: RunStore, corpus: Sequence[Example]) -> None:
        """Delete the stored answers of streams whose cache started with other answers of the
        master."""
        digest = json_digest([[identity(one), one.rationale] for one in corpus])
        if store.note(CORPUS, digest) in (None, digest):
            return
        note("the master's answers have changed: streams that start with them run again")
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

    def _report(
        self, results: Mapping[Stream, StreamResult], setup: StreamSetup, json: Path | None
    ) -> None:
        results = {stream: self._priced_again(one) for stream, one in results.items()}
        points = summarize_streams(results, setup.master.name, seed=self.config.seed)
        if not points:
            return
        config, data = self.config, self.data
        say(
            f"{data.name}: {plural(len(data.items), 'item')} in {plural(config.orders, 'order')};"
            f" apprentice {' and '.join(config.tiers[:-1])}, master {config.tiers[-1]}, router"
            f" {config.router}; {data.metrics[0].name.replace('_', ' ')} with 95 % intervals"
        )
        print_table(COLUMNS, [_row(point) for point in points])
        if any(point.growth for point in points):
            say("")
            print_table(PART_COLUMNS, [_part_row(point) for point in points if point.growth])
        trends = find_trends(results, setup.master.name)
        if trends:
            say("")
            print_table(TREND_COLUMNS, [trend.row for trend in trends])
        sent = [reply for model in self.models for reply in model.replies()]
        costs = [reply_cost(reply, self._price) for reply in sent]
        usd = "unknown" if None in costs else f"{sum(cost or 0.0 for cost in costs):.6f} USD"
        say(
            f"\nrequests sent: {len(sent)} ({self.replies_before} in earlier runs), cost {usd};"
            " equal requests are sent once"
        )
        note(FOOTNOTE)
        if json is not None:
            document = {
                **config.record(),
                "items": len(data.items),
                "requests": len(sent),
                "cost_usd": None if None in costs else sum(cost or 0.0 for cost in costs),
                "curves": points,
                "trends": trends,
                "bottega": __version__,
            }
            json.write_bytes(to_json(document))

    def _report_failures(self, store: RunStore | None) -> None:
        failures = store.failures() if store else []
        for one in failures[:SHOWN_FAILURES]:
            say(f"failed: {one.method}, item {one.index}: {one.error}")
        if self.failed:
            hint = (
                "repeat the command to retry them" if store else "store replies with --out FOLDER"
            )
            say(f"{plural(self.failed, 'answer')} failed; {hint}")


def _row(point: CurvePoint) -> tuple[object, ...]:
    return (
        *(point.curve, f"{point.rate:g}", point.streams, point.n),
        *bounds(point.accuracy),
        *bounds(point.gain),
        *(point.master_share, point.agreement),
        "unknown" if point.cost_usd is None else f"{point.cost_usd:.4f}",
    )


def _part_row(point: CurvePoint) -> tuple[object, ...]:
    parts = (None if one is None else one.value for one in point.gains)
    return point.curve, f"{point.rate:g}", *parts, *bounds(point.growth)
