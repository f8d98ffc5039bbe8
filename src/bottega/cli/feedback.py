"""The command `bottega feedback export`."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

from typer import Option

from bottega.cli.help import HelpCommand, command_group
from bottega.cli.options import (
    DataFolder,
    OnlyNamespace,
    SharedDatabase,
    gateway_store,
    since_option,
)
from bottega.cli.output import note, say
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.reports import read_feedback

feedback = command_group("Read the feedback that clients have sent.")


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
                say(json.dumps(asdict(one), ensure_ascii=False))
                count += 1
    if not count:
        note("no feedback matches; clients send it to POST /v1/feedback")
