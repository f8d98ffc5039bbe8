"""Limits of several gateways: in process, in PostgreSQL and in Redis."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from bottega.gateway.accounting.access import (
    AccountBudgetError,
    Limiter,
    LimitsUnavailableError,
    LocalLimiter,
    Reservation,
)
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import Account, Entry
from bottega.gateway.state.limits import SharedLimiter
from bottega.gateway.state.response_cache import ReplyCache
from bottega.gateway.state.shared import SharedState
from tests.postgres import PostgresServer
from tests.redis import RedisServer

LIMITED = Account("a", "a", requests_per_minute=60, usd_per_month=1.0)


@pytest.fixture
def database(gateway_database: str) -> str:
    return gateway_database


@dataclass
class Process:
    """Limiter and ledger of one gateway."""

    limiter: Limiter
    ledger: Ledger
    state: SharedState | None = None

    async def call(self, reservation: Reservation, usd: float) -> None:
        """End a request that has cost this amount."""
        reservation.settle(usd)
        self.ledger.record(
            Entry(time.time(), "r", reservation.account.id, "", "t", "m", "answered", cost_usd=usd)
        )
        reservation.release()
        if isinstance(self.limiter, SharedLimiter) and (
            task := self.limiter.release_task(reservation)
        ):
            await task


@asynccontextmanager
async def process(
    location: str, redis: str | None = None, *, runs: bool = True
) -> AsyncIterator[Process]:
    """Run the limiter of one gateway; without `runs` it renews nothing, as if it had stopped."""
    ledger = await asyncio.to_thread(Ledger, location)
    if ledger.shared is None:
        yield Process(LocalLimiter(ledger), ledger)
        ledger.close()
        return
    state = SharedState(location, redis, ledger, 60.0, ReplyCache(1 << 20, 60.0))
    task = asyncio.create_task(state.run()) if runs else None
    try:
        yield Process(state.limiter, ledger, state)
    finally:
        if task is not None:
            task.cancel()
        await state.aclose()
        await asyncio.to_thread(ledger.close)


@pytest.fixture(params=["memory", "postgres", "redis"])
async def processes(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncGenerator[list[Process]]:
    """Three processes that share limits; in memory, the same one three times."""
    async with AsyncExitStack() as opened:
        if request.param == "memory":
            one = await opened.enter_async_context(process(str(tmp_path / "gateway.db")))
            yield [one, one, one]
            return
        url = request.getfixturevalue("database")
        redis = request.getfixturevalue("redis").url if request.param == "redis" else None
        yield [await opened.enter_async_context(process(url, redis)) for _ in range(3)]


@pytest.fixture(params=["postgres", "redis"])
def servers(request: pytest.FixtureRequest, database: str) -> tuple[str, str | None]:
    """URLs of the database and of Redis, if it holds the limits."""
    redis = request.getfixturevalue("redis").url if request.param == "redis" else None
    return database, redis


async def test_rate_holds_over_all_processes(processes: list[Process]) -> None:
    account = Account("a", "a", requests_per_minute=60)
    waits = await asyncio.gather(
        *(processes[i % 3].limiter.admit(account) for i in range(186)),
    )
    assert 60 <= waits.count(None) <= 62
    assert all(wait is None or 0 < wait <= 1 for wait in waits)
    others = Account("b", "b", requests_per_minute=1)
    assert await processes[0].limiter.admit(others) is None
    assert await processes[1].limiter.admit(others) == pytest.approx(60, abs=5)


async def test_key_without_limits_needs_no_server(processes: list[Process]) -> None:
    free = Account("free", "free")
    started = time.monotonic()
    for _ in range(1000):
        assert await processes[0].limiter.admit(free) is None
    reservation = processes[0].limiter.reservation(free)
    await reservation.reserve(1e9)
    reservation.release()
    assert time.monotonic() - started < 5


async def test_parallel_requests_reserve_their_cost(processes: list[Process]) -> None:
    """Without a reservation at admission all of them would pass."""

    async def ask(one: Process) -> Reservation | None:
        await one.limiter.admit(LIMITED)
        reservation = one.limiter.reservation(LIMITED)
        try:
            await reservation.reserve(0.1)
        except AccountBudgetError as error:
            assert error.status == 429
            return None
        return reservation

    reservations = await asyncio.gather(*(ask(processes[i % 3]) for i in range(30)))
    assert sum(reservation is not None for reservation in reservations) == 10
    for number, reservation in enumerate(reservations):
        if reservation is not None:
            await processes[number % 3].call(reservation, 0.05)
    again = await asyncio.gather(*(ask(processes[i % 3]) for i in range(30)))
    assert sum(reservation is not None for reservation in again) == 5


async def test_spending_is_known_to_all_at_once(processes: list[Process]) -> None:
    account = Account("a", "a", usd_per_month=1.0)
    first, second, third = processes
    for one, cost in ((first, 0.5), (second, 0.25), (third, 0.25)):
        assert await one.limiter.admit(account) is None
        reservation = one.limiter.reservation(account)
        await reservation.reserve(cost)
        await one.call(reservation, cost)
    for one in processes:
        with pytest.raises(AccountBudgetError) as refused:
            await one.limiter.admit(account)
        assert refused.value.code == "insufficient_quota"


async def test_single_request_is_admitted_while_budget_is_left(processes: list[Process]) -> None:
    account = Account("a", "a", usd_per_month=1.0)
    large = processes[0].limiter.reservation(account)
    await large.reserve(50.0)
    other = processes[1].limiter.reservation(account)
    with pytest.raises(AccountBudgetError) as refused:
        await other.reserve(0.01)
    assert refused.value.code == "rate_limit_exceeded"
    await processes[0].call(large, 0.2)
    await other.reserve(0.8)
    with pytest.raises(AccountBudgetError):
        await processes[2].limiter.reservation(account).reserve(0.01)
    other.release()
    if isinstance(processes[1].limiter, SharedLimiter) and (
        task := processes[1].limiter.release_task(other)
    ):
        await task
    await processes[2].limiter.reservation(account).reserve(0.8)


@pytest.mark.parametrize("budget", [0.5, 0.1])
async def test_budget_overshoots_by_one_request_at_most(
    processes: list[Process], budget: float
) -> None:
    account, largest = Account("a", "a", usd_per_month=budget), 0.02

    async def client(seed: int) -> None:
        rng = random.Random(seed)
        while True:
            one = rng.choice(processes)
            reservation = one.limiter.reservation(account)
            try:
                await one.limiter.admit(account)
                await reservation.reserve(rng.uniform(0.5, 1) * largest)
            except AccountBudgetError as error:
                reservation.release()
                if error.code == "insufficient_quota":
                    return
                await asyncio.sleep(rng.uniform(0, 0.02))
                continue
            await asyncio.sleep(rng.uniform(0, 0.01))
            await one.call(reservation, rng.uniform(0, 1) * reservation.reserved)

    async with asyncio.timeout(60):
        await asyncio.gather(*(client(seed) for seed in range(12)))
    ledger = processes[0].ledger
    await asyncio.to_thread(ledger.flush)
    await asyncio.to_thread(ledger.refresh_spending)
    assert budget <= ledger.spent_this_month("a") <= budget + largest


async def test_reservation_outlives_its_lease_while_its_process_runs(
    servers: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    _shorten(monkeypatch, lease=0.6)
    async with process(*servers) as one, process(*servers) as other:
        account = Account("a", "a", usd_per_month=1.0)
        reservation = one.limiter.reservation(account)
        await reservation.reserve(0.9)
        await asyncio.sleep(0.9)
        with pytest.raises(AccountBudgetError):
            await other.limiter.reservation(account).reserve(0.5)


async def test_reservation_ends_with_its_process(
    servers: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that was killed between its commit and its settlement leaves a committed cost."""
    _shorten(monkeypatch, lease=0.6)
    account = Account("a", "a", usd_per_month=1.0)
    async with process(*servers) as other:
        async with process(*servers, runs=False) as killed:
            await killed.limiter.reservation(account).reserve(0.9)
            killed.ledger.record(
                Entry(time.time(), "r", "a", "", "t", "m", "answered", cost_usd=0.7)
            )
            await killed.ledger.flushed()
        with pytest.raises(AccountBudgetError):
            await other.limiter.reservation(account).reserve(0.2)
        await asyncio.sleep(0.8)
        await other.limiter.reservation(account).reserve(0.2)
        with pytest.raises(AccountBudgetError):
            await other.limiter.reservation(account).reserve(0.2)


