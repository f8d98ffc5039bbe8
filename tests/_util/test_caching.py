from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega._util.caching import (
    CLIENT,
    RESERVED_SECONDS,
    FairSemaphore,
    LRUCache,
    SharedTask,
    SingleFlight,
)


async def test_concurrent_callers_of_a_key_share_its_work() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    calls: list[str] = []

    async def work(key: str) -> int:
        calls.append(key)
        await asyncio.sleep(0)
        return len(calls)

    found = await asyncio.gather(*(flights.run(key, partial(work, key)) for key in "aab"))
    assert (calls, found) == (["a", "b"], [2, 2, 2])
    assert await flights.run("a", lambda: work("a")) == 3


async def test_all_callers_get_the_error_and_the_next_one_starts_again() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    errors: list[Exception] = [OSError("full"), ValueError("bad")]

    async def work() -> int:
        await asyncio.sleep(0)
        raise errors.pop(0)

    both = await asyncio.gather(*(flights.run("a", work) for _ in range(2)), return_exceptions=True)
    assert [type(one) for one in both] == [OSError, OSError]
    with pytest.raises(ValueError, match="bad"):
        await flights.run("a", work)


@given(st.lists(st.booleans(), min_size=1, max_size=6))
async def test_the_work_is_cancelled_only_when_all_callers_leave(leave: list[bool]) -> None:
    flights: SingleFlight[str, str] = SingleFlight()
    go, ended = asyncio.Event(), []

    async def work() -> str:
        try:
            await go.wait()
            return "done"
        finally:
            ended.append(go.is_set())

    callers = [asyncio.create_task(flights.run("a", work)) for _ in leave]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for caller, leaves in zip(callers, leave, strict=True):
        if leaves:
            caller.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert ended == ([False] if all(leave) else [])
    go.set()
    found = await asyncio.gather(*callers, return_exceptions=True)
    assert [one == "done" for one in found] == [not leaves for leaves in leave]


async def test_a_new_caller_does_not_join_an_abandoned_task() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    started: list[asyncio.Event] = []

    async def work() -> int:
        number = len(started)
        started.append(asyncio.Event())
        try:
            await started[number].wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # cleaning up
            raise
        return number

    first = asyncio.create_task(flights.run("a", work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    second = asyncio.create_task(flights.run("a", work))
    await asyncio.sleep(0.05)
    third = asyncio.create_task(flights.run("a", work))
    await asyncio.sleep(0)
    started[1].set()
    assert (await second, await third) == (1, 1)


def test_a_finished_task_outlives_its_event_loop() -> None:
    async def start() -> SharedTask[int]:
        shared = SharedTask(asyncio.sleep(0, 7))
        await shared.wait()
        return shared

    shared = asyncio.run(start())
    assert asyncio.run(shared.wait()) == 7


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12)), max_size=40))
def test_the_cache_stays_within_its_size_and_has_the_latest_value(
    puts: list[tuple[str, int]],
) -> None:
    cache: LRUCache[str, str] = LRUCache(10, size=len)
    for key, size in puts:
        cache.put(key, "x" * size)
        assert cache.get(key) == (None if size > 10 else "x" * size)
        assert sum(map(len, cache.values())) == cache.size <= 10


@given(st.lists(st.tuples(st.sampled_from(["get", "put"]), st.integers(0, 5)), max_size=60))
def test_the_least_recently_used_values_are_dropped(steps: list[tuple[str, int]]) -> None:
    cache: LRUCache[int, int] = LRUCache(3)
    model: list[int] = []  # the least recently used first
    for step, key in steps:
        if step == "put":
            cache.put(key, key)
        else:
            assert cache.get(key) == (key if key in model else None)
        if step == "put" or key in model:
            model = [*(one for one in model if one != key), key][-3:]
        assert cache.values() == model
        assert len(cache) == cache.size == len(model)


def test_values_expire_at_their_age_even_when_used() -> None:
    clock = Clock()
    cache: LRUCache[str, str] = LRUCache(10, seconds=60.0, clock=clock)
    cache.put("a", "new")
    cache.put("b", "old", age=59.0)
    clock.now += 0.9
    assert (cache.get("a"), cache.get("b")) == ("new", "old")
    clock.now += 0.1
    assert (cache.get("a"), cache.get("b")) == ("new", None)
    assert len(cache) == cache.size == 1


def test_removed_values_release_their_size() -> None:
    cache: LRUCache[str, str] = LRUCache(10, size=len)
    cache.put("a", "xxxx")
    cache.put("b", "xxx")
    assert (cache.pop("a"), cache.pop("a"), cache.size) == ("xxxx", None, 3)
    cache.clear()
    assert (cache.get("b"), len(cache), cache.size) == (None, 0, 0)


