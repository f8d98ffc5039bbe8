from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace

import pytest

from bottega.errors import EmptyKnowledgeBaseError, SettingError, StoreError
from bottega.retrieval import SharedRetriever
from bottega.retrieval.retrievers import EmptyTolerantRetriever, SameContextFilter
from bottega.types import Answer, Candidate, Prompt, Query, Reply, Trace
from tests.builders import candidates

DEPTHS: list[int] = []


def tagged(*contexts: str | None) -> list[Candidate]:
    found = candidates(*map(str, range(len(contexts))))
    tags = [{} if context is None else {"context": context} for context in contexts]
    return [
        replace(one, example=replace(one.example, tags=tag))
        for one, tag in zip(found, tags, strict=True)
    ]


async def answers(contexts: Sequence[str | None], context: str, k: int, furthest: int = 256) -> str:
    DEPTHS.clear()

    async def retrieve(query: Query, k: int, /) -> list[Candidate]:
        DEPTHS.append(k)
        return tagged(*contexts)[:k]

    found = await SameContextFilter(retrieve, furthest=furthest)(Query("?", context=context), k)
    return "".join(one.example.answer for one in found)


async def test_only_matching_contexts_and_untagged_examples_remain() -> None:
    assert await answers(["a", "b", None, "", "a"], "a", 5) == "024"
    assert await answers(["a", "b", None, "", "a"], "", 5) == "23"


async def test_the_search_widens_until_k_match() -> None:
    assert await answers(["b"] * 6 + ["a"] * 3, "a", 2) == "67"
    assert DEPTHS == [2, 8]
    assert await answers(["b"] * 30 + ["a"] * 3, "a", 2) == "3031"
    assert DEPTHS == [2, 8, 32]


async def test_the_search_depth_is_limited() -> None:
    assert await answers(["b"] * 300 + ["a"], "a", 1, furthest=16) == ""
    assert DEPTHS == [1, 4, 16]


async def test_one_search_is_enough_if_all_match() -> None:
    assert await answers([None] * 10, "", 3) == "012"
    assert DEPTHS == [3]


async def test_an_empty_cache_has_no_candidates_and_other_errors_are_raised() -> None:
    results: list[Exception | list[Candidate]] = [
        EmptyKnowledgeBaseError("it holds no examples"),
        candidates("a", "b"),
        StoreError("it is damaged"),
    ]

    async def retrieve(query: Query, k: int, /) -> list[Candidate]:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result[:k]

    search = EmptyTolerantRetriever(retrieve)
    assert await search(Query("q"), 1) == []
    assert await search(Query("q"), 1) == candidates("a")
    with pytest.raises(StoreError, match="damaged"):
        await search(Query("q"), 1)


class Slow:
    """Retriever of letters that waits for `gate` and records its calls."""

    def __init__(self) -> None:
        self.labelled_text: list[int] = []
        self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        self.labelled_text.append(k)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            await asyncio.sleep(0.01)  # it takes time to stop
            raise
        if self.error is not None:
            raise self.error
        return candidates(*"abcdef")[:k]


def letters(found: list[Candidate]) -> str:
    return "".join(one.example.answer for one in found)


async def test_concurrent_and_later_calls_share_one_search() -> None:
    slow, query = Slow(), Query("q")
    shared = SharedRetriever(slow, min_k=3)
    found = await asyncio.gather(shared(query, 1), shared(query, 3), shared(query, 2))
    assert [letters(one) for one in found] == ["a", "abc", "ab"]
    assert letters(await shared(query, 3)) == "abc"
    assert slow.labelled_text == [3]
    assert letters(await shared(query, 5)) == "abcde"  # more than the first call found
    assert letters(await shared(query, 4)) == "abcd"
    assert slow.labelled_text == [3, 5]


async def test_an_equal_query_in_another_object_searches_again() -> None:
    slow, first, second = Slow(), Query("q"), Query("q")
    shared = SharedRetriever(slow)
    await shared(first, 2)
    await shared(second, 2)
    assert slow.labelled_text == [2, 2]


async def test_the_result_is_freed_with_the_query() -> None:
    slow, query = Slow(), Query("q")
    shared = SharedRetriever(slow)
    await shared(query, 2)
    assert len(shared._searches) == 1
    del query
    gc.collect()
    assert shared._searches == {}


async def test_the_query_is_freed_although_the_context_of_the_search_refers_to_it() -> None:
    current: ContextVar[Query] = ContextVar("current")
    shared = SharedRetriever(Slow())

    async def ask() -> weakref.ref[Query]:
        query = Query("q")
        current.set(query)
        await shared(query, 2)
        return weakref.ref(query)

    freed = await asyncio.create_task(ask())
    await asyncio.sleep(0)  # until the event loop drops the task
    gc.collect()
    assert freed() is None
    assert shared._searches == {}


