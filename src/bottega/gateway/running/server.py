"""Gateway server: admission, connection limits, startup and shutdown."""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from starlette.routing import BaseRoute
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bottega._util.tracing import Tracer
from bottega.errors import BottegaError
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import Entry
from bottega.gateway.apis.batches.execution import BatchRunner
from bottega.gateway.apis.batches.routes import batch_routes
from bottega.gateway.apis.batches.store import BatchStore
from bottega.gateway.apis.feedback import FeedbackEndpoint
from bottega.gateway.asgi import PROBE_PATHS, App, endpoints_by_path, error_at, open_to_pages
from bottega.gateway.config.gateway_settings import MB, Config
from bottega.gateway.errors import CLOSING, error_response
from bottega.gateway.ports import Receive, RequestRecord, Scope, Send, Tenants
from bottega.gateway.request.chat import Gateway
from bottega.gateway.request.decode_budget import BODY_BYTES_PER_SECOND, BodyBudget
from bottega.gateway.request.exchange import ChatEndpoint
from bottega.gateway.request.reading import Limits
from bottega.gateway.request.request_traces import RequestTraces
from bottega.gateway.running.tiers import TierSet
from bottega.gateway.state.shared import SharedState
from bottega.gateway.telemetry.logs import log_request
from bottega.gateway.telemetry.metrics import CONTENT_TYPE, Metrics
from bottega.gateway.telemetry.request_spans import RequestSpans
from bottega.gateway.telemetry.worker_metrics import WorkerMetrics
from bottega.openai_api.errors import ApiError
from bottega.types import Usage

