"""What `bottega eval` says at its end, and writes for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from bottega import __version__
from bottega.cli.measuring import Run, print_results
from bottega.cli.output import note, say, to_json
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.budget import Budget
from bottega.evaluation.episodes import EXCLUDE
from bottega.evaluation.journal import Journal
from bottega.evaluation.ledger import Unkept
from bottega.evaluation.outcomes import titled
from bottega.evaluation.pairing import paired
from bottega.evaluation.votes import VOTES

SHOWN_FAILURES = 10


def report(
    data: Benchmark, asked: Mapping[str, object], runs: Sequence[Run], file: Path | None
) -> None:
    results, compared = [result for result, _ in runs], paired(runs)
    if results:
        say(f"{asked['model']}, examples by {asked['retrieve']} ({asked['embedder']})")
    print_results(data, results, compared)
    if file is not None and results:
        head = {**asked, "exclude": EXCLUDE, **_sizes(data)}
        file.write_bytes(to_json({**head, "results": results, "paired": compared}))


def _sizes(data: Benchmark) -> dict[str, int | str | None]:
    return {
        "knowledge_base": len(data.knowledge),
        "made_wrong": data.made_wrong,
        "items": len(data.items),
        "labels": len(data.labels),
        "bottega": __version__,
    }


def say_who_explains(showing: Sequence[str], runs: Sequence[Run]) -> None:
    """Where methods differ in more than their names, a comparison has to say so."""
    shown = dict.fromkeys(result.method for result, _ in runs if result.shots)
    others = [name for name in shown if name not in showing and name not in VOTES]
    explaining = [name for name in shown if name in showing]
    if explaining and others:
        note(
            f"demonstrations of {', '.join(explaining)} show their"
            f" rationales, those of {', '.join(others)} do not: --rationales or --no-rationales"
            " compares like with like"
        )


def say_failures(ledger: Journal | Unkept, out: Path | None) -> None:
    failures = ledger.failures() if isinstance(ledger, Journal) else []
    for one in failures[:SHOWN_FAILURES]:
        say(f"failed: {titled(one.method, one.shots)}, item {one.place}: {one.error}")
    if len(failures) > SHOWN_FAILURES:
        say(f"and {len(failures) - SHOWN_FAILURES} more; bottega report {out} lists all")


def say_what_is_missing(skipped: int, limits: Budget, out: Path | None) -> None:
    if skipped:
        say(f"{skipped} of what was read could not be used and is in no figure")
    if limits.is_spent:
        again = "goes on" if out else "begins again: without --out nothing was kept"
        say(f"stopped at {limits.spent:.4f} USD; the same command with a larger --budget {again}")


def say_if_failed(data: Benchmark, runs: Sequence[Run], out: Path | None) -> None:
    """And ends with 1."""
    failed = sum(result.failed for result, _ in runs)
    if failed:
        again = "the same command asks them again" if out else "--out DIR keeps what was answered"
        say(f"{failed} of {len(data.items) * len(runs)} requests failed; {again}")
        raise typer.Exit(1)
