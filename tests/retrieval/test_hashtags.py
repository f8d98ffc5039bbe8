from __future__ import annotations

import asyncio
from collections.abc import Sequence
from threading import Event

import numpy as np
import pytest

from bottega.errors import EmptyKnowledgeBaseError, SettingError
from bottega.protocols import Vectors
from bottega.retrieval import HashtagRetriever, HashtagTree, LeaveOneOutGroupCount
from bottega.types import Query
from tests.builders import solid_image
from tests.retrieval.doubles import Memory, Words, about, labelled_text


def hashtags(memory: Memory, tree: HashtagTree) -> HashtagRetriever:
    return HashtagRetriever(memory.changes, memory.vectors, memory.embed, memory.search, tree)


async def test_a_large_enough_group_is_searched_alone() -> None:
    memory = Memory(about("colour", 6) + about("shape", 6, start=20))
    retrieve = hashtags(memory, HashtagTree(2, cold_start=4))
    retrieve.build()
    found = await retrieve(Query("colour number 99"), 6)
    assert {candidate.example.answer for candidate in found} == {"colour"}
    assert [c.example.answer for c in await retrieve(Query("colour"), 8)].count("shape") == 2


async def test_a_group_of_only_the_query_is_filled_up() -> None:
    memory = Memory([labelled_text("zebra", "zebra", 900), *about("shape shape shape", 6)])
    retrieve = hashtags(memory, HashtagTree(2, cold_start=4))
    retrieve.build()
    assert ["entry-0900"] in retrieve.tree.groups
    assert len(await retrieve(Query("zebra", (solid_image(900),)), 3)) == 3


async def test_the_first_entry_ends_the_empty_cache_error() -> None:
    memory = Memory()
    retrieve = hashtags(memory, HashtagTree(2))
    with pytest.raises(EmptyKnowledgeBaseError):
        await retrieve(Query("colour"), 2)
    memory.add(about("colour", 1))
    assert len(await retrieve(Query("colour"), 2)) == 1


async def test_a_due_refit_runs_in_the_background() -> None:
    counting, go_on = Event(), Event()

    def slow(ids: Sequence[str], vectors: Vectors) -> int:
        counting.set()
        assert go_on.wait(30)
        return 2

    memory = Memory(about("colour", 20))
    retrieve = hashtags(memory, HashtagTree(slow, cold_start=10))
    assert len(await retrieve(Query("colour"), 30)) == 20
    assert await asyncio.to_thread(counting.wait, 30)
    memory.add(about("shape", 5, start=50))
    memory.delete(["entry-0000"])
    assert len(await retrieve(Query("shape"), 30)) == 24  # while the groups are being counted
    go_on.set()
    await retrieve.settled()
    assert len(retrieve.tree.refits) == 1
    assert len(retrieve.tree) == 24
    assert {c.example.id for c in await retrieve(Query("shape"), 30)} == set(memory.examples)
    await retrieve.settled()


async def test_a_refit_is_repeated_after_a_deletion() -> None:
    memory = Memory(about("colour", 20))
    vectors, calls = memory.vectors, 0

    def unlucky(ids: Sequence[str]) -> Vectors:
        nonlocal calls
        calls += 1
        if calls == 1:
            return vectors([*ids, "gone"])
        return vectors(ids)

    tree = HashtagTree(LeaveOneOutGroupCount(unlucky, vectors), cold_start=10)
    retrieve = hashtags(memory, tree)
    await retrieve(Query("colour"), 3)
    await retrieve.settled()
    assert not tree.refits
    await retrieve(Query("colour"), 3)
    await retrieve.settled()
    assert len(tree.refits) == 1


async def test_a_failed_refit_is_logged_once_and_repeated_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried: list[int] = []

    def broken(ids: Sequence[str], vectors: Vectors) -> int:
        tried.append(len(ids))
        if len(tried) < 3:
            raise RuntimeError("cannot count")
        return 2

    memory = Memory(about("colour", 20))
    retrieve = hashtags(memory, HashtagTree(broken, cold_start=10))
    for start in (100, 200, 300):
        for _ in range(4):
            assert len(await retrieve(Query("colour"), 5)) == 5
            await retrieve.settled()
        memory.add(about("shape", 64, start=start))
    assert tried == [20, 84, 148]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot count" in caplog.text
    assert len(retrieve.tree.refits) == 1


