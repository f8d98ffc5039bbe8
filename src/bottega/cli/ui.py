"""The command `bottega ui`."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack, closing
from functools import cache, partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from bottega._util.locations import StoreLocation
from bottega.cli.components import open_embedder
from bottega.cli.knowledge_files import open_to_add
from bottega.cli.output import say
from bottega.errors import needs_extra
from bottega.evaluation.knowledge_rows import open_rows
from bottega.knowledge import KnowledgeBase

PORT = 8001  # 8000 is the gateway's


def ui(
    targets: Annotated[
        list[Path],
        Argument(
            metavar="TARGET", help="Knowledge base, run folder, folder of runs, or traces.db."
        ),
    ],
    host: Annotated[str, Option(metavar="ADDRESS", help="Listen address.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0 selects a free one.")] = PORT,
) -> None:
    """Open the console without a gateway, for a knowledge base, evaluation runs or traces.

    Its pages show and edit the examples of a knowledge base, show finished and running evaluations
    of bottega eval and stream, and show the requests of bottega ask and classify. Targets of
    different kinds may be combined. Open the printed link, which contains an access token, in a
    browser. Ctrl-C stops the console.
    """
    with needs_extra("ui"):
        from bottega.gateway.config.gateway_settings import ServerSettings
        from bottega.gateway.running.process import base_url, bind_socket
        from bottega.recording import TraceStore
        from bottega.ui.sessions import new_token
        from bottega.ui.standalone import ConsoleServer, Targets, standalone_app

    found, token = Targets.of(targets), new_token()
    listening = ServerSettings(host=host, port=port)
    with bind_socket(listening) as listener, ExitStack() as stack:
        traces, bases = None, None
        if found.traces is not None:
            traces = stack.enter_context(closing(TraceStore.open(found.traces)))
        if found.knowledge is not None:
            file = StoreLocation.from_argument(str(found.knowledge))
            open_rows(file).close()  # a damaged or newer file ends the command, not its pages
            bases = OpenBases(file, stack)
        url = base_url(listening, listener.getsockname()[1]).removesuffix("/v1")

        def announce() -> None:
            say(f"console: {url}/ui/login?token={token}")
            say("  anyone with this link can open the console; Ctrl-C stops it")
            sys.stdout.flush()

        app = standalone_app(found.runs, bases, traces, token, is_local=listening.is_loopback)
        ConsoleServer(app, announce).run([listener])


class OpenBases:
    """Namespaces of a knowledge base, opened when a page needs them and closed by `stack`."""

    def __init__(self, file: StoreLocation, stack: ExitStack) -> None:
        self._file, self._stack = file, stack
        self._opened: dict[str, KnowledgeBase] = {}
        self._lock = threading.Lock()
        self._open = partial(open_to_add, opener=cache(open_embedder))

    def __call__(self, namespace: str) -> KnowledgeBase:
        """Return the knowledge base of a namespace. Blocks while the embedder loads."""
        with self._lock:
            if namespace not in self._opened:
                base = self._stack.enter_context(self._open(self._file, None, namespace))
                self._opened[namespace] = base
            return self._opened[namespace]
