"""Gateway server: its parts, their startup and their shutdown."""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from starlette.routing import BaseRoute

from bottega.errors import BottegaError
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger import Entry, Ledger
from bottega.gateway.accounting.limiter import Limiter
from bottega.gateway.asgi import App, ChatEndpoint
from bottega.gateway.chat import Gateway
from bottega.gateway.config.settings import MB, Config
from bottega.gateway.ports import RequestRecord, Tenants
from bottega.gateway.running.admission import Admission
from bottega.gateway.running.tiers import TierSet
from bottega.gateway.telemetry.logs import log_request
from bottega.gateway.telemetry.metrics import CONTENT_TYPE, Metrics
from bottega.types import Usage

M_MMAP_THRESHOLD = -3  # malloc.h of glibc
BLOCK = 1 << 20


def unmap_large_blocks() -> bool:
    """Make malloc map each block of 1 MB or more separately and unmap it when it is freed. Return
    whether the C library supports this.

    By default glibc raises this threshold to the largest block freed so far: after the first large
    image, the next ones come from heaps, where one small block above them keeps them allocated.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, BLOCK))


log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
COUNT_SECONDS = 15.0


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
    limiter: Limiter
    is_ready: bool = False
    when_ready: Callable[[], None] = lambda: None
    app: Admission = field(init=False)
    inner: App = field(init=False)

    def build_app(self, more: Sequence[BaseRoute] = ()) -> None:
        """Build `app`, with `more` routes such as those of the administration API."""
        chat_endpoint = ChatEndpoint(
            self.gateway.answer, self.over, self.gateway.limits.body_mb * MB
        )
        app = App(
            self.gateway,
            chat_endpoint,
            is_ready=lambda: self.is_ready,
            tier_problems=self.tier_set.tier_problems,
            metrics=lambda: (self.metrics.exposition(), CONTENT_TYPE),
            more=more,
            lifespan=self.lifespan,
        )
        self.inner = app
        self.app = Admission(app, self.config.gateway.max_concurrent)
        self.metrics.in_flight.set_function(lambda: self.app.under_way)
        self.metrics.lost_rows(lambda: self.ledger.lost)

    def over(self, record: RequestRecord) -> None:
        """Record a request that has ended: ledger entry, metrics and log line."""
        entry = ledger_entry(record)
        self.ledger.note(entry)
        self.metrics.observe(entry)
        log_request(entry, record.reason, record.fallback)
        if record.entered and self.gateway.access is not None:
            self.gateway.access.leave(record.account)
        if record.hold is not None:
            record.hold.release()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        """Load models and embedders in the background while the port is open; `/readyz` succeeds
        once they are loaded."""
        work = [asyncio.create_task(self.warm_up()), asyncio.create_task(self._count())]
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
        while True:
            opened, answering = await asyncio.gather(
                self._succeeds("the cache", self.tenants.open("")),
                asyncio.gather(
                    *(
                        self._succeeds(one.name, one.upstream.check())
                        for one in self.tier_set.served
                    )
                ),
            )
            if opened and any(answering):
                break
            await asyncio.sleep(RETRY_SECONDS)
        for one in self.tier_set.served:  # the first lookup loads the price tables
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

    async def aclose(self) -> None:
        if self.gateway.shadow is not None:
            await self.gateway.shadow.aclose()
        await self.tier_set.aclose()
        await self.tenants.aclose()
        await asyncio.to_thread(self.ledger.close)
        await asyncio.to_thread(self.accounts.close)


def ledger_entry(record: RequestRecord) -> Entry:
    usage = record.usage
    return Entry(
        record.begun,
        record.request_id,
        record.account.id,
        record.namespace,
        record.route,
        record.model,
        record.state,
        record.shots,
        record.similarity,
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        record.cost_usd,
        record.seconds,
        record.status,
        dismissed_usd=record.dismissed_usd,
    )
