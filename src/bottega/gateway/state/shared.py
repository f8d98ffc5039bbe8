"""Connections of a gateway to the servers that hold the shared state."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from bottega._util.batch_writer import OutageLog
from bottega._util.event_loops import BACKGROUND_LOOP, gather_or_cancel
from bottega._util.postgres import PostgresPool
from bottega._util.valkey import ValkeyPipe, display_valkey_url, valkey_client, valkey_errors
from bottega.errors import StoreError
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import GATEWAY_TABLES
from bottega.gateway.ports import RequestRecord
from bottega.gateway.state.gates import SharedGates
from bottega.gateway.state.limits import RENEW_SECONDS, LimitStore, SharedLimiter
from bottega.gateway.state.postgres_state import PostgresLimits, PostgresRepeats
from bottega.gateway.state.redis_state import RedisLimits, RedisRepeats, spending_reader
from bottega.gateway.state.repeats import RepeatStore, SharedRepeats
from bottega.gateway.state.response_cache import ReplyCache

log = logging.getLogger(__name__)

# Maximum wait of a reply for the commit of its ledger entry, which then stays in memory.
COMMIT_SECONDS = 2.0
ANSWER_SECONDS = 5.0
NO_EVICTION = "noeviction"


class SharedState:
    """State that a gateway shares with others through PostgreSQL and, if `redis` is a URL, Redis.
    It belongs to the event loop of `run`."""

    def __init__(
        self,
        database: str,
        redis: str | None,
        ledger: Ledger,
        repeat_seconds: float,
        memory: ReplyCache,
    ) -> None:
        self._ledger = ledger
        self._pool = PostgresPool(  # the ledger has migrated the tables
            database, GATEWAY_TABLES, answer_seconds=ANSWER_SECONDS, resets=False, migrates=False
        )
        self._pipe = None if redis is None else ValkeyPipe(redis)
        limits: LimitStore = PostgresLimits(self._pool)
        repeats: RepeatStore = PostgresRepeats(self._pool)
        if self._pipe is not None:
            limits = RedisLimits(self._pipe, spending_reader(self._pool))
            repeats = RedisRepeats(self._pipe)
        self.limiter = SharedLimiter(limits, ledger)
        self.repeats = SharedRepeats(repeats, memory, repeat_seconds)
        self.gates = SharedGates(ledger)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outage = OutageLog(log)

    async def run(self) -> None:
        """Renew the leases of this process and read the changes and samples of others, until
        cancelled."""
        self._loop = asyncio.get_running_loop()
        await self._ledger.enter_loop(self._pool)
        await gather_or_cancel([self._renew(), self.gates.run()])

    async def _renew(self) -> None:
        while True:
            try:
                await asyncio.gather(self.limiter.renew(), self.repeats.refresh())
            except StoreError as error:
                self._outage.failed("the shared state cannot be reached: %s", error)
            except Exception:  # one failure must not end the renewal
                log.exception("renewing leases failed")
            else:
                self._outage.ended("the shared state can be reached again")
            await asyncio.sleep(RENEW_SECONDS)

    async def commit(self, record: RequestRecord) -> None:
        """Wait until the record's ledger entry is durable and its reservation has ended, at most
        `COMMIT_SECONDS`. After that, the entry stays in memory and the reservation counts until it
        is written."""
        ended = self.limiter.release_task(record.reservation) or self._ledger.durable()
        await asyncio.wait([ended], timeout=0 if self._ledger.is_failing else COMMIT_SECONDS)

    def invalidate_all(self) -> None:
        """Invalidate the replies of all gateways. Blocks; must not be called in the thread of the
        event loop. Raises `StoreError`."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self.repeats.invalidate_all(), self._loop).result()

    async def aclose(self) -> None:
        await self.repeats.aclose()
        await self.limiter.aclose()
        await self._ledger.leave_loop()
        with suppress(StoreError):
            await self._pool.close()
        if self._pipe is not None:
            await self._pipe.aclose()


def check_redis(url: str) -> None:
    """Raise `StoreError` if the server cannot be used, and warn if it may evict keys. Blocks."""
    name = display_valkey_url(url)

    async def read_memory() -> dict[str, Any]:
        client = valkey_client(url)
        try:
            with valkey_errors(name):
                await client.ping()
            with suppress(StoreError), valkey_errors(name):  # INFO may not be allowed
                return dict(await client.info("memory"))
            return {}
        finally:
            await client.aclose()

    memory = BACKGROUND_LOOP.run(read_memory())
    policy = memory.get("maxmemory_policy", NO_EVICTION)
    if memory.get("maxmemory") and policy != NO_EVICTION:
        log.warning(
            "the server of state.redis, %s, evicts keys when its memory is full (%s), so clients"
            " may exceed their rates and repeats cost calls: set its maxmemory-policy to %s",
            *(name, policy, NO_EVICTION),
        )
