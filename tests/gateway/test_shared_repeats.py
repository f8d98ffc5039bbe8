"""Exact repeats and flights over gateways: in PostgreSQL and in Redis.

Without shared state they are a `ReplyCache` and a `LeaderFlight`, which have no leases, epochs and
changes (test_repeats.py); test_shared_gateways.py compares the behaviour of whole gateways.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import cast

import pytest

from bottega._util.postgres import PostgresPool
from bottega._util.valkey import ValkeyPipe
from bottega.errors import StoreError
from bottega.gateway.accounting.ledger_schema import GATEWAY_TABLES
from bottega.gateway.state import repeats as module
from bottega.gateway.state.postgres_state import PostgresRepeats
from bottega.gateway.state.redis_state import RedisRepeats
from bottega.gateway.state.repeats import Flight, RepeatStore, SharedRepeats
from bottega.gateway.state.response_cache import CachedReply, ReplyCache
from tests.redis import RedisServer

REPLY = CachedReply(b'{"a": "\xc3\xa9"}', "large", "gpt-é")
OTHER = CachedReply(b"{}", "small", "qwen")


@pytest.fixture
def database(gateway_database: str) -> str:
    return gateway_database


@asynccontextmanager
async def opened_store(database: str, redis: str | None) -> AsyncIterator[RepeatStore]:
    if redis is None:
        pool = PostgresPool(database, GATEWAY_TABLES)
        try:
            yield PostgresRepeats(pool)
        finally:
            await pool.close()
    else:
        pipe = ValkeyPipe(redis)
        try:
            yield RedisRepeats(pipe)
        finally:
            await pipe.aclose()


@pytest.fixture(params=["postgres", "redis"])
def servers(request: pytest.FixtureRequest) -> tuple[str, str | None]:
    if request.param == "redis":
        return "", request.getfixturevalue("redis").url
    return request.getfixturevalue("database"), None


@pytest.fixture
async def store(servers: tuple[str, str | None]) -> AsyncGenerator[RepeatStore]:
    async with opened_store(*servers) as one:
        yield one


class Process:
    """Repeats of one gateway, with its replies in memory."""

    def __init__(self, store: RepeatStore) -> None:
        self.memory = ReplyCache(1 << 20, 60.0)
        self.repeats = SharedRepeats(store, self.memory, 60.0)

    async def lead(self, key: str) -> Flight:
        flight = await self.repeats.begin(key)
        assert isinstance(flight, Flight)
        return flight

    async def run(self) -> None:
        while True:
            with suppress(StoreError):
                await self.repeats.refresh()
            await asyncio.sleep(0.1)


@pytest.fixture
async def two(servers: tuple[str, str | None]) -> AsyncGenerator[tuple[Process, Process]]:
    async with AsyncExitStack() as opened:
        made = [Process(await opened.enter_async_context(opened_store(*servers))) for _ in "ab"]
        tasks = [asyncio.create_task(one.run()) for one in made]
        yield made[0], made[1]
        for one in made:
            await one.repeats.aclose()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_reply_is_stored_once_for_all(store: RepeatStore) -> None:
    first = await store.begin("k", "one")
    assert first.kind == "lead"
    assert (await store.begin("k", "two")).kind == "wait"
    assert await store.running(["k", "other"]) == {"k"}
    await store.land("k", "one", first.epoch, REPLY, 60.0)
    found = await store.begin("k", "three")
    assert (found.kind, found.reply) == ("reply", REPLY)
    assert 0 <= found.age < 5
    assert await store.running(["k"]) == set()


async def test_reply_expires(store: RepeatStore) -> None:
    first = await store.begin("k", "one")
    await store.land("k", "one", first.epoch, REPLY, 0.2)
    assert (await store.begin("k", "two")).kind == "reply"
    await asyncio.sleep(0.3)
    assert (await store.begin("k", "two")).kind == "lead"


async def test_flight_without_a_reply_frees_the_key(store: RepeatStore) -> None:
    first = await store.begin("k", "one")
    await store.land("k", "other", first.epoch, None, 60.0)  # not its flight
    assert (await store.begin("k", "two")).kind == "wait"
    await store.land("k", "one", first.epoch, None, 60.0)
    assert (await store.begin("k", "two")).kind == "lead"


async def test_forgotten_reply_is_gone(store: RepeatStore) -> None:
    first = await store.begin("k", "one")
    second = await store.begin("running", "two")
    await store.land("k", "one", first.epoch, REPLY, 60.0)
    await store.invalidate_all()
    assert (await store.begin("k", "three")).kind == "lead"
    # An answer that was requested before is not stored after.
    await store.land("running", "two", second.epoch, REPLY, 60.0)
    assert (await store.begin("running", "four")).kind == "lead"


async def test_changes_name_the_replaced_keys(store: RepeatStore) -> None:
    first = await store.begin("k", "one")
    await store.land("k", "one", first.epoch, REPLY, 60.0)
    start = await store.changes(None)
    assert start.keys is None
    assert not (await store.changes(start.position)).keys
    await store.replace("k", OTHER)
    await store.replace("unknown", OTHER)
    changed = await store.changes(start.position)
    assert changed.keys is not None and set(changed.keys) == {"k", "unknown"}
    assert (await store.begin("unknown", "one")).kind == "lead"
    assert (await store.begin("k", "two")).reply == OTHER
    await store.invalidate_all()
    assert (await store.changes(changed.position)).keys is None


async def test_many_changes_are_all_changes(
    store: RepeatStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("postgres_state", "redis_state"):
        monkeypatch.setattr(f"bottega.gateway.state.{name}.MAX_CHANGES", 2)
    start = await store.changes(None)
    for key in ("a", "b", "c"):
        first = await store.begin(key, key)
        await store.land(key, key, first.epoch, REPLY, 60.0)
        await store.replace(key, OTHER)
    assert (await store.changes(start.position)).keys is None


async def test_flight_lasts_while_it_is_renewed(
    store: RepeatStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.gateway.state.postgres_state.FLIGHT_SECONDS", 0.3)
    monkeypatch.setattr("bottega.gateway.state.redis_state.LEASE", 300)
    await store.begin("k", "one")
    for _ in range(3):
        await asyncio.sleep(0.15)
        await store.renew({"k": "one"})
    assert (await store.begin("k", "two")).kind == "wait"
    await asyncio.sleep(0.4)  # its gateway was killed
    assert (await store.begin("k", "two")).kind == "lead"
    await store.renew({"k": "one"})
    await store.land("k", "one", 0, None, 60.0)
    assert (await store.begin("k", "three")).kind == "wait"


async def test_concurrent_requests_have_one_leader(two: tuple[Process, Process]) -> None:
    async def request(process: Process) -> str:
        found = await process.repeats.begin("k")
        if isinstance(found, tuple):
            assert found[0] == REPLY
            return "reply"
        assert found is not None
        await asyncio.sleep(0.2)
        found.reply = REPLY
        await found.end()
        return "lead"

    kinds = await asyncio.gather(*(request(two[i % 2]) for i in range(10)))
    assert sorted(kinds) == ["lead"] + ["reply"] * 9


async def test_followers_go_on_after_a_failure(two: tuple[Process, Process]) -> None:
    flight = await two[0].lead("k")
    waiting = asyncio.create_task(two[1].repeats.begin("k"))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await flight.end()
    assert isinstance(await asyncio.wait_for(waiting, 20), Flight)


async def test_cancelled_leader_frees_the_key(two: tuple[Process, Process]) -> None:
    flight = await two[0].lead("k")
    waiting = asyncio.create_task(two[1].repeats.begin("k"))
    await asyncio.sleep(0.1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await flight.end()
    assert isinstance(await asyncio.wait_for(two[1].repeats.begin("k"), 20), Flight)


async def test_memory_follows_the_changes_of_others(two: tuple[Process, Process]) -> None:
    one, other = two
    await (await one.lead("start")).end()
    for process in two:
        process.memory.put("k", REPLY)
        process.memory.put("l", REPLY)
    await one.repeats.invalidate_all()
    await _until(lambda: other.memory.get("k") is None)
    await asyncio.sleep(0.3)  # both have read the change
    for process in two:
        process.memory.put("k", REPLY)
        process.memory.put("l", REPLY)
    flight = await one.lead("k")
    flight.reply = REPLY
    await flight.end()
    one.memory.replace("k", OTHER)
    await _until(lambda: other.memory.get("k") is None)
    assert other.memory.get("l") == REPLY


async def _until(condition: object, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def test_lost_connection_stops_replays(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that cannot learn of deletions must not replay from memory."""
    async with opened_store("", redis.url) as store:
        process = Process(store)
        await process.repeats.refresh()
        process.memory.put("k", REPLY)
        assert process.memory.get("k") == REPLY
        redis.stop()
        try:
            with pytest.raises(StoreError):
                await process.repeats.refresh()
            await asyncio.sleep(module.CURRENT_SECONDS)
            assert process.memory.get("k") is None
            assert await process.repeats.begin("k") is None
        finally:
            redis.start()
        await process.repeats.refresh()  # another epoch
        assert process.memory.get("k") is None
        assert isinstance(await process.repeats.begin("k"), Flight)
        await process.repeats.aclose()


