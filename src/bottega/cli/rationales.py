"""The command `bottega rationales`, with the statistics of RCTS, Table 6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Annotated

import typer
from typer import Option

from bottega._util.event_loops import run_closing
from bottega._util.executor import Actor, LocalExecutor
from bottega._util.progress import ReportStep, plural
from bottega.cli.components import LOCAL, check_executor, open_executor, open_prices
from bottega.cli.options import (
    BudgetOption,
    DryRun,
    Json,
    KnowledgeFile,
    Namespace,
    On,
    PriceOption,
    WorkerCount,
    Yes,
)
from bottega.cli.output import (
    at_terminal,
    note,
    noting_interruption,
    print_json,
    print_table,
    say,
    waiting,
    warn,
)
from bottega.cli.shown_progress import progress
from bottega.errors import WorkerError
from bottega.evaluation.knowledge_rows import check_filled, open_rows
from bottega.evaluation.metrics.metric import mean
from bottega.evaluation.outcomes import Budget, is_item_error
from bottega.naming import ModelSpec
from bottega.rationales import (
    PendingRationales,
    RationaleGenerator,
    RationaleResult,
    RationaleWriter,
    find_pending,
)
from bottega.types import Example, Sampling

SHOWN_FAILURES = 10
COLUMNS = ("rationales", "of", "n", "accuracy", "low", "high")
EXPLAINED = (
    "accuracy is the share of right predictions with its 95 % interval: over all entries, with"
    " rejected ones as 0 (RCTS, Table 6); over entries with a kept rationale, which the same"
    " predictions selected; and over entries, for the mean of all tested candidates"
)

FRESH = (
    "fresh entries and fresh kept are the same with new predictions, which selected no rationale"
)

RationaleFigure = Mapping[str, float | int | None]


@dataclass
class Run:
    """Results of this run, with a progress callback."""

    made: list[RationaleResult] = field(default_factory=list)
    step: ReportStep = lambda steps, cost_usd=0.0, /: None

    def done(self, id: str, made: RationaleResult) -> None:
        self.made.append(made)
        self.step(1, made.cost_usd or 0.0)
        if made.error is not None and self.failed <= SHOWN_FAILURES:
            warn(made.error, about=id)

    @property
    def scores(self) -> list[float]:
        return [one.score for one in self.made if one.rationale is not None]

    @property
    def fresh_scores(self) -> list[float]:
        return [one.fresh_score for one in self.made if one.fresh_score is not None]

    @property
    def failed(self) -> int:
        return sum(one.error is not None for one in self.made)

    @property
    def rejected(self) -> int:
        return len(self.made) - len(self.scores) - self.failed

    @property
    def cost_usd(self) -> float | None:
        costs = [one.cost_usd for one in self.made]
        priced = [cost for cost in costs if cost is not None]
        return sum(priced) if len(priced) == len(costs) else None


def report(found: PendingRationales, run: Run, json: bool) -> None:
    """Report this run and all rationales of the file."""
    # Candidate scores are not stored, so only this run has them.
    tested = [fmean(one.tried) for one in run.made if one.tried and one.error is None]
    rows = {"this run": {**_row(run.scores, run.rejected), "candidates": _figure(tested)}}
    fresh = run.fresh_scores
    if fresh:
        row = _row(fresh, run.rejected)
        rows["this run"] |= {f"fresh {of}": figure for of, figure in row.items()}
    rejected = found.rejected + run.rejected
    if found.scores or found.rejected:
        rows["with earlier ones"] = _row([*found.scores, *run.scores], rejected)
    given = sum(one.usage.prompt_tokens for one in run.made)
    written = sum(one.usage.completion_tokens for one in run.made)
    requests = sum(one.requests for one in run.made)
    calls = sum(one.calls for one in run.made)
    spent = {
        "failed": run.failed,
        "requests": requests,
        "calls": calls,
        "verified": sum(one.verified for one in run.made),
        "prompt_tokens": given,
        "completion_tokens": written,
        "cost_usd": run.cost_usd,
    }
    left = len(found.ids) - len(run.made) + run.failed
    if json:
        counts = {"given": found.given, "passages": found.passages}
        print_json({"rows": rows, **spent, "left": left, "rejected": rejected, **counts})
        return
    table = [(whose, of, *figure.values()) for whose in rows for of, figure in rows[whose].items()]
    print_table(COLUMNS, table)
    price = "at an unknown price" if run.cost_usd is None else f"for {run.cost_usd:.4f} USD"
    say(
        f"{len(run.scores)} kept, {run.rejected} rejected, {run.failed} failed;"
        f" {plural(requests, 'request')}, {plural(calls, 'call')},"
        f" {plural(given, 'token')} in, {written} out,"
        f" {price}"
    )
    if rejected:
        note(f"no right rationale for {plural(rejected, 'example')}; retry with --again")
    note(
        f"{plural(left, 'example')} left (without --limit), {found.given} came with a rationale,"
        f" {found.passages} have no answer; {EXPLAINED}{f'; {FRESH}' if fresh else ''}"
    )


def _row(kept: Sequence[float], rejected: int) -> dict[str, RationaleFigure]:
    return {"entries": _figure([*kept, *[0.0] * rejected]), "kept": _figure(kept)}


def _figure(scores: Sequence[float]) -> RationaleFigure:
    if not scores:
        return {"n": 0, "accuracy": None, "low": None, "high": None}
    figure = mean(scores, seed=0)
    return {"n": len(scores), "accuracy": figure.value, "low": figure.low, "high": figure.high}


def rationales(
    file: KnowledgeFile,
    model: Annotated[
        str,
        Option(
            metavar="NAME",
            help="openai:NAME (endpoint: OPENAI_BASE_URL), or a Hugging Face id or folder.",
        ),
    ],
    candidates: Annotated[int, Option(min=1, help="Candidate rationales per example.")] = 10,
    predictions: Annotated[int, Option(min=1, help="Predicted answers per candidate.")] = 10,
    fresh: Annotated[
        int,
        Option(
            min=0,
            help="Make N new predictions with each kept rationale, and report their accuracy beside"
            " that of the predictions that selected it.",
        ),
    ] = 0,
    all_candidates: Annotated[
        bool, Option("--all-candidates", help="Verify all candidates, even after a perfect one.")
    ] = False,
    again: Annotated[
        bool,
        Option("--again", help="Include examples with a rationale or with rejected candidates."),
    ] = False,
    limit: Annotated[int | None, Option(min=1, help="Maximum number of examples.")] = None,
    namespace: Namespace = "",
    max_tokens: Annotated[int, Option(min=1, help="Maximum tokens of a rationale.")] = 512,
    concurrency: Annotated[
        int, Option(min=1, help="Maximum concurrent examples and requests.")
    ] = 16,
    budget: BudgetOption = None,
    price: PriceOption = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    on: On = LOCAL,
    workers: WorkerCount = None,
    json: Json = False,
) -> None:
    """Write rationales for examples and keep those that lead to the right answer (RCTS).

    Each rationale is stored at once; the same command resumes after an interruption. Examples with
    a rationale or with rejected candidates are skipped. Exits with 1 if a request failed; such
    examples remain unchanged.
    """
    spending = Budget(budget)  # fail before anything is loaded
    check_executor(on, workers)
    spec = ModelSpec.of(model, concurrency=concurrency)
    factory = RationaleFactory(
        spec,
        candidates=candidates,
        predictions=predictions,
        fresh=fresh,
        stop_early=not all_candidates,
        max_tokens=max_tokens,
        price=price,
    )
    if dry_run:
        with open_rows(file, namespace) as knowledge:
            check_filled(knowledge, file, namespace)
            pending = find_pending(knowledge, again=again)
        count = len(pending.ids[:limit])
        calls = count * (candidates * (1 + predictions) + fresh)
        say(
            f"{file}: {plural(count, 'example')} to explain, {pending.given} with a rationale;"
            f" {model}; at most {plural(calls, 'call', ',')}"
        )
        return
    run = Run()
    with open_executor(on, workers) as executor:
        executor = executor or LocalExecutor()
        factory = replace(factory, model=spec.share(executor.count))
        makers = executor.start(factory, concurrency=concurrency)
        with open_rows(file, namespace) as knowledge:
            check_filled(knowledge, file, namespace)
            found = find_pending(knowledge, again=again)
            work = RationaleWriter(
                knowledge, WorkerRationales(makers), is_item_error=is_item_error, done=run.done
            )
            job = Job(run, work, found.ids[:limit], concurrency, asks=not yes)
            kept = "finished rationales are stored; repeat the command to resume"
            with noting_interruption(lambda: kept):
                try:
                    run_closing(job.all(spending), makers)
                finally:
                    report(found, run, json)
    if spending.is_spent:
        note(f"--budget {budget} is spent; repeat the command with a larger one to resume")
    if run.failed:
        raise typer.Exit(1)


class RationaleActor:
    """Rationale generator with its model."""

    def __init__(self, rationales: RationaleGenerator) -> None:
        self._rationales = rationales

    async def __call__(self, example: Example, /) -> RationaleResult:
        return await self._rationales.make(example)

    async def aclose(self) -> None:
        await self._rationales.generator.aclose()


@dataclass(frozen=True)
class RationaleFactory:
    """Factory of a `RationaleActor` from the name of a model and settings."""

    model: ModelSpec
    candidates: int
    predictions: int
    fresh: int
    stop_early: bool
    max_tokens: int
    price: str | None

    def __call__(self) -> RationaleActor:
        return RationaleActor(
            RationaleGenerator(
                self.model.open(),
                candidates=self.candidates,
                predictions=self.predictions,
                fresh=self.fresh,
                stop_early=self.stop_early,
                sampling=Sampling(temperature=0.7, max_tokens=self.max_tokens),
                price=open_prices(self.price),
            )
        )


@dataclass(frozen=True)
class WorkerRationales:
    """Source of rationales that workers write."""

    workers: Actor[Example, RationaleResult]

    async def make(self, example: Example) -> RationaleResult:
        try:
            return await self.workers(example)
        except WorkerError as error:  # as for failed requests, its cost is not counted
            return RationaleResult(error=error)


@dataclass
class Job:
    """Job that writes one rationale, estimates the cost of the others, and then writes them."""

    run: Run
    work: RationaleWriter
    ids: Sequence[str]
    concurrency: int
    asks: bool

    async def all(self, spending: Budget) -> None:
        rest = await self._first(spending)
        if rest and not spending.is_spent and self._confirm(len(rest)):
            with progress("writing rationales", len(rest), counts_money=True) as step:
                self.run.step = step
                await self.work.run(rest, spending, self.concurrency)

    async def _first(self, spending: Budget) -> Sequence[str]:
        """Run examples until one succeeds; return the others."""
        for index, id in enumerate(self.ids):
            with waiting("running the first example"):
                await self.work.run([id], spending, 1)
            if spending.is_spent or self.run.scores or self.run.rejected:
                return self.ids[index + 1 :]
        return ()

    def _confirm(self, left: int) -> bool:
        last = self.run.made[-1]
        tokens = last.usage.prompt_tokens + last.usage.completion_tokens
        note(
            f"the first example took {plural(last.requests, 'request')} and"
            f" {plural(tokens, 'token')}"
        )
        if last.cost_usd is None:
            note(f"{left} more: about {left * tokens} tokens; the price is unknown (set --price)")
        else:
            # The highest possible cost of an example with all its candidates.
            highest = max(one.at_most_usd for one in self.run.made)
            about, bound = left * last.cost_usd, left * highest
            note(
                f"{left} more: about {about:.4f} USD, up to {bound:.4f} USD if each needs all its"
                " candidates"
            )
        if not (self.asks and at_terminal()) or last.cost_usd == 0:
            return True
        return typer.confirm("Continue?", err=True)
