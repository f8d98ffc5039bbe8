"""The command `bottega stream`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Exit, Option

from bottega import __version__
from bottega._util.progress import plural
from bottega.cli.components import open_prices
from bottega.cli.evaluation_output import SHOWN_FAILURES, print_plan, stored_text
from bottega.cli.options import (
    BenchmarkSpec,
    BudgetOption,
    DryRun,
    JsonFile,
    Yes,
    options_from_fields,
)
from bottega.cli.output import (
    at_terminal,
    check_output,
    format_usd,
    note,
    noting_interruption,
    print_table,
    say,
    to_json,
)
from bottega.cli.shown_progress import TERMINAL
from bottega.errors import BudgetError, SettingError
from bottega.evaluation.config import MODELS_HELP
from bottega.evaluation.metrics.metric import bounds
from bottega.evaluation.outcomes import Budget
from bottega.evaluation.streams.stream_plan import APPRENTICE, MASTER, StreamConfig
from bottega.evaluation.streams.stream_run import MissingAnswersError, StreamRun
from bottega.evaluation.streams.stream_summary import TREND_COLUMNS, CurvePoint
from bottega.recipes.cache_retrieval import BY_DRAFT

MOST_UNCONFIRMED = 1000  # paid requests
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
    " equal the master's. USD is the mean cost of a stream if every request is sent. p is the p"
    " value of Page's trend test, with one block per order."
)


@dataclass(frozen=True)
class StreamModels:
    """Options of the two models of most streams."""

    master: Annotated[
        str | None, Option(metavar="NAME", help=f"The large model: {MODELS_HELP}")
    ] = None
    apprentice: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="The small model; accepts the same names.",
            show_default="bundled:photos with an embedder of photographs, else bundled",
        ),
    ] = None

    def in_tiers(self, config: StreamConfig) -> StreamConfig:
        """Return the settings with these models as tiers, unless --tiers names all of them."""
        if not config.tiers:
            return replace(config, tiers=(self.apprentice or "", self.master or ""))
        if self.master or self.apprentice:
            raise SettingError(
                "--tiers replaces --master and --apprentice, got both", hint="remove one of them"
            )
        return config


@dataclass(frozen=True)
class StreamOptions:
    """Options of `bottega stream` on which no answer depends."""

    apprentice_url: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="Base URL of the apprentice's endpoint; its key is APPRENTICE_API_KEY.",
            show_default="the master's endpoint: OPENAI_BASE_URL, OPENAI_API_KEY",
        ),
    ] = None
    concurrency: Annotated[int, Option(min=1, help="Maximum concurrent streams.")] = 32
    budget: BudgetOption = None
    master_price: Annotated[
        str | None,
        Option(
            metavar="IN,OUT",
            help="USD per million tokens of the master, IN,OUT (default: published prices).",
        ),
    ] = None
    apprentice_price: Annotated[
        str | None,
        Option(metavar="IN,OUT", help="USD per million tokens of all other models, IN,OUT."),
    ] = None
    out: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Store every reply and answer in this folder. The same command resumes the run; "
            "`bottega report` reads it.",
        ),
    ] = None
    json: JsonFile = None
    dry_run: DryRun = False
    yes: Yes = False


@options_from_fields()
def stream(
    benchmark: BenchmarkSpec, models: StreamModels, config: StreamConfig, options: StreamOptions
) -> None:
    """Answer a stream of questions with an apprentice and a master whose answers fill a cache.

    This is the evaluation of Cache-of-Thought (section 6.2): items arrive one by one, a router
    sends each to the master or to the apprentice, and the master's answers become demonstrations.
    No model, cache or router sees a gold answer. Equal requests of several streams are sent once;
    the cost of a stream counts all of its requests."""
    run = _opened(models.in_tiers(replace(config, benchmark=benchmark)), options)
    if options.dry_run:
        drafts = not set(BY_DRAFT).isdisjoint(config.retrieve)
        print_plan(run.data, run.config.tiers, run.calls, drafts=drafts, orders=len(run.orders))
        return
    with noting_interruption(lambda: stored_text(run.stored, options.out)):
        try:
            run.execute(
                out=options.out,
                budget_usd=options.budget,
                confirm=lambda *paid: _confirm(run.config, *paid, asks=not options.yes),
            )
        except BudgetError as error:
            say(f"{error}; {error.hint}")
        except MissingAnswersError as error:
            say(error.hint)
            raise Exit(1) from error
        finally:
            _report(run, options.json)
            _report_failures(run, options.out)
    if run.failed:
        raise Exit(1)


def _opened(config: StreamConfig, options: StreamOptions) -> StreamRun:
    """Return the run of the streams. Raises `SettingError`."""
    check_output(options.json)
    Budget(options.budget)  # fail before anything is loaded
    prices = {
        MASTER: open_prices(options.master_price, "--master-price"),
        APPRENTICE: open_prices(options.apprentice_price, "--apprentice-price"),
    }
    run = StreamRun(
        config,
        prices=prices,
        apprentice_url=options.apprentice_url,
        concurrency=options.concurrency,
        display=TERMINAL,
    )
    tiers = run.config.tiers
    if len(set(tiers)) < len(tiers) and options.master_price != options.apprentice_price:
        raise SettingError(
            f"master and apprentice have one name but two prices, got {tiers[-1]}",
            hint="serve one of them under another name, or set equal prices",
        )
    return run


def _confirm(config: StreamConfig, requests: int, usd: float | None, *, asks: bool) -> None:
    """Note the number and cost of the paid requests. Ask before more than `MOST_UNCONFIRMED`;
    raise `Exit` if the user declines, and `SettingError` without a terminal."""
    if not requests:
        return
    cost = "an unknown price (set --master-price and --apprentice-price)"
    if usd is not None:
        cost = f"{format_usd(usd)} USD if replies have {plural(config.max_tokens, 'token')}"
    counted = plural(requests, "paid request", ",")
    note(f"about {counted} for {cost}")
    if not asks or requests <= MOST_UNCONFIRMED:
        return
    if not at_terminal():
        problem = f"{counted}, more than {MOST_UNCONFIRMED:,}, need confirmation"
        raise SettingError(problem, hint="add --yes")
    if not typer.confirm("Continue?", err=True):
        raise Exit(1)


def _report(run: StreamRun, json: Path | None) -> None:
    """Print the results of the complete streams, and write them to a file as JSON."""
    points, trends = run.curves(), run.trends()
    if not points:
        return
    config, data, usd = run.config, run.data, run.cost_usd
    say(
        f"{data.name}: {plural(len(data.items), 'item')} in {plural(config.orders, 'order')};"
        f" apprentice {' and '.join(config.tiers[:-1])}, master {config.tiers[-1]}, router"
        f" {config.router}; {data.metrics[0].name.replace('_', ' ')} with 95 % intervals"
    )
    print_table(COLUMNS, [_row(point) for point in points])
    if any(point.growth for point in points):
        say("")
        print_table(PART_COLUMNS, [_part_row(point) for point in points if point.growth])
    if trends:
        say("")
        print_table(TREND_COLUMNS, [trend.row for trend in trends])
    say(
        f"\nrequests sent: {len(run.replies)} ({run.replies_before} in earlier runs), cost"
        f" {'unknown' if usd is None else f'{usd:.6f} USD'}; equal requests are sent once"
    )
    note(FOOTNOTE)
    if json is not None:
        document = {
            **config.record(),
            "items": len(data.items),
            "requests": len(run.replies),
            "cost_usd": usd,
            "curves": points,
            "trends": trends,
            "bottega": __version__,
        }
        json.write_bytes(to_json(document))


def _report_failures(run: StreamRun, out: Path | None) -> None:
    for one in run.failures[:SHOWN_FAILURES]:
        say(f"failed: {one.method}, item {one.index}: {one.error}")
    if run.failed:
        hint = "repeat the command to retry them" if out else "store replies with --out FOLDER"
        say(f"{plural(run.failed, 'answer')} failed; {hint}")


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
