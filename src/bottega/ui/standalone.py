"""Console without a gateway: pages of a knowledge base, evaluation runs and traces."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from bottega._util.sqlite import application_id
from bottega.errors import SettingError
from bottega.evaluation.runs.run_store import FILE, RUN_FILE
from bottega.gateway.accounting.access import check_host
from bottega.gateway.asgi import unframed
from bottega.gateway.errors import error_response
from bottega.image import Image
from bottega.knowledge.sqlite.schema import KNOWLEDGE_BASE
from bottega.openai_api.errors import ApiError
from bottega.recording import TraceStore
from bottega.recording.traces import TRACE_STORE
from bottega.ui.application import common_routes, unknown_page
from bottega.ui.bases import BaseOpener
from bottega.ui.cache import CachePages, cache_routes
from bottega.ui.evaluation_runs import RunLibrary
from bottega.ui.evaluations import EVALUATIONS, evaluation_routes
from bottega.ui.knowledge_pages import KnowledgePages, knowledge_routes
from bottega.ui.pages import Link, Renderer
from bottega.ui.request_pages import RequestPages
from bottega.ui.sessions import Sessions

REQUESTS = Link("/requests", "Requests")
KNOWLEDGE = Link("/knowledge", "Knowledge base")
CACHE = Link("/cache", "Cache")
CLOSING_SECONDS = 1
NO_TARGET = "pass a knowledge base, a run of bottega eval --out, a folder of runs, or traces.db"


@dataclass(frozen=True)
class Targets:
    """Files that the console shows: folders of runs, a knowledge base, and a file of traces."""

    runs: Sequence[Path] = ()
    knowledge: Path | None = None
    traces: Path | None = None

    @classmethod
    def of(cls, paths: Sequence[Path]) -> Targets:
        """Return the targets of the paths by kind. Raises `SettingError` and `StoreError`."""
        runs: list[Path] = []
        files: dict[str, Path] = {}
        for path in paths:
            kind = _kind(path)
            if kind == RUN_FILE.name:
                runs.append(path if path.is_dir() else path.parent)
            elif files.setdefault(kind, path) != path:
                raise SettingError(f"{path} is a second {kind}", hint=f"pass only one {kind}")
        return cls(
            tuple(dict.fromkeys(runs)), files.get(KNOWLEDGE_BASE.name), files.get(TRACE_STORE.name)
        )


def _kind(path: Path) -> str:
    if path.is_dir():
        if not RunLibrary([path]).folders():
            raise SettingError(f"{path} contains no runs", hint=NO_TARGET)
        return RUN_FILE.name
    if not path.is_file():
        raise SettingError(f"{path} does not exist", hint=NO_TARGET)
    owner = application_id(path)
    for kind in (RUN_FILE, KNOWLEDGE_BASE, TRACE_STORE):
        if kind.application_id == owner and (kind is not RUN_FILE or path.name == FILE):
            return kind.name
    raise SettingError(f"{path} is not a knowledge base, a run or a trace store", hint=NO_TARGET)


class PageGuard:
    """ASGI middleware that forbids frames around pages and, with `is_local`, rejects host names of
    other machines: a page whose name resolves to 127.0.0.1 has the console's origin."""

    def __init__(self, app: ASGIApp, is_local: bool) -> None:
        self._app, self._is_local = app, is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            send = unframed(send)
            try:
                if self._is_local:
                    check_host(Headers(scope=scope).get("host"))
            except ApiError as error:
                app = error_response(error)
        await app(scope, receive, send)


def standalone_app(
    runs: Sequence[Path],
    open_base: BaseOpener | None,
    traces: TraceStore | None,
    token: str,
    *,
    is_local: bool = True,
) -> Starlette:
    """Return the application; users log in with `token`. `open_base` blocks; it is None without
    a knowledge base. With `is_local` it listens on loopback only."""
    links = [
        *([] if open_base is None else [KNOWLEDGE, CACHE]),
        *([] if traces is None else [REQUESTS]),
        *([EVALUATIONS] if runs else []),
    ]
    renderer = Renderer(links, Sessions(None, token=token))
    routes = common_routes(renderer)
    if open_base is not None:

        def forget(namespace: str) -> None:
            """Do nothing: there is no response cache."""

        routes += knowledge_routes(renderer, KnowledgePages(open_base, forget))
        # The limit of pinned entries does not apply: the only user is an admin.
        routes += cache_routes(renderer, CachePages(open_base, forget, 0))
    if traces is not None:
        routes += request_routes(renderer, traces, open_base)
    if runs:
        routes += evaluation_routes(renderer, RunLibrary(runs))
    routes.append(renderer.route("/{path:path}", unknown_page))
    return Starlette(routes=routes, middleware=[Middleware(PageGuard, is_local)])


def request_routes(
    renderer: Renderer, traces: TraceStore, open_base: BaseOpener | None
) -> list[Route]:
    def base_image(namespace: str, sha256: str) -> Image | None:
        return None if open_base is None else open_base(namespace).images([sha256]).get(sha256)

    requests = RequestPages(None, traces, account_names=dict, base_image=base_image)
    page = renderer.route
    return [
        page("/requests", requests.browse),
        page("/requests/{id}", requests.show),
        page("/requests/{id}/images/{sha256}", requests.image),
        page("/requests/{id}/explanation", requests.explanation),
    ]


def _is_not_cancellation(record: logging.LogRecord) -> bool:
    # Stopping the server cancels requests that are not finished: not an error.
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class ConsoleServer(uvicorn.Server):
    """Server that stops on SIGINT or SIGTERM. `started` is called once it accepts connections."""

    def __init__(self, app: Starlette, started: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                ws="none",
                timeout_graceful_shutdown=CLOSING_SECONDS,
            )
        )
        self._on_started = started
        logging.getLogger("uvicorn.error").addFilter(_is_not_cancellation)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Unlike in uvicorn, the signal is not raised again after the shutdown. A second one ends
        # open connections.
        self.force_exit, self.should_exit = self.should_exit, True
