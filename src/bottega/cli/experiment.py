"""The command `bottega experiment report`."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

from typer import Option

from bottega._util.progress import plural
from bottega.cli.help import HelpCommand, command_group
from bottega.cli.options import DataFolder, Json, SharedDatabase, gateway_store, since_option
from bottega.cli.output import note, print_json, print_table, say
from bottega.gateway.accounting.experiment_report import (
    MIN_VALUES,
    SequentialEstimate,
    experiment_report,
)
from bottega.gateway.accounting.ledger import Ledger

experiment = command_group("Compare the variants of an experiment.")
NAMES = {
    "agreement": "agreement with the master, decided pairs",
    "undecided": "undecided comparisons",
    "rating": "rating",
    "failed": "share of failed requests",
    "master": "share of the master",
    "cost_usd": "USD per answer",
    "seconds": "seconds per answer",
}


@experiment.command(cls=HelpCommand)
def report(
    data: DataFolder = None,
    database: SharedDatabase = None,
    name: Annotated[
        str | None,
        Option("--experiment", help="Name of the experiment (default: the latest)."),
    ] = None,
    since: Annotated[float | None, since_option("requests")] = None,
    json: Json = False,
) -> None:
    """Report quality, cost and latency of both variants, with always-valid intervals."""
    with closing(Ledger(gateway_store(data, database), create=False)) as ledger:
        found = experiment_report(ledger, name, since=since or 0.0)
    if json:
        print_json(found)
        return
    replayed = f", of which {found.replayed[0]} and {found.replayed[1]} were replayed"
    say(
        f"experiment {found.experiment!r}: {plural(found.requests[0], 'request')} of a,"
        f" {found.requests[1]} of b{replayed if any(found.replayed) else ''}"
    )
    rows = [
        (NAMES[one.metric], _text(one.a), _text(one.b), _text(one.difference, "+", n=False))
        for one in found.comparisons
        if one.a is not None or one.b is not None
    ]
    print_table(("mean, 95 % interval", "a", "b", "b - a"), rows)
    note(
        "the intervals are valid at all times, so the experiment may be stopped at any time;"
        f" those of cost and seconds start at {MIN_VALUES} answers, later if few are costly"
    )


def _text(estimate: SequentialEstimate | None, sign: str = "", *, n: bool = True) -> str | None:
    if estimate is None:
        return None
    value, low, high = (
        None if number is None else f"{number:{sign}.4g}"
        for number in (estimate.value, estimate.low, estimate.high)
    )
    interval = "no interval" if low is None else f"[{low}, {high}]"
    return f"{value} {interval}" + (f" (n = {estimate.n})" if n else "")