async def test_a_failed_read_is_repeated() -> None:
    memory, failing = Memory(about("colour", 4)), [True]

    def vectors(ids: Sequence[str]) -> Vectors:
        if failing:
            failing.clear()
            return np.empty((0, memory.embed.dimension), np.float32)
        return memory.vectors(ids)

    retrieve = HashtagRetriever(
        memory.changes, vectors, memory.embed, memory.search, HashtagTree(2)
    )
    with pytest.raises(ValueError):
        await retrieve(Query("colour"), 9)
    assert len(await retrieve(Query("colour"), 9)) == 4


@pytest.mark.parametrize("dimension", [16, 5])
async def test_a_reembedded_knowledge_base_is_an_error(
    dimension: int,
) -> None:
    memory, changed = Memory(about("colour", 6)), False

    def vectors(ids: Sequence[str]) -> Vectors:
        stored = memory.vectors(ids)
        return -stored[:, :dimension] if changed else stored

    retrieve = HashtagRetriever(
        memory.changes, vectors, memory.embed, memory.search, HashtagTree(2)
    )
    assert len(await retrieve(Query("colour"), 9)) == 6
    changed = True
    memory.add(about("shape", 2, start=50))
    for _ in range(2):
        with pytest.raises(SettingError, match="space") as raised:
            await retrieve(Query("colour"), 9)
        assert "new HashtagRetriever" in raised.value.hint
    assert len(retrieve.tree) == 6


async def test_a_query_of_another_dimension_is_a_setting_error() -> None:
    memory, embed = Memory(about("colour", 3)), Words()
    retrieve = HashtagRetriever(
        memory.changes, memory.vectors, embed, memory.search, HashtagTree(2)
    )
    await retrieve(Query("colour"), 3)
    embed.dimension = 5
    with pytest.raises(SettingError, match="space"):
        await retrieve(Query("colour"), 3)


def test_leave_one_out_finds_topics_that_images_do_not_separate() -> None:
    rng = np.random.default_rng(0)
    topic = np.repeat(np.arange(4), 100)[rng.permutation(400)]
    value = rng.integers(0, 5, 400)
    tags = np.eye(4, dtype=np.float32)[topic] + 0.1 * _noise(rng, 4)
    look = np.eye(5, dtype=np.float32)[value] + 0.1 * _noise(rng, 5)
    say = np.eye(20, dtype=np.float32)[5 * topic + value]
    ids = [str(i) for i in range(400)]
    count = LeaveOneOutGroupCount(_rows(look), _rows(say), k=8)
    assert count(ids, tags) == 4
    # Groups add nothing if the order already separates the topics.
    whole = np.concatenate([tags, look], axis=1)
    assert LeaveOneOutGroupCount(_rows(whole), _rows(say), k=8)(ids, _noise(rng, 4)) == 1


def test_leave_one_out_of_very_few_entries_is_one_group() -> None:
    one = np.ones((1, 3), np.float32)
    assert LeaveOneOutGroupCount(lambda ids: one, lambda ids: one)(["a"], one) == 1


def test_leave_one_out_of_few_random_entries_keeps_one_group() -> None:
    rng = np.random.default_rng(0)
    tags, look, say = _noise(rng, 4)[:100], _noise(rng, 5), _noise(rng, 8)
    ids = [str(i) for i in range(100)]
    assert LeaveOneOutGroupCount(_rows(look), _rows(say), k=4)(ids, tags) == 1


@pytest.mark.parametrize("k", [1, 2, 3, 12])
@pytest.mark.parametrize("n", [2, 10, 1500])
def test_scores_are_those_of_the_nearest_with_the_group_first(n: int, k: int) -> None:
    """A partition sorts short rows whole on some processors, but not long ones."""
    rng = np.random.default_rng(0)
    near, similarity = rng.uniform(-1, 1, (2, 20, n)).astype(np.float32)
    inside = rng.random((20, n)) < 0.5
    near[range(20), rng.integers(0, n, 20)] = -np.inf  # the query itself
    rows = _rows(near)
    found = LeaveOneOutGroupCount(rows, rows, k=k)._scores(near, similarity, inside)
    first = np.lexsort((-near, ~inside, np.isinf(near)))[:, : min(k, n - 1)]
    assert found == pytest.approx(np.take_along_axis(similarity, first, 1).mean(1), abs=1e-6)


def _noise(rng: np.random.Generator, dimension: int) -> Vectors:
    return rng.standard_normal((400, dimension)).astype(np.float32)


def _rows(vectors: Vectors):  # type: ignore[no-untyped-def]
    return lambda ids: vectors[[int(id) for id in ids]]
