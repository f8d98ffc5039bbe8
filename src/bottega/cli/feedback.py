"""The command `bottega feedback export`."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from datetime import datetime
from typing import Annotated

from typer import Option, Typer

from bottega.cli.help import HelpCommand, HelpGroup
from bottega.cli.options import Database, DataFolder, gateway_store, parse_time, timestamp
from bottega.cli.output import note, say
from bottega.gateway.accounting.feedback import read_feedback
from bottega.gateway.accounting.ledger import Ledger

feedback = Typer(
    cls=HelpGroup,
    add_completion=False,
    no_args_is_help=True,
    help="Read the feedback that clients have sent.",
)


@feedback.callback()
def group() -> None:
    """Read the feedback that clients have sent."""


@feedback.command(cls=HelpCommand)
def export(
    data: DataFolder = None,
    database: Database = None,
    namespace: Annotated[
        str | None, Option(metavar="NAME", help="Only this namespace (default: all of them).")
    ] = None,
    since: Annotated[
        datetime | None,
        Option(
            metavar="TIME", parser=parse_time, help="Only feedback at or after this local time."
        ),
    ] = None,
    corrections: Annotated[
        bool, Option("--corrections", help="Only feedback with a corrected answer.")
    ] = False,
) -> None:
    """Print ratings, corrections and comments as JSON lines, oldest first."""
    count = 0
    with closing(Ledger(gateway_store(data, database), create=False)) as ledger:
        for one in read_feedback(ledger, namespace=namespace, since=timestamp(since) or 0.0):
            if one.correction is not None or not corrections:
                say(json.dumps(asdict(one), ensure_ascii=False))
                count += 1
    if not count:
        note("no feedback matches; clients send it to POST /v1/feedback")
