"""Response cache: stored replies, their expiry, and waiting requests."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega._util.caching import LeaderFlight
from bottega.gateway.state.response_cache import (
    OVERHEAD,
    BodyCache,
    CachedReply,
    RepeatedRequest,
    ReplyCache,
    is_repeatable,
)
from bottega.types import Completion

SCOPE = ("shop", "bottega")
CAT = "data:image/png;base64,AAAA"


@pytest.mark.parametrize(
    ("finish", "text", "kept"),
    [
        ("stop", "a cat", True),
        ("stop", " \n", False),
        ("length", "a ca", False),
        ("content_filter", "a cat", False),
        ("tool_calls", "a cat", False),
        ("refusal", "I cannot", False),
        ("", "a cat", False),
    ],
)
def test_only_complete_answers_are_repeatable(finish: str, text: str, kept: bool) -> None:
    assert is_repeatable((Completion(text, finish),)) is kept
    assert not is_repeatable(())
    assert not is_repeatable((Completion(text, finish),) * 2)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_replies_expire() -> None:
    clock = Clock()
    repeats = ReplyCache(10_000, 60, clock=clock)
    reply = CachedReply(b"{}", "master")
    repeats.put("a", reply)
    clock.now += 59.9
    assert repeats.get("a") is reply
    clock.now += 0.1  # a read does not extend the lifetime
    assert repeats.get("a") is None and len(repeats) == 0 and repeats.size == 0
    forever = ReplyCache(10_000, None, clock=clock)
    forever.put("a", reply)
    clock.now += 1e9
    assert forever.get("a") is reply
    forever.clear()
    assert forever.get("a") is None and forever.size == 0


def test_largest_reply_fills_the_cache() -> None:
    reply = CachedReply(b"x" * 1000, "master", "gpt")
    for room, kept in ((reply.size, 1), (reply.size - 1, 0)):
        repeats = ReplyCache(room, None)
        repeats.put("a", reply)
        assert (len(repeats), repeats.size) == (kept, kept * reply.size)


def test_replies_without_text_take_space() -> None:
    repeats = ReplyCache(60_000, None)
    for number in range(1000):
        repeats.put(str(number), CachedReply(b""))
    assert 50 <= len(repeats) <= 100
    assert repeats.size <= 60_000


def test_least_recently_used_reply_is_dropped() -> None:
    big = CachedReply(b"x" * 1000)
    repeats = ReplyCache(3 * big.size, None)
    for name in "abc":
        repeats.put(name, big)
    repeats.get("a")
    repeats.put("d", big)
    assert [name for name in "abcd" if repeats.get(name)] == ["a", "c", "d"]
    repeats.put("e", CachedReply(b"x" * 100_000))
    assert len(repeats) == 3 and repeats.get("e") is None
    repeats.put("d", CachedReply(b"newer"))
    assert repeats.get("d") == CachedReply(b"newer")


Put = tuple[Literal["put", "get"], int, int]


@given(st.lists(st.tuples(st.sampled_from(["put", "get"]), st.integers(0, 9), st.integers(0, 900))))
def test_held_bytes_match_the_contents(steps: list[Put]) -> None:
    repeats, bodies = ReplyCache(4000, None), BodyCache(4000)
    for step, number, size in steps:
        raw = bytes([number]) * (size + 1)
        if step == "put":
            repeats.put(str(number), CachedReply(bytes(size)))
            bodies.put(raw, SCOPE, RepeatedRequest(str(number)), [])
        else:
            repeats.get(str(number))
            bodies.get(raw, SCOPE)
        assert repeats.size <= 4000 and bodies.size <= 4000
        assert (repeats.size == 0) == (len(repeats) == 0)
        assert (bodies.size == 0) == (len(bodies) == 0)


def test_identical_body_is_found_without_parsing() -> None:
    bodies, repeat = (
        BodyCache(1 << 20),
        RepeatedRequest("k", stream=True, include_usage=True),
    )
    raw = bytes(range(256)) * 400
    bodies.put(raw, SCOPE, repeat, [CAT])
    assert bodies.get(bytes(bytearray(raw)), SCOPE) is repeat
    assert bodies.get(raw, ("shop", "other")) is None
    assert bodies.get(raw[:-1], SCOPE) is None


def test_body_that_differs_in_one_byte_is_not_found() -> None:
    bodies = BodyCache(1 << 24)
    raw = bytes(50_000)
    bodies.put(raw, SCOPE, RepeatedRequest("k"), [])
    for place in range(0, len(raw), 61):
        other = bytearray(raw)
        other[place] = 1
        assert bodies.get(bytes(other), SCOPE) is None
    assert bodies.get(raw, SCOPE) == RepeatedRequest("k")


def test_body_with_an_image_to_fetch_is_not_cached() -> None:
    bodies = BodyCache(1 << 20)
    bodies.put(b"{}", SCOPE, RepeatedRequest("k"), [CAT, "https://a.example/cat.png"])
    assert bodies.get(b"{}", SCOPE) is None


REPLY = CachedReply(b"{}")


async def test_identical_requests_wait_for_the_first() -> None:
    flights: LeaderFlight[str, CachedReply] = LeaderFlight()
    calls = 0

    async def ask() -> CachedReply:
        nonlocal calls
        if reply := await flights.wait("k"):
            return reply
        with flights.lead("k") as store_reply:
            calls += 1
            await asyncio.sleep(0.01)
            store_reply(REPLY)
        return REPLY

    assert await asyncio.gather(*(ask() for _ in range(20))) == [REPLY] * 20
    assert calls == 1 and len(flights) == 0
    assert await flights.wait("k") is None


@pytest.mark.parametrize("how", ["fails", "is cancelled", "has nothing to repeat"])
async def test_waiting_requests_continue_after_a_failure(how: str) -> None:
    flights: LeaderFlight[str, CachedReply] = LeaderFlight()
    is_leader = asyncio.Event()

    async def first() -> None:
        with flights.lead("k"):
            is_leader.set()
            await asyncio.sleep(60 if how == "is cancelled" else 0.01)
            if how == "fails":
                raise OSError("no model")

    leader = asyncio.create_task(first())
    await is_leader.wait()
    others = [asyncio.create_task(flights.wait("k")) for _ in range(5)]
    await asyncio.sleep(0)
    if how == "is cancelled":
        leader.cancel()
    assert await asyncio.wait_for(asyncio.gather(*others), 5) == [None] * 5
    await asyncio.gather(leader, return_exceptions=True)
    assert len(flights) == 0


async def test_cancelled_waiter_affects_no_other() -> None:
    flights: LeaderFlight[str, CachedReply] = LeaderFlight()
    with flights.lead("k") as store_reply:
        waiting = [asyncio.create_task(flights.wait("k")) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        store_reply(REPLY)
        assert await asyncio.gather(*waiting[1:]) == [REPLY] * 2
    assert waiting[0].cancelled()


async def test_second_leader_does_not_affect_the_first() -> None:
    flights: LeaderFlight[str, CachedReply] = LeaderFlight()
    with flights.lead("k") as store_reply:
        waiting = asyncio.create_task(flights.wait("k"))
        await asyncio.sleep(0)
        with flights.lead("k") as beside:
            beside(CachedReply(b"beside"))
        assert not waiting.done()
        store_reply(REPLY)
    assert await waiting is REPLY


def test_body_larger_than_the_cache_is_not_kept() -> None:
    for more, kept in ((0, 1), (1, 0)):
        bodies = BodyCache(1000 + OVERHEAD)
        bodies.put(b"x" * (1000 + more), SCOPE, RepeatedRequest("k"), [])
        assert (len(bodies), bodies.size) == (kept, kept * (1000 + OVERHEAD))


def test_repeated_body_is_held_once() -> None:
    bodies = BodyCache(1 << 20)
    for key in ("old", "new"):
        bodies.put(b"{}", SCOPE, RepeatedRequest(key), [])
    assert (len(bodies), bodies.size) == (1, 2 + OVERHEAD)
    assert bodies.get(b"{}", SCOPE) == RepeatedRequest("new")


def test_least_recently_used_body_is_dropped() -> None:
    bodies = BodyCache(3 * (1 + OVERHEAD))
    for raw in (b"a", b"b", b"c"):
        bodies.put(raw, SCOPE, RepeatedRequest("k"), [])
    bodies.get(b"a", SCOPE)
    bodies.put(b"d", SCOPE, RepeatedRequest("k"), [])
    assert [raw for raw in (b"a", b"b", b"c", b"d") if bodies.get(raw, SCOPE)] == [b"a", b"c", b"d"]


def test_only_an_existing_reply_is_replaced() -> None:
    repeats = ReplyCache(10_000, None)
    repeats.replace("a", CachedReply(b"{}"))
    assert len(repeats) == 0
    repeats.put("a", CachedReply(b"{}", "small"))
    repeats.replace("a", CachedReply(b"{}", "large"))
    assert repeats.get("a") == CachedReply(b"{}", "large")


def test_reply_age_counts_towards_expiry() -> None:
    clock = Clock()
    repeats = ReplyCache(10_000, 60, clock=clock)
    repeats.put("a", CachedReply(b"{}"), age=50.0)
    clock.now += 9.0
    assert repeats.get("a") is not None
    clock.now += 1.0
    assert repeats.get("a") is None


def test_reply_to_a_request_from_before_an_invalidation_is_dropped() -> None:
    repeats = ReplyCache(10_000, 60)
    begun = repeats.generation
    repeats.clear()
    repeats.put("key", CachedReply(b"old", "small", "m"), generation=begun)
    assert repeats.get("key") is None
    repeats.put("key", CachedReply(b"new", "small", "m"), generation=repeats.generation)
    assert repeats.get("key") is not None