async def test_a_failed_search_is_freed_before_the_query() -> None:
    slow, query = Slow(), Query("q")
    slow.error = SettingError("no image")
    shared = SharedRetriever(slow)
    await asyncio.gather(shared(query, 2), return_exceptions=True)
    assert shared._searches == {}


async def test_an_answered_query_object_searches_again() -> None:
    slow, query = Slow(), Query("q")
    shared = SharedRetriever(slow)
    await shared(query, 2)
    trace = Trace("i", 0, query, "t", (), Prompt(()), Reply("m", ()), Answer("a"), 0)
    await shared.observe(trace)
    await shared(query, 2)
    assert slow.labelled_text == [2, 2]


async def test_callers_get_separate_lists() -> None:
    slow, query = Slow(), Query("q")
    shared = SharedRetriever(slow)
    (await shared(query, 2)).clear()
    assert letters(await shared(query, 2)) == "ab"


async def test_a_failed_search_fails_all_callers_and_is_repeated() -> None:
    slow, query = Slow(), Query("q")
    shared = SharedRetriever(slow)
    slow.error = ValueError("x")
    both = await asyncio.gather(shared(query, 1), shared(query, 1), return_exceptions=True)
    assert [type(one) for one in both] == [ValueError, ValueError]
    slow.error = None
    assert letters(await shared(query, 1)) == "a"
    assert slow.labelled_text == [1, 1]


async def test_a_cancelled_caller_does_not_cancel_the_search() -> None:
    slow, query = Slow(), Query("q")
    shared = SharedRetriever(slow)
    slow.gate.clear()
    first, second = (asyncio.create_task(shared(query, 2)) for _ in "ab")
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    slow.gate.set()
    assert letters(await second) == "ab"
    assert (slow.labelled_text, slow.cancelled) == ([2], 0)


async def test_a_search_without_callers_is_cancelled() -> None:
    slow, query = Slow(), Query("q")
    shared = SharedRetriever(slow)
    slow.gate.clear()
    alone = asyncio.create_task(shared(query, 2))
    await asyncio.sleep(0.01)
    alone.cancel()
    await asyncio.gather(alone, return_exceptions=True)
    slow.gate.set()
    assert letters(await shared(query, 2)) == "ab"
    assert (slow.labelled_text, slow.cancelled) == ([2, 2], 1)


async def test_a_cancelled_caller_keeps_the_larger_search() -> None:
    slow, query = Slow(), Query("q")
    shared = SharedRetriever(slow)
    slow.gate.clear()
    small = asyncio.create_task(shared(query, 2))
    await asyncio.sleep(0)
    large = asyncio.create_task(shared(query, 5))
    await asyncio.sleep(0)
    small.cancel()
    await asyncio.gather(small, return_exceptions=True)
    third = asyncio.create_task(shared(query, 4))
    await asyncio.sleep(0)
    slow.gate.set()
    assert [letters(found) for found in await asyncio.gather(large, third)] == ["abcde", "abcd"]
    assert slow.labelled_text == [2, 5]


def test_another_event_loop_can_read_the_result() -> None:
    slow, query = Slow(), Query("q")
    shared = SharedRetriever(slow)
    assert letters(asyncio.run(shared(query, 2))) == letters(asyncio.run(shared(query, 2))) == "ab"
    assert slow.labelled_text == [2]


async def test_the_first_search_has_exactly_the_requested_size() -> None:
    slow = Slow()
    await SharedRetriever(slow, min_k=1)(Query("q"), 1)
    await SharedRetriever(slow)(Query("q"), 2)
    assert slow.labelled_text == [1, 2]


def test_a_search_for_no_candidates_is_rejected() -> None:
    with pytest.raises(SettingError):
        SharedRetriever(Slow(), min_k=0)


async def test_best_returns_the_highest_score_without_a_search() -> None:
    slow, query = Slow(), Query("q")
    shared = SharedRetriever(slow)
    assert shared.best(query) is None
    found = await shared(query, 2)
    assert shared.best(query) == max(one.score for one in found)
    assert slow.labelled_text == [2]
    slow.error = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        await shared(query, 5)
    assert shared.best(query) is None


def test_min_k_below_1_is_rejected() -> None:
    async def retrieve(query: Query, k: int, /) -> list[Candidate]:
        return []

    assert SharedRetriever(retrieve, min_k=1)
    with pytest.raises(SettingError, match="min_k must be at least 1"):
        SharedRetriever(retrieve, min_k=0)