LIMITS = Limits()
# The parser concatenates a header again with every chunk. An endless header would block the event
# loop long before it fills the memory.
HEADERS_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class ClientConnection(HttpToolsProtocol):
    """HTTP connection with limits that uvicorn lacks: the size of headers, and the time to receive
    headers and bodies and to send a reply. Trailers after a body are ignored."""

    header_seconds = 30.0
    message_seconds = 180.0  # and more for long bodies; `BodyBudget` ends those that are read
    write_seconds = 60.0
    check_seconds = 5.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._unparsed_bytes = 0  # since the last body chunk or the start of the message
        self._headers_done, self._body_bytes = False, 0
        self._message_start: float | None = self.loop.time()
        self._write_blocked_since: float | None = None
        self._timer = self.loop.call_later(self.check_seconds, self._check_timeouts)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed_bytes += len(data)
        super().data_received(data)  # resets the count for each complete part
        if self._unparsed_bytes > LIMITS.header_bytes and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(HEADERS_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._message_start, self._headers_done = self.loop.time(), False
        self._body_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headers_done:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headers_done = True
        try:
            LIMITS.check_headers(self.headers)
        except ApiError as error:
            error.headers["connection"] = "close"
            self.app = cast(Any, error_response(error))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes, self._message_start = 0, None
        super().on_message_complete()

    def pause_writing(self) -> None:
        self._write_blocked_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_blocked_since = None
        super().resume_writing()

    def _check_timeouts(self) -> None:
        now = self.loop.time()
        patience = self.message_seconds if self._body_bytes else self.header_seconds
        patience += self._body_bytes / BODY_BYTES_PER_SECOND
        slow = self._message_start is not None and now - self._message_start > patience
        # While reading is paused the application is slow, not the client.
        if (slow and not self.flow.read_paused) or (
            self._write_blocked_since is not None
            and now - self._write_blocked_since > self.write_seconds
        ):
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(self.check_seconds, self._check_timeouts)


FULL = ApiError(
    "the gateway has reached its limit of concurrent requests",
    status=503,
    code="overloaded",
    headers={"retry-after": "1"},
    hint="try again in a moment",
)


class Admission:
    """ASGI wrapper that rejects requests above a maximum, with an error of their API. Probes are
    always admitted; `/readyz` fails while it is `closing`. Web pages of `origins` may call the API,
    and read all of its errors."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        limit: int,
        origins: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._app = app
        self.limit = limit
        self._origins = origins
        self.in_flight = 0
        self.closing = False
        self._empty = asyncio.Event()

    async def finish(self, within: float) -> None:
        """Wait until no request is in progress, at most `within` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self.in_flight:
                    self._empty.clear()
                    await self._empty.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await open_to_pages(self._admit, scope, self._origins())(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self.closing and scope["path"] == "/readyz":
            await error_response(CLOSING)(scope, receive, send)
        elif scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
        elif self.in_flight >= self.limit:
            await error_at(scope["path"], FULL)(scope, receive, send)
        else:
            # No await since the comparison: two requests cannot take the same last slot.
            self.begin()
            try:
                await self._app(scope, receive, _closing(send) if self.closing else send)
            finally:
                self.end()

    def begin(self) -> None:
        """Count a request that has begun."""
        self.in_flight += 1

    def end(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._empty.set()


def _closing(send: Send) -> Send:
    """Return a `send` that closes the connection after the reply, so the client's next request goes
    to another gateway."""

    async def send_and_close(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"connection", b"close")]
            message = {**message, "headers": headers}
        await send(message)

    return send_and_close


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
LARGE_BLOCK, KEPT_AT_HEAP_END, ARENAS = 12 << 20, 32 << 20, 2


def unmap_large_blocks() -> bool:
    """Make malloc map each block of 12 MB or more separately and unmap it when it is freed. Return
    whether the C library supports this.

    By default glibc raises this threshold to the largest block freed so far: after the first large
    image, the next ones come from heaps, where one small block above them keeps them allocated.
    orjson parses in a block of twelve times the body's length: with a threshold of 4 MB, each image
    of 500 kB faulted in new memory, which took a quarter of the CPU time of its request.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    # A fixed threshold also ends the automatic one for trimming heaps. At its default of 128 kB,
    # each request with an image returned its body's memory, and the next one faulted it in again.
    # 8 MB is too little, because orjson's block is larger: most of the memory was returned.
    mallopt(M_TRIM_THRESHOLD, KEPT_AT_HEAP_END)
    # Each arena keeps so much, and by default the threads use up to eight for each core.
    mallopt(M_ARENA_MAX, ARENAS)
    return bool(mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK))


log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
COUNT_SECONDS = 15.0
PUBLISH_SECONDS = 1.0


class TenantPool(Tenants, Protocol):
    def counts(self) -> dict[str, int]: ...

    async def aclose(self) -> None: ...


@dataclass
class GatewayServer:
    """All parts of a running gateway. uvicorn runs `app`. A caller that does not run its lifespan
    must await `aclose`."""

    config: Config
    tier_set: TierSet
    tenants: TenantPool
    metrics: Metrics
    accounts: Accounts
    ledger: Ledger
    gateway: Gateway
    state: SharedState | None = None
    traces: RequestTraces | None = None
    feedback: FeedbackEndpoint | None = None
    batches: BatchRunner | None = None
    tracer: Tracer | None = None
    close_tracer: Callable[[], None] = lambda: None
    is_ready: bool = False
    worker_metrics: WorkerMetrics | None = None  # set if other workers serve the same port
    when_ready: Callable[[], None] = lambda: None
    app: Admission = field(init=False)
    inner: App = field(init=False)

    def build_app(self, more: Sequence[BaseRoute] = ()) -> None:
        """Build `app`, with `more` routes such as those of the administration API."""
        bodies = BodyBudget(self.config.limits.receiving_mb * MB)
        chat_endpoint = ChatEndpoint(
            self.gateway.answer, self.on_end, self.gateway.limits, bodies=bodies
        )
        settings, folder = self.config.batches, self.config.gateway.data
        has_batches = settings.concurrency > 0 and self.state is None
        batches = BatchStore(folder) if has_batches else None
        if self.tracer is not None:
            chat_endpoint = replace(chat_endpoint, measure=RequestSpans(self.tracer))
        app = App(
            self.gateway,
            chat_endpoint,
            is_ready=lambda: self.is_ready,
            tier_problems=self.tier_set.tier_problems,
            metrics=lambda: (self._exposition(), CONTENT_TYPE),
            more=[*more, *batch_routes(self.gateway, batches, settings, self._wake_batches)],
            lifespan=self.lifespan,
        )
        self.inner = app
        limit = self.config.gateway.max_concurrent
        self.app = Admission(app, limit, lambda: self.gateway.allowed_origins)
        if batches is not None:
            endpoints = endpoints_by_path(self.gateway, chat_endpoint)
            self.batches = BatchRunner(
                batches, self.gateway, settings, folder, self.accounts.find, self.app, endpoints
            )
        self.metrics.in_flight.set_function(lambda: self.app.in_flight)
        self.metrics.lost_rows(lambda: self.ledger.lost)
        self.metrics.ready(lambda: self.is_ready)

    def _wake_batches(self) -> None:
        if self.batches is not None:
            self.batches.wake()

    def on_end(self, record: RequestRecord) -> None:
        """Record a request that has ended: ledger entry, metrics and log line."""
        entry = record.entry()
        self._add_entry(record, entry)
        self.metrics.observe(entry)
        log_request(
            entry,
            record.reason,
            record.fallback,
            record.client_request_id,
            record.trace_id,
            record.route_reason,
        )
        if record.entered:
            self.gateway.access.leave(record.account)

    async def commit(self, record: RequestRecord) -> None:
        """Add the ledger entry of a reply and wait until it is durable, before the reply ends."""
        assert self.state is not None
        self._add_entry(record, record.entry())
        await self.state.commit(record)

    def _add_entry(self, record: RequestRecord, entry: Entry) -> None:
        """Add the entry to the ledger, once."""
        if record.in_ledger:
            return
        record.in_ledger = True
        self.ledger.record(entry)
        if record.reservation is not None:  # after the entry: the cost must always count somewhere
            record.reservation.release()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        """Load models and embedders in the background while the port is open; `/readyz` succeeds
        once they are loaded."""
        work = [asyncio.create_task(self.warm_up()), asyncio.create_task(self._count())]
        work.append(asyncio.create_task(self._publish()))
        if self.state is not None:
            work.append(asyncio.create_task(self.state.run()))
        if self.batches is not None:
            work.append(asyncio.create_task(self.batches.run()))
        try:
            yield
        finally:
            for one in work:
                one.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await self.aclose()

    async def warm_up(self) -> None:
        """Open the cache and check the tiers, again and again until at least one tier can
        answer."""
        served = self.tier_set.served
        while True:
            opened, answering = await asyncio.gather(
                self._succeeds("the cache", self.tenants.open("")),
                asyncio.gather(*(self._succeeds(one.name, one.upstream.check()) for one in served)),
            )
            if opened and any(answering):
                break
            await asyncio.sleep(RETRY_SECONDS)
        for one in served:  # the first lookup loads the price tables
            await asyncio.to_thread(self.tier_set.prices, one.upstream.model, Usage())
        self.is_ready = True
        self.when_ready()
        log.info("ready")

    async def _succeeds(self, name: str, work: Awaitable[object]) -> bool:
        try:
            await work
        except BottegaError as error:
            log.warning("%s is not ready: %s", name, error)
        except Exception:
            log.exception("%s is not ready", name)
        else:
            return True
        return False

    async def _count(self) -> None:
        while True:
            try:
                for name, count in (await asyncio.to_thread(self.tenants.counts)).items():
                    self.metrics.cache_entries(name, count)
            except BottegaError as error:  # closed in the meantime, or a failing disk
                log.warning("counting the cache's examples failed: %s", error)
            await asyncio.sleep(COUNT_SECONDS)

    async def _publish(self) -> None:
        """Write the metrics for the other workers."""
        while self.worker_metrics is not None:
            await asyncio.to_thread(self.worker_metrics.write)
            await asyncio.sleep(PUBLISH_SECONDS)

    def _exposition(self) -> bytes:
        shared = self.worker_metrics
        return self.metrics.exposition() if shared is None else shared.exposition()

    async def aclose(self) -> None:
        if self.worker_metrics is not None:
            await asyncio.to_thread(self.worker_metrics.close)
        if self.batches is not None:
            await self.batches.aclose()
        if self.gateway.shadow is not None:
            await self.gateway.shadow.aclose()
        await self.tier_set.aclose()
        await self.tenants.aclose()
        if self.state is not None:
            await self.state.aclose()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        await asyncio.to_thread(self.ledger.close)
        await asyncio.to_thread(self.accounts.close)
        # Last: a collector that does not answer delays it, and the process may exit meanwhile.
        await asyncio.to_thread(self.close_tracer)
