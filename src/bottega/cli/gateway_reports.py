"""The commands about the ledger of a gateway: `bottega savings`, `experiment` and `feedback`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

from typer import Option

from bottega._util.progress import plural
from bottega.cli.help import HelpCommand, command_group
from bottega.cli.options import (
    DataFolder,
    Json,
    OnlyNamespace,
    SharedDatabase,
    gateway_store,
    since_option,
)
from bottega.cli.output import clock, format_usd, note, print_json, print_table, say
from bottega.gateway.accounting.experiment_report import (
    MIN_VALUES,
    SequentialEstimate,
    experiment_report,
)
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.reports import read_feedback
from bottega.gateway.accounting.savings import Route, Savings, SavingsEstimate
from bottega.gateway.accounting.savings import savings as savings_of
from bottega.routing.benefit_gate import AgreementRange

COLUMNS = (
    *("outcome", "requests", "share", "tokens in", "tokens out"),
    *("USD", "similarity", "seconds"),
)
experiment = command_group("Compare the variants of an experiment.")
METRIC_NAMES = {
    "agreement": "agreement with the master, decided pairs",
    "undecided": "undecided comparisons",
    "rating": "rating",
    "failed": "share of failed requests",
    "master": "share of the master",
    "cost_usd": "USD per answer",
    "seconds": "seconds per answer",
}
feedback = command_group("Read the feedback that clients have sent.")


def savings(
    data: DataFolder = None,
    database: SharedDatabase = None,
    namespace: OnlyNamespace = None,
    since: Annotated[float | None, since_option("requests")] = None,
    master: Annotated[
        str | None,
        Option(metavar="NAME", help="Tier to compare with (default: the gateway's master)."),
    ] = None,
    json: Json = False,
) -> None:
    """Report what requests cost and what the master alone would have cost."""
    location = gateway_store(data, database)
    with closing(Ledger(location, create=False)) as ledger:
        found = savings_of(ledger, namespace=namespace, since=since, master=master)
    if json:
        print_json(found)
        return
    if found.routes:
        _print_savings(found)
    elif namespace is not None or since is not None:
        say("no requests match the filters")
    else:
        say("no requests yet")
        serve = f" --data {location.parent}" if isinstance(location, Path) else ""
        note(f"start the gateway with bottega serve{serve}; it records its requests")
    if found.lost_rows:
        say(
            f"{plural(found.lost_rows, 'row')} not written and therefore excluded: see the"
            " gateway's log"
        )


def _print_savings(found: Savings) -> None:
    where = "" if found.namespace is None else f" in namespace {found.namespace!r}"
    answered = "" if found.answered == found.requests else f", {found.answered} answered"
    span = f"{clock(found.first or 0)} to {clock(found.last or 0)}"
    say(f"{plural(found.requests, 'request')}{where}{answered}, {span}")
    print_table(COLUMNS, [_row(route, found.answered) for route in found.routes])
    left_out = f"; {found.unpriced} of unknown price are excluded" if found.unpriced else ""
    say(f"spent:            {format_usd(found.spent_usd)} USD, n = {found.requests}{left_out}")
    if found.servers_usd:
        hours = f"{found.hours:.{1 if found.hours >= 1 else 4}f} hours"
        say(f"servers:          {format_usd(found.servers_usd)} USD, {hours}")
    _print_alone(found)
    _print_agreement(found)


def _print_alone(found: Savings) -> None:
    alone = found.master_only
    if alone is None:
        tiers = sorted({route.tier for route in found.routes if route.state == "answered"})
        say(
            f"the master alone: unknown: no priced answer of {found.master!r} (requests passed"
            " straight through do not count)"
        )
        note(f"tiers that answered: {', '.join(tiers) or 'none'}; --master NAME chooses another")
        return
    say(f"the master alone: {_money(alone.usd)}")
    share = f", {alone.saved.value / alone.usd.value:.0%} of it" if alone.usd.value > 0 else ""
    if alone.saved.value < 0:
        share = ": the master alone would have cost less"
    say(f"saved:            {_money(alone.saved)}{share}")
    if not alone.estimated:
        note(f"{found.master!r} answered all requests itself")
        return
    borrowed = ""
    if alone.pooled:
        borrowed = (
            f"; {alone.pooled} of them, in namespaces without such answers, at the overall mean"
        )
    note(
        f"an estimate: {plural(alone.estimated, 'request')} not answered by the master, at"
        f" the mean cost of the answers of {found.master!r} (n = {alone.usd.n}) in the same"
        f" namespace{borrowed}"
    )


def _print_agreement(found: Savings) -> None:
    agreement = found.agreement
    if agreement is None:
        say("agreement:        not measured; set rate = 0.02 in [shadow] if it is 0")
        return
    say(
        f"agreement with the master: n = {plural(agreement.n, 'sampled answer')} of cheaper"
        f" tiers, {agreement.served.undecided} undecided:"
    )
    gain = agreement.gain
    rows = [
        ("as served", _share(agreement.served)),
        ("with demonstrations", _share(agreement.with_demonstrations)),
        ("without demonstrations", _share(agreement.without)),
        ("difference (decided pairs)", f"{gain.value:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"),
    ]
    print_table(("answers", "all undecided different to all the same [95 % interval]"), rows)


def _row(route: Route, answered: int) -> tuple[object, ...]:
    similarity = None if route.similarity is None else f"{route.similarity:.3f}"
    return (
        _how(route),
        route.requests,
        f"{route.requests / answered:.1%}" if route.is_answer else None,
        route.prompt_tokens,
        route.completion_tokens,
        format_usd(route.cost_usd) if route.unpriced < route.requests else None,
        similarity and f"{similarity} (n = {route.compared})",
        route.seconds,
    )


def _how(route: Route) -> str:
    match route.state:
        case "answered":
            return f"{route.tier}, {route.shots} shown" if route.shots else route.tier
        case "replayed":
            return "replayed"
        case "shadow":
            return f"shadow: {route.tier}"
    return f"{route.state}: {route.tier}" if route.tier else route.state


def _money(figure: SavingsEstimate) -> str:
    if figure.low is None or figure.high is None:
        return (
            f"about {format_usd(figure.value)} USD (no interval: too few answers, n = {figure.n})"
        )
    return f"{format_usd(figure.value)} USD [{format_usd(figure.low)}, {format_usd(figure.high)}]"


def _share(found: AgreementRange) -> str:
    share = f"{found.least:.3f} to {found.most:.3f}" if found.undecided else f"{found.least:.3f}"
    return f"{share} [{found.low:.3f}, {found.high:.3f}]"


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
        (
            METRIC_NAMES[one.metric],
            _interval_text(one.a),
            _interval_text(one.b),
            _interval_text(one.difference, "+", n=False),
        )
        for one in found.comparisons
        if one.a is not None or one.b is not None
    ]
    print_table(("mean, 95 % interval", "a", "b", "b - a"), rows)
    note(
        "the intervals are valid at all times, so the experiment may be stopped at any time;"
        f" those of cost and seconds start at {MIN_VALUES} answers, later if few are costly"
    )


def _interval_text(
    estimate: SequentialEstimate | None, sign: str = "", *, n: bool = True
) -> str | None:
    if estimate is None:
        return None
    value, low, high = (
        None if number is None else f"{number:{sign}.4g}"
        for number in (estimate.value, estimate.low, estimate.high)
    )
    interval = "no interval" if low is None else f"[{low}, {high}]"
    return f"{value} {interval}" + (f" (n = {estimate.n})" if n else "")


@feedback.command(cls=HelpCommand)
def export(
    data: DataFolder = None,
    database: SharedDatabase = None,
    namespace: OnlyNamespace = None,
    since: Annotated[float | None, since_option("feedback")] = None,
    corrections: Annotated[
        bool, Option("--corrections", help="Only feedback with a corrected answer.")
    ] = False,
) -> None:
    """Print ratings, corrections and comments as JSON lines, oldest first."""
    count = 0
    with closing(Ledger(gateway_store(data, database), create=False)) as ledger:
        for one in read_feedback(ledger, namespace=namespace, since=since or 0.0):
            if one.correction is not None or not corrections:
                say(dumps(asdict(one), ensure_ascii=False))
                count += 1
    if not count:
        note("no feedback matches; clients send it to POST /v1/feedback")