@pytest.mark.parametrize("evicted", ["bottega:feed", "bottega:reply:*"])
@pytest.mark.parametrize("is_last", [True, False])
async def test_correction_survives_an_eviction(
    redis: RedisServer, evicted: str, is_last: bool
) -> None:
    """A correction is not lost if a key is evicted before it or after it, also if another change
    creates the key again."""
    async with opened_store("", redis.url) as store:
        process = Process(store)
        for before in (True, False):
            flight = await store.begin("k", "one")
            await store.land("k", "one", flight.epoch, REPLY, 60.0)
            await process.repeats.refresh()
            process.memory.put("k", REPLY)
            if before:
                evict(redis, evicted)
            await store.replace("k", OTHER)
            if not before:
                evict(redis, evicted)
            if not is_last:
                await store.replace("l", OTHER)
            await process.repeats.refresh()
            assert process.memory.get("k") is None
            assert (await store.begin("k", "two")).reply in (None, OTHER)
            await store.invalidate_all()
            await store.land("k", "two", 0, None, 60.0)


def evict(redis: RedisServer, pattern: str) -> None:
    names = names_in(redis, pattern)
    assert names
    redis.run("DEL", *(name.decode() for name in names))


def names_in(redis: RedisServer, pattern: str) -> list[bytes]:
    return cast(list[bytes], redis.run("KEYS", pattern))