def _shorten(monkeypatch: pytest.MonkeyPatch, lease: float = 10.0) -> None:
    """Renew reservations more often, with shorter leases and graces."""
    for name in ("limits", "postgres_state", "redis_state"):
        monkeypatch.setattr(f"bottega.gateway.state.{name}.LEASE_SECONDS", lease)
        monkeypatch.setattr(f"bottega.gateway.state.{name}.GRACE_SECONDS", 0.5)
    monkeypatch.setattr("bottega.gateway.state.shared.RENEW_SECONDS", 0.1)


async def test_lost_redis_restores_spending_once(
    database: str, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gateway restores the missing spending, which must not add up."""
    _shorten(monkeypatch)
    account = Account("a", "a", usd_per_month=1.0)
    async with AsyncExitStack() as opened:
        made = [await opened.enter_async_context(process(database, redis.url)) for _ in range(3)]
        reservation = made[0].limiter.reservation(account)
        await reservation.reserve(0.4)
        await made[0].call(reservation, 0.4)
        running = made[1].limiter.reservation(account)
        await running.reserve(0.3)
        redis.run("FLUSHALL")
        waits = await asyncio.gather(*(one.limiter.admit(account) for one in made * 4))
        assert waits == [None] * 12  # none is refused
        # The running request has renewed its reservation before anything else was decided.
        with pytest.raises(AccountBudgetError):
            await made[2].limiter.reservation(account).reserve(0.35)
        # A renewal in progress may briefly restore an ended reservation.
        last = made[2].limiter.reservation(account)
        async with asyncio.timeout(10):
            while not last.reserved:
                with suppress(AccountBudgetError):
                    await last.reserve(0.3)
                await asyncio.sleep(0.05)


async def test_evicted_account_never_exceeds_its_budget(
    database: str, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running requests keep their reservations, and the spending is read from the ledger."""
    _shorten(monkeypatch)
    account = Account("a", "a", usd_per_month=1.0)
    async with process(database, redis.url) as one, process(database, redis.url) as other:
        reservations = [each.limiter.reservation(account) for each in (one, other, other)]
        for reservation in reservations[:2]:
            await reservation.reserve(0.4)
        await one.call(reservations[0], 0.4)
        assert redis.run("DEL", "bottega:limit:a") == 1
        with pytest.raises(AccountBudgetError) as refused:
            await reservations[2].reserve(0.25)
        assert refused.value.code == "rate_limit_exceeded"
        await reservations[2].reserve(0.2)
        assert redis.run("DEL", "bottega:limit:a") == 1
        await other.call(reservations[1], 0.7)  # more than reserved
        for each in (one, other):
            with pytest.raises(AccountBudgetError) as refused:
                await each.limiter.admit(account)
            assert refused.value.code == "insufficient_quota"


async def test_evicted_rate_begins_with_a_full_minute(database: str, redis: RedisServer) -> None:
    account = Account("a", "a", requests_per_minute=2)
    async with process(database, redis.url) as one:
        for _ in range(2):
            waits = [await one.limiter.admit(account) for _ in range(3)]
            assert waits[:2] == [None, None] and waits[2] is not None
            assert redis.run("DEL", "bottega:limit:a") == 1


async def test_restarted_redis_keeps_budgets(
    database: str,
    redis: RedisServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _shorten(monkeypatch)
    account = Account("a", "a", usd_per_month=1.0)
    async with process(database, redis.url) as one:
        reservation = one.limiter.reservation(account)
        await reservation.reserve(0.4)
        redis.stop()
        try:
            with pytest.raises(LimitsUnavailableError) as refused:
                await one.limiter.admit(account)
            assert refused.value.status == 503
            assert refused.value.headers["retry-after"] == "1"
            for _ in range(5):
                with pytest.raises(LimitsUnavailableError):
                    await one.limiter.admit(account)
            assert await one.limiter.admit(Account("free", "free")) is None
        finally:
            redis.start()
        await one.call(reservation, 0.4)
        assert await one.limiter.admit(account) is None
        with pytest.raises(AccountBudgetError):
            again = one.limiter.reservation(account)
            await again.reserve(0.5)
            await one.limiter.reservation(account).reserve(0.2)
    logged = [one.getMessage() for one in caplog.records if one.name.endswith("state.limits")]
    assert ["cannot be checked" in one for one in logged] == [True, False]  # once per outage


async def test_budget_is_refused_while_spending_cannot_be_committed(
    postgres: PostgresServer, database: str
) -> None:
    """Other gateways would not know the spending. A rate needs no ledger."""
    budget, rate = Account("a", "a", usd_per_month=1.0), Account("b", "b", requests_per_minute=60)
    entry = Entry(time.time(), "r", "a", "", "t", "m", "answered", cost_usd=0.1)
    table = "ALTER TABLE gateway_entries RENAME"
    async with process(database) as one:
        await asyncio.to_thread(postgres.execute, database, f"{table} TO away")
        try:
            one.ledger.record(entry)
            assert await one.ledger.durable() is not None
            with pytest.raises(LimitsUnavailableError):
                await one.limiter.admit(budget)
            with pytest.raises(LimitsUnavailableError):
                await one.limiter.reservation(budget).reserve(0.1)
            assert await one.limiter.admit(rate) is None
        finally:
            away = "ALTER TABLE away RENAME TO gateway_entries"
            await asyncio.to_thread(postgres.execute, database, away)
        async with asyncio.timeout(60):
            while await one.ledger.durable() is not None:
                pass
        assert await one.limiter.admit(budget) is None


@pytest.mark.slow
async def test_crash_of_postgres_keeps_budgets(
    postgres: PostgresServer, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlogged tables are empty after a crash; running requests reserve again."""
    account = Account("a", "a", requests_per_minute=600, usd_per_month=1.0)
    _shorten(monkeypatch)
    with postgres.stopping() as server:
        async with process(database) as one, process(database) as other:
            reservation = one.limiter.reservation(account)
            await one.limiter.admit(account)
            await reservation.reserve(0.9)
            await asyncio.to_thread(server.stop, signal.SIGQUIT)
            with pytest.raises(LimitsUnavailableError):
                await other.limiter.admit(account)
            await asyncio.to_thread(server.start)
            await asyncio.sleep(0.1)
            with pytest.raises(AccountBudgetError) as refused:
                await other.limiter.reservation(account).reserve(0.2)
            assert refused.value.code == "rate_limit_exceeded"
            await one.call(reservation, 0.8)
            await other.limiter.reservation(account).reserve(0.2)
