"""Several gateways that share PostgreSQL and Redis, in front of one upstream that counts."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger_schema import FILE
from bottega.gateway.config.config_file import parse_config
from bottega.gateway.running.build import build
from bottega.gateway.running.server import GatewayServer
from bottega.gateway.state.repeats import SharedRepeats
from tests.gateway.gateways import ENVIRONMENT, run_gateway
from tests.gateway.metered_gateway import PRICE, Meter
from tests.postgres import PostgresServer, running_postgres
from tests.redis import RedisServer
from tests.server import Server

CONFIG = """
[gateway]
data = "{data}"
[cache]
embed = "words"
"""
TIER = """
[tiers.large]
model = "openai:huge"
base_url = "{url}"
api_key_env = "LARGE_KEY"
price = [10.0, 10.0]
concurrency = 256
"""


@dataclass
class Gateways:
    """Running gateways, one key and their upstream."""

    servers: list[GatewayServer]
    urls: list[str]
    key: str
    meter: Meter

    async def post(
        self, session: aiohttp.ClientSession, number: int, text: str, **more: Any
    ) -> tuple[int, Any]:
        body = {"model": "bottega", "messages": [{"role": "user", "content": text}], **more}
        headers = {"Authorization": f"Bearer {self.key}"}
        url = f"{self.urls[number % len(self.urls)]}/chat/completions"
        async with session.post(url, json=body, headers=headers) as response:
            return response.status, await response.json()

    def spent(self) -> float:
        ledger = self.servers[0].ledger
        ledger.refresh_spending()
        (account,) = self.servers[0].accounts.list()
        return ledger.spent_this_month(account.id)


@pytest.fixture
def database(gateway_database: str) -> str:
    return gateway_database


# The limits and repeats of each store have tests of their own.
SHARED = pytest.mark.parametrize("state", ["postgres", "redis"], indirect=True)
ALL = pytest.mark.parametrize(
    "state", ["memory", pytest.param("postgres", marks=pytest.mark.slow), "redis"], indirect=True
)


@pytest.fixture
def state(request: pytest.FixtureRequest) -> str:
    """Settings of the shared state; without any, one gateway takes all requests."""
    if request.param == "memory":
        return ""
    database = request.getfixturevalue("database")
    if request.param == "postgres":
        return f"[state]\ndatabase_env = 'DATABASE'\n#{database}"
    server: RedisServer = request.getfixturevalue("redis")
    return f"[state]\ndatabase_env = 'DATABASE'\nredis = '{server.url}'\n#{database}"


@contextmanager
def gateways(
    endpoint: Server, folder: Path, state: str, tiers: str = TIER, count: int = 3, **limits: Any
) -> Iterator[Gateways]:
    """Run gateways in threads of this process, each with its own data folder, or without shared
    state a single one."""
    database = state.rpartition("#")[2]
    (folder / "0").mkdir(exist_ok=True)
    with closing(Accounts(database or folder / "0" / FILE)) as accounts:
        _, key = accounts.add("team", **limits)
    meter = Meter(token_seconds=0.0)
    endpoint.answers = [meter]
    with ExitStack() as opened:
        servers, urls = [], []
        for number in range(count if database else 1):
            data = folder / str(number)
            text = (CONFIG + tiers + state).format(data=data, url=endpoint.url)
            servers.append(build(parse_config(text), {**ENVIRONMENT, "DATABASE": database}))
            urls.append(opened.enter_context(run_gateway(servers[-1])))
        yield Gateways(servers, urls, key, meter)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


@SHARED
async def test_rate_is_that_of_one_gateway(endpoint: Server, tmp_path: Path, state: str) -> None:
    with gateways(endpoint, tmp_path, state, requests_per_minute=60) as three:
        async with _session() as session:
            started = time.monotonic()
            replies = await asyncio.gather(
                *(three.post(session, n, f"question {n}", max_tokens=5) for n in range(120))
            )
            elapsed = time.monotonic() - started
        statuses = [status for status, _ in replies]
        # At most 62 within two seconds; each second allows another.
        assert 60 <= statuses.count(200) <= 60 + max(2.0, elapsed)
        assert statuses.count(429) == 120 - statuses.count(200)


@SHARED
async def test_budget_overshoots_by_one_request_at_most(
    endpoint: Server, tmp_path: Path, state: str
) -> None:
    budget = 0.05
    with gateways(endpoint, tmp_path, state, usd_per_month=budget) as three:

        async def client(number: int) -> None:
            rng = random.Random(number)
            async with _session() as session:
                while True:
                    text = f"{number} {rng.random()}: " + "What does the sign say? " * 20
                    status, reply = await three.post(session, rng.randrange(3), text)
                    if status == 429 and reply["error"]["code"] == "insufficient_quota":
                        return
                    assert status in (200, 429), reply
                    if status == 429:
                        await asyncio.sleep(0.02)

        async with asyncio.timeout(60):
            await asyncio.gather(*(client(number) for number in range(6)))
        most = three.meter.max_tokens * PRICE
        spent = await asyncio.to_thread(three.spent)
        assert spent == pytest.approx(three.meter.tokens * PRICE)
        assert budget <= spent <= budget + most


@pytest.mark.parametrize("stream", [False, True])
async def test_entry_is_durable_before_the_reply_ends(
    endpoint: Server, tmp_path: Path, database: str, stream: bool
) -> None:
    """A gateway that is killed after its reply loses nothing."""
    state = f"[state]\ndatabase_env = 'DATABASE'\n#{database}"
    with gateways(endpoint, tmp_path, state, count=1) as one:
        reader = one.servers[0].ledger
        headers = {"Authorization": f"Bearer {one.key}"}
        for number in range(5):
            messages = [{"role": "user", "content": f"question {number}"}]
            body = {"model": "bottega", "messages": messages, "stream": stream}
            async with (
                _session() as session,
                session.post(f"{one.urls[0]}/chat/completions", json=body, headers=headers) as got,
            ):
                assert got.status == 200
                async for line in got.content:
                    if b"[DONE]" in line:
                        break
                (row,) = await asyncio.to_thread(
                    reader.read, "SELECT count(*) FROM gateway_entries"
                )
                assert row == (number + 1,)


@pytest.mark.slow
async def test_stopped_postgres_refuses_budgets_and_keeps_entries(
    endpoint: Server,
    tmp_path: Path,
    postgres: PostgresServer,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bottega.gateway.state.shared.COMMIT_SECONDS", 0.5)
    with postgres.stopping() as server:
        with closing(Accounts(database)) as accounts:
            _, limited = accounts.add("limited", usd_per_month=1.0)
        state = f"[state]\ndatabase_env = 'DATABASE'\n#{database}"
        with gateways(endpoint, tmp_path, state, count=1) as one:
            async with _session() as session:
                free = one.key
                assert (await one.post(session, 0, "before"))[0] == 200
                await asyncio.to_thread(server.stop, signal.SIGINT)
                started = time.monotonic()
                assert (await one.post(session, 0, "while it is down"))[0] == 200
                one.key = limited
                status, reply = await one.post(session, 0, "with a budget")
                assert (status, reply["error"]["code"]) == (503, "limits_unavailable")
                assert time.monotonic() - started < 10
                await asyncio.to_thread(server.start)
                async with asyncio.timeout(10):
                    while (await one.post(session, 0, "again"))[0] != 200:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                one.key = free
                assert (await one.post(session, 0, "after"))[0] == 200
                rows = await asyncio.to_thread(
                    one.servers[0].ledger.read, "SELECT sum(cost_usd) FROM gateway_entries"
                )
                assert rows[0][0] == pytest.approx(one.meter.tokens * PRICE)


def _allow_old_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gateways share repeats on a busy machine, where reading changes takes a second."""
    for name in ("CURRENT_SECONDS", "START_SECONDS"):
        monkeypatch.setattr(f"bottega.gateway.state.repeats.{name}", 30.0)


