"""Gateway server: admission, connection limits, startup and shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from starlette.routing import BaseRoute

from bottega._util.batch_writer import OutageLog
from bottega._util.native import return_freed_memory
from bottega._util.tracing import Tracer
from bottega.errors import BottegaError
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.apis.batches.execution import BatchRunner
from bottega.gateway.apis.batches.routes import batch_routes
from bottega.gateway.apis.batches.store import BatchStore
from bottega.gateway.apis.feedback import FeedbackEndpoint
from bottega.gateway.asgi import Admission, App, endpoints_by_path
from bottega.gateway.config.gateway_settings import MB, Config
from bottega.gateway.ports import Tenants
from bottega.gateway.request.chat import Gateway
from bottega.gateway.request.exchange import BodyBudget, ChatEndpoint
from bottega.gateway.request.finalization import RequestRecorder
from bottega.gateway.request.request_traces import RequestTraces
from bottega.gateway.running.tiers import TierSet
from bottega.gateway.state.shared import SharedState
from bottega.gateway.telemetry.metrics import CONTENT_TYPE, Metrics, WorkerMetrics
from bottega.gateway.telemetry.request_spans import RequestSpans
from bottega.types import Usage

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
COUNT_SECONDS = 15.0
PUBLISH_SECONDS = 1.0
TRIM_SECONDS = 15.0


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
    recorder: RequestRecorder = field(init=False)
    _outages: defaultdict[str, OutageLog] = field(
        default_factory=lambda: defaultdict(partial(OutageLog, log, logging.WARNING))
    )

    def __post_init__(self) -> None:
        self.recorder = RequestRecorder(self.ledger, self.metrics, self.gateway.access, self.state)

    def build_app(self, more: Sequence[BaseRoute] = ()) -> None:
        """Build `app`, with `more` routes such as those of the administration API."""
        bodies = BodyBudget(self.config.limits.receiving_mb * MB)
        chat_endpoint = ChatEndpoint(
            self.gateway.answer, self.recorder, self.gateway.limits, bodies=bodies
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
        self.app = Admission(app, limit, app.allowed_origins)
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

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        """Load models and embedders in the background while the port is open; `/readyz` succeeds
        once they are loaded."""
        work = [asyncio.create_task(self.warm_up()), asyncio.create_task(self._count())]
        work += [asyncio.create_task(self._publish()), asyncio.create_task(self._trim())]
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
            self._outages[name].failed("%s is not ready: %s", name, error)
        except Exception as error:
            self._outages[name].failed("%s is not ready", name, exc_info=error)
        else:
            return True
        return False

    async def _count(self) -> None:
        outage = OutageLog(log, logging.WARNING)
        while True:
            try:
                for name, count in (await asyncio.to_thread(self.tenants.counts)).items():
                    self.metrics.cache_entries(name, count)
                outage.ended("the cache's examples are counted again")
            except BottegaError as error:  # closed in the meantime, or a failing disk
                outage.failed("counting the cache's examples failed: %s", error)
            await asyncio.sleep(COUNT_SECONDS)

    async def _publish(self) -> None:
        """Write the metrics for the other workers."""
        while self.worker_metrics is not None:
            await asyncio.to_thread(self.worker_metrics.write)
            await asyncio.sleep(PUBLISH_SECONDS)

    async def _trim(self) -> None:
        """Return freed memory to the system every `TRIM_SECONDS`. Else heaps keep the peak that
        requests have needed, as gaps between used blocks."""
        while True:
            await asyncio.sleep(TRIM_SECONDS)
            await asyncio.to_thread(return_freed_memory)

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