def test_threads_share_a_cache() -> None:
    cache: LRUCache[str, str] = LRUCache(50, size=len)

    def use(seed: int) -> None:
        for i in range(2000):
            key = str((seed * 7 + i) % 90)
            if cache.get(key) is None:
                cache.put(key, "x")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    assert len(cache) == cache.size == 50


class Turns:
    """Clients that wait for a semaphore. `admitted` has their names, such as "a2", in order."""

    def __init__(self, semaphore: FairSemaphore) -> None:
        self.semaphore = semaphore
        self.admitted: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, *names: str) -> None:
        """Begin the work of clients, which the first letters of the names are."""
        for name in names:
            self._ends[name] = asyncio.Event()
            token = CLIENT.set(name[0])
            self._tasks[name] = asyncio.create_task(self._work(name))
            CLIENT.reset(token)
            await self._settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
            await self._settle()
            await self._tasks.pop(name)

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        await self._settle()

    async def end_all(self) -> list[str]:
        """End the work in the order of its admission, and return this order."""
        for number in count():
            if number == len(self.admitted):
                return self.admitted
            if self.admitted[number] in self._tasks:
                await self.end(self.admitted[number])
        raise AssertionError("unreachable")

    async def _work(self, name: str) -> None:
        async with self.semaphore.hold():
            self.admitted.append(name)
            await self._ends[name].wait()

    async def _settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("slots", "begun", "order"),
    [
        (1, "a1 a2 a3 b1 b2", "a1 a2 b1 a3 b2"),
        (1, "a1 b1 b2 c1 a2 c2", "a1 b1 c1 a2 b2 c2"),
        (2, "a1 a2 a3 a4 b1 b2", "a1 a2 b1 a3 b2 a4"),
        (3, "a1 a2 a3 a4 a5 b1 b2 b3", "a1 a2 a3 b1 a4 b2 a5 b3"),
    ],
)
async def test_waiting_clients_take_turns(slots: int, begun: str, order: str) -> None:
    turns = Turns(FairSemaphore(slots, slots))
    await turns.begin(*begun.split())
    assert turns.admitted == begun.split()[:slots]
    assert await turns.end_all() == order.split()


async def test_the_client_that_holds_the_least_is_next() -> None:
    """Long work would otherwise fill all slots: each turn of its client takes one for long."""
    turns = Turns(FairSemaphore(4, 4))
    await turns.begin("a1", "a2", "a3", "b1", "a4", "b2", "b3")
    await turns.end("b1")
    await turns.end("a1")
    assert turns.admitted[4:] == ["b2", "b3"]
    await turns.end("a2")
    assert turns.admitted[6:] == ["a4"]
    assert len(await turns.end_all()) == 7


@pytest.mark.parametrize(
    ("slots", "seen", "held"),
    [(1, "b", 1), (2, "b", 1), (3, "bc", 2), (4, "", 4), (4, "bc", 3), (16, "b", 15),
     (16, "bcdefg", 12)],
)  # fmt: skip
async def test_a_client_leaves_slots_for_others_that_were_seen(
    slots: int, seen: str, held: int
) -> None:
    now = 0.0
    turns = Turns(FairSemaphore.of_slots(slots))
    turns.semaphore.clock = lambda: now
    for other in seen:
        await turns.begin(f"{other}0")
        await turns.end(f"{other}0")
    names = [f"a{number}" for number in range(slots + 1)]
    await turns.begin(*names)
    assert turns.admitted[len(seen) :] == names[:held]
    for other in seen[: slots - held]:
        await turns.begin(f"{other}1")
        assert turns.admitted[-1] == f"{other}1"
    for other in seen[: slots - held]:
        await turns.end(f"{other}1")
    now = RESERVED_SECONDS + 1
    await turns.end("a0")
    assert turns.admitted[-1] == names[-1]
    await turns.end_all()
    assert (turns.semaphore.free, turns.semaphore.running) == (slots, 0)


async def test_a_client_that_leaves_blocks_no_other() -> None:
    turns = Turns(FairSemaphore(2, 2))
    await turns.begin("a1", "a2", "b1", "c1")
    await turns.leave("b1")
    await turns.end("a1")
    assert turns.admitted == ["a1", "a2", "c1"]
    await turns.leave("c1")
    await turns.begin("d1")
    assert turns.admitted[-1] == "d1"
    await turns.end("a2", "d1")
    assert (turns.semaphore.free, turns.semaphore.running) == (2, 0)