@ALL
async def test_identical_requests_at_once_cost_one_call(
    endpoint: Server, tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _allow_old_changes(monkeypatch)
    with gateways(endpoint, tmp_path, state) as three:
        three.meter.token_seconds = 0.005
        async with _session() as session:
            replies = await asyncio.gather(
                *(three.post(session, n, "the same question") for n in range(30))
            )
        assert {status for status, _ in replies} == {200}
        assert len({reply["choices"][0]["message"]["content"] for _, reply in replies}) == 1
        assert three.meter.calls == 1
        spent = await asyncio.to_thread(three.spent)
        assert spent == pytest.approx(three.meter.tokens * PRICE)


@ALL
async def test_repeats_over_gateways_cost_one_call(
    endpoint: Server, tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _allow_old_changes(monkeypatch)
    with gateways(endpoint, tmp_path, state) as three:
        async with _session() as session:
            for number in range(6):
                replies = await asyncio.gather(
                    *(three.post(session, n + number, f"question {n}") for n in range(12))
                )
                assert {status for status, _ in replies} == {200}
        assert three.meter.calls == 12


@SHARED
async def test_a_reply_of_another_gateway_is_fetched_once(
    endpoint: Server, tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _allow_old_changes(monkeypatch)
    fetched, begin = list[str](), SharedRepeats.begin

    async def counted(repeats: SharedRepeats, key: str) -> Any:
        fetched.append(key)
        return await begin(repeats, key)

    monkeypatch.setattr(SharedRepeats, "begin", counted)
    with gateways(endpoint, tmp_path, state, count=2) as two:
        async with _session() as session:
            for number in (0, 1, 1, 1):
                assert (await two.post(session, number, "question"))[0] == 200
        assert (two.meter.calls, len(fetched)) == (1, 2)


@SHARED
async def test_deleted_answer_is_forgotten_by_all(
    endpoint: Server, tmp_path: Path, state: str
) -> None:
    with gateways(endpoint, tmp_path, state, admin=True) as three:
        headers = {"Authorization": f"Bearer {three.key}"}
        async with _session() as session:
            for number in range(3):
                assert (await three.post(session, number, "question"))[0] == 200
            assert three.meter.calls == 1
            admin = three.urls[0].removesuffix("/v1") + "/admin/cache"
            async with session.get(admin, headers=headers) as listed:
                (example,) = (await listed.json())["examples"]
            async with session.delete(f"{admin}/{example['id']}", headers=headers) as deleted:
                assert deleted.status == 200
            await asyncio.sleep(1.0)
            for number in (1, 2, 0):
                assert (await three.post(session, number, "question"))[0] == 200
            assert three.meter.calls == 2  # one of them led, and none replayed the old answer


@pytest.mark.slow
async def test_stuck_postgres_delays_requests_by_seconds(endpoint: Server, tmp_path: Path) -> None:
    """A server that accepts connections and never answers, such as on a stuck disk."""
    with running_postgres() as server:
        database = server.create_database()
        with closing(Accounts(database)) as accounts:
            _, limited = accounts.add("limited", usd_per_month=1.0)
        state = f"[state]\ndatabase_env = 'DATABASE'\n#{database}"
        with gateways(endpoint, tmp_path, state, count=1) as one:
            async with _session() as session:
                assert (await one.post(session, 0, "before"))[0] == 200
                server.suspend()
                try:
                    for seconds in (10, 10, 10, 1):
                        async with asyncio.timeout(seconds):
                            assert (await one.post(session, 0, f"{seconds}"))[0] == 200
                        if seconds == 10:
                            await asyncio.sleep(2)
                    ready = one.urls[0].removesuffix("/v1") + "/readyz"
                    async with asyncio.timeout(5), session.get(ready) as reply:
                        assert reply.status == 200
                    one.key = limited
                    async with asyncio.timeout(5):
                        assert (await one.post(session, 0, "with a budget"))[0] == 503
                finally:
                    server.resume()
                async with asyncio.timeout(20):
                    while (await one.post(session, 0, "again"))[0] != 200:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                ledger = one.servers[0].ledger
                await asyncio.to_thread(ledger.flush)
                rows = await asyncio.to_thread(
                    ledger.read,
                    "SELECT count(*), sum(cost_usd) FROM gateway_entries WHERE status = 200",
                )
                assert rows[0][1] == pytest.approx(one.meter.tokens * PRICE)
