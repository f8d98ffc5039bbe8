from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from bottega._util.caching import LRUCache


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