async def test_evicted_flight_costs_a_call_and_no_wrong_reply(redis: RedisServer) -> None:
    async with opened_store("", redis.url) as store:
        first = await store.begin("k", "one")
        evict(redis, "bottega:flight:*")
        await store.renew({"k": "one"})
        assert (await store.begin("k", "two")).kind == "wait"
        evict(redis, "bottega:flight:*")
        second = await store.begin("k", "two")
        assert second.kind == "lead"
        await store.renew({"k": "one"})
        await store.land("k", "one", first.epoch, REPLY, 60.0)
        assert (await store.begin("k", "three")).reply == REPLY
        assert await store.running(["k"]) == {"k"}  # that of "two"
        await store.land("k", "two", second.epoch, OTHER, 60.0)
        assert (await store.begin("k", "three")).reply == OTHER
        assert await store.running(["k"]) == set()


STEPS = {"request": 12, "correct": 8, "read": 8, "evict": 3, "delete": 1}


@pytest.mark.parametrize("seed", range(3))
async def test_no_order_of_evictions_causes_a_wrong_replay(redis: RedisServer, seed: int) -> None:
    """A reply from before a correction or a deletion is wrong after it."""
    rng, wrong = random.Random(seed), set[CachedReply]()
    stored: dict[str, list[CachedReply]] = {"a": [], "b": []}
    async with opened_store("", redis.url) as store:
        two = [Process(store), Process(store)]
        for step in range(400):
            key, process = rng.choice("ab"), rng.choice(two)
            reply = CachedReply(b"%d" % step, key, "m")
            (kind,) = rng.choices(list(STEPS), list(STEPS.values()))
            match kind:
                case "request":
                    begun = await store.begin(key, "f")
                    if begun.reply is None:
                        await store.land(key, "f", begun.epoch, reply, 60.0)
                    assert begun.reply not in wrong
                    process.memory.put(key, begun.reply or reply)
                    stored[key].append(begun.reply or reply)
                case "correct":
                    await store.replace(key, reply)
                    wrong.update(stored[key])
                    stored[key].append(reply)
                case "delete":
                    await store.invalidate_all()
                    wrong.update(stored["a"], stored["b"])
                case "evict":
                    kinds = {name.split(b":")[1].decode() for name in names_in(redis, "*")}
                    if kinds:
                        evict(redis, f"bottega:{rng.choice(sorted(kinds))}*")
                case "read":
                    await process.repeats.refresh()
                    assert not wrong & {process.memory.get("a"), process.memory.get("b")}
