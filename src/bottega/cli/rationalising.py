"""Giving the examples of a knowledge base rationales."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from bottega.cli.namespaces import check_filled
from bottega.cli.opening import open_rows
from bottega.cli.options import Json, KnowledgeFile, Namespace, PriceOption
from bottega.cli.output import (
    note,
    progress,
    waiting,
)
from bottega.cli.rationalised import Run, report
from bottega.cli.resolving import open_prices
from bottega.evaluation.budget import Budget
from bottega.evaluation.failures import concerns_one, first
from bottega.naming import open_model
from bottega.protocols import Generator
from bottega.rationales import Enriching, Rationales, todo
from bottega.types import Sampling


def rationales(
    file: KnowledgeFile,
    model: Annotated[
        str,
        typer.Option(
            help="openai:NAME (endpoint: OPENAI_BASE_URL), or a Hugging Face id or folder."
        ),
    ],
    candidates: Annotated[int, typer.Option(min=1, help="Rationales to choose from.")] = 10,
    predictions: Annotated[
        int, typer.Option(min=1, help="Answers predicted with each of them.")
    ] = 10,
    all_candidates: Annotated[
        bool,
        typer.Option("--all-candidates", help="Verify all, also after one that is always right."),
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Also where there is one, or none was ever right.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many examples.")] = None,
    namespace: Namespace = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest rationale.")] = 512,
    concurrency: Annotated[int, typer.Option(min=1, help="Examples, and requests, at once.")] = 16,
    budget: Annotated[
        float | None, typer.Option(help="Stop before more US dollars than this are spent.")
    ] = None,
    price: PriceOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before it costs.")] = False,
    json: Json = False,
) -> None:
    """Write a rationale for each example: the one with which its answer is predicted best (RCTS).

    Each is stored when it is made. Stopped halfway, the same command goes on where it was; examples
    that have a rationale, or for which none was ever right, are skipped. Exits with 1 if a request
    failed: such examples stay as they are.
    """
    purse = Budget(budget)  # refuses now what it would refuse later
    generator = open_model(model, concurrency=concurrency)
    maker = Rationales(
        generator,
        candidates=candidates,
        predictions=predictions,
        stop_early=not all_candidates,
        sampling=Sampling(temperature=0.7, max_tokens=max_tokens),
        price=open_prices(price),
    )
    run = Run()
    with open_rows(file, namespace) as knowledge:
        check_filled(knowledge, file, namespace)
        found = todo(knowledge, again=again)
        work = Enriching(knowledge, maker, concerns_one=concerns_one, done=run.done)
        job = Job(run, work, found.ids[:limit], concurrency, asks=not yes)
        try:
            asyncio.run(job.all(generator, purse))
        finally:
            report(found, run, json)
    if job.is_spent:
        note(f"--budget {budget} is spent; the same command with a larger one goes on")
    if run.failed:
        raise typer.Exit(1)


@dataclass
class Job:
    """The first example alone, which tells what one costs, and then the others."""

    run: Run
    work: Enriching
    ids: Sequence[str]
    concurrency: int
    asks: bool
    is_spent: bool = False

    async def all(self, generator: Generator, purse: Budget) -> None:
        try:
            rest = await self._first(purse)
            if rest and not purse.is_spent and self._goes_on(len(rest)):
                with progress("writing rationales", len(rest), counts_money=True) as step:
                    self.run.step = step
                    await self.work.run(rest, purse, self.concurrency)
        except ExceptionGroup as errors:
            raise first(errors) from errors
        finally:
            self.is_spent = purse.is_spent
            await generator.aclose()

    async def _first(self, purse: Budget) -> Sequence[str]:
        """Those that are left once one has succeeded."""
        for place, id in enumerate(self.ids):
            with waiting("asking for the first example"):
                await self.work.run([id], purse, 1)
            if purse.is_spent or self.run.scores or self.run.rejected:
                return self.ids[place + 1 :]
        return ()

    def _dearest(self) -> float:
        """As dear as one was, or had been with all its candidates."""
        return max(one.at_most_usd for one in self.run.made)

    def _goes_on(self, left: int) -> bool:
        last = self.run.made[-1]
        tokens = last.usage.prompt_tokens + last.usage.completion_tokens
        note(f"the first example took {last.requests} requests and {tokens} tokens")
        if last.cost_usd is None:
            note(f"{left} more: about {left * tokens} tokens; the price is not known (--price)")
        else:
            about, most = left * last.cost_usd, left * self._dearest()
            note(
                f"{left} more: about {about:.4f} USD, up to {most:.4f} USD if each needs all its"
                " candidates"
            )
        if not (self.asks and at_terminal()) or last.cost_usd == 0:
            return True
        return typer.confirm("go on?", err=True)


def at_terminal() -> bool:
    return sys.stdin.isatty()
