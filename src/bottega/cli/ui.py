"""The command `bottega ui`."""

from __future__ import annotations

import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from bottega.cli.output import say
from bottega.errors import needs_extra

PORT = 8001  # 8000 is the gateway's


def ui(
    targets: Annotated[
        list[Path],
        Argument(metavar="TARGET", help="Run folder, folder of runs, or traces.db."),
    ],
    host: Annotated[str, Option(help="Listen address.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0 selects a free one.")] = PORT,
) -> None:
    """Open the console without a gateway: evaluation runs and traces as pages.

    It shows the runs of bottega eval and stream, while they are in progress too, and the requests
    of bottega ask and classify. Targets of different kinds may be combined. The printed link has
    the token that opens the console; Ctrl-C ends it.
    """
    with needs_extra("ui"):
        from bottega.gateway.config.settings import ServerSettings
        from bottega.gateway.running.process import base_url, bind_socket
        from bottega.recording import TraceStore
        from bottega.ui.sessions import new_token
        from bottega.ui.standalone import ConsoleServer, Targets, standalone_app

    found, token = Targets.of(targets), new_token()
    listening = ServerSettings(host=host, port=port)
    opened = nullcontext() if found.traces is None else closing(TraceStore.open(found.traces))
    with bind_socket(listening) as listener, opened as traces:
        url = base_url(listening, listener.getsockname()[1]).removesuffix("/v1")

        def announce() -> None:
            say(f"console: {url}/ui/login?token={token}")
            say("  the link opens it for anyone who has it; Ctrl-C ends it")
            sys.stdout.flush()

        ConsoleServer(standalone_app(found, traces, token), announce).run([listener])
