from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.errors import EmptyKnowledgeBaseError, LogPrunedError, NotFoundError, SettingError
from bottega.retrieval import BM25Retriever
from bottega.types import Example, ExampleChange, Query
from tests.retrieval.doubles import Memory, labelled_text

WORDS = ("red", "green", "blue", "round", "square", "3", "+", "5")


async def test_rare_words_count_more_than_common_ones() -> None:
    memory = Memory([labelled_text(f"the red thing {i}", "x", i) for i in range(4)])
    memory.add([labelled_text(f"the thing {i}", "x", i) for i in range(10, 20)])
    memory.add([labelled_text("the zebra", "x", 50), labelled_text("the red zebra", "x", 51)])
    found = await BM25Retriever(memory)(Query("The RED zebra?"), 3)
    assert [c.example.id for c in found][:2] == ["entry-0051", "entry-0050"]
    assert found[0].score > found[1].score > found[2].score > 0


async def test_digits_and_single_letters_are_words() -> None:
    memory = Memory(
        [
            labelled_text("4 + 4", "8", 1),
            labelled_text("3 + 5", "8", 2),
            labelled_text("x + y", "z", 3),
        ]
    )
    assert (await BM25Retriever(memory)(Query("3 + 5"), 1))[0].example.id == "entry-0002"
    assert (await BM25Retriever(memory)(Query("y"), 1))[0].example.id == "entry-0003"


async def test_answers_and_rationales_are_searched_by_default() -> None:
    entry = Example(Query("what?", id="b"), "vorbu", rationale="because of kanto", id="b")
    memory = Memory([labelled_text("what?", "other", 1), entry])
    for word in ("vorbu", "kanto"):
        assert (await BM25Retriever(memory)(Query(word), 1))[0].example.id == "b"
    questions_only = BM25Retriever(memory, reads=lambda example: example.query.text)
    assert (await questions_only(Query("vorbu"), 1))[0].score == 0


async def test_documents_without_words_are_found_last() -> None:
    memory = Memory([labelled_text("", "", 1), labelled_text("?!", "", 2)])
    assert [c.score for c in await BM25Retriever(memory)(Query("red"), 5)] == [0, 0]
    memory.add([labelled_text("red", "", 3)])
    assert (await BM25Retriever(memory)(Query("red"), 5))[0].example.id == "entry-0003"


STEPS = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.sampled_from(WORDS), max_size=4)), max_size=25
)


@settings(max_examples=40)
@given(steps=STEPS)
async def test_an_updated_index_equals_a_new_one(
    steps: list[tuple[int, list[str]]],
) -> None:
    """Each step adds a missing entry or deletes a present one."""
    memory = Memory([labelled_text("green", "x", 99)])
    followed = BM25Retriever(memory)
    for shade, words in steps:
        id = f"entry-{shade:04}"
        if id in memory.examples:
            memory.delete([id])
        else:
            memory.add([labelled_text(" ".join(words), "x", shade)])
        found = await followed(Query("red square 5"), 20)
        assert {c.example.id for c in found} == set(memory.examples)
        assert [(c.example.id, c.score) for c in found] == [
            (c.example.id, c.score) for c in await BM25Retriever(memory)(Query("red square 5"), 20)
        ]


async def test_concurrent_searches_see_consistent_states() -> None:
    memory = Memory([labelled_text(f"red {i}", "x", i) for i in range(30)])
    retrieve = BM25Retriever(memory)

    async def change() -> None:
        for i in range(20):
            memory.delete([f"entry-{i:04}"])
            await asyncio.sleep(0)

    found, _ = await asyncio.gather(
        asyncio.gather(*(retrieve(Query("red"), 10) for _ in range(20))), change()
    )
    assert [len(one) for one in found] == [10] * 20


class Forgetful(Memory):
    """Memory with a pruned log: before `lost`, only the entries of present examples remain."""

    lost = 0

    def changes(self, since: int, /) -> list[ExampleChange]:
        if 0 < since < self.lost:
            raise LogPrunedError("pruned")
        kept = (c for c in super().changes(since) if c.seq > self.lost or c.id in self.examples)
        return list(kept)


async def test_a_pruned_feed_is_read_from_its_beginning() -> None:
    feed = Forgetful(
        [labelled_text(hue, "x", shade) for shade, hue in enumerate(["red", "green", "blue"])]
    )
    search = BM25Retriever(feed)
    assert len(await search(Query("any"), 5)) == 3
    feed.delete(list(feed.ids())[:2])
    feed.lost = len(feed.log)
    feed.add([labelled_text("grey", "x", 9)])
    assert {c.example.query.text for c in await search(Query("any"), 5)} == {"blue", "grey"}
    feed.delete(list(feed.ids()))
    feed.lost = len(feed.log)
    with pytest.raises(EmptyKnowledgeBaseError):
        await search(Query("any"), 5)


class Vanishing(Memory):
    """Memory from which another process deletes an entry at each fetch."""

    vanish: tuple[str, ...] = ()

    def get_many(self, ids: Sequence[str], /) -> list[Example]:
        if self.vanish:
            self.delete(self.vanish[:1])
            self.vanish = self.vanish[1:]
        return super().get_many(ids)


async def test_examples_deleted_during_a_search_are_left_out() -> None:
    memory = Vanishing(
        [labelled_text(hue, "x", shade) for shade, hue in enumerate(["red", "blue", "green"])]
    )
    search = BM25Retriever(memory)
    assert len(await search(Query("red"), 3)) == 3
    memory.vanish = ("entry-0000", "entry-0001")
    assert [c.example.query.text for c in await search(Query("red"), 3)] == ["green"]


async def test_an_unknown_example_is_an_error() -> None:
    memory = Memory([labelled_text("red", "x", 1)])
    del memory.examples["entry-0001"]  # without an entry in the log
    with pytest.raises(NotFoundError):
        await BM25Retriever(memory)(Query("red"), 1)


async def test_an_empty_knowledge_base_is_an_error_with_a_hint() -> None:
    with pytest.raises(EmptyKnowledgeBaseError) as caught:
        await BM25Retriever(Memory())(Query("red"), 1)
    assert "bottega add" in caught.value.hint


@pytest.mark.parametrize(("k1", "b"), [(1.5, 1.5), (1.5, -0.1), (-0.1, 0.75)])
def test_settings_out_of_range_are_rejected(k1: float, b: float) -> None:
    with pytest.raises(SettingError):
        BM25Retriever(Memory(), k1=k1, b=b)


async def test_smallest_and_largest_settings_are_valid() -> None:
    for k1, b in ((0.0, 0.0), (0.5, 1.0)):
        retrieve = BM25Retriever(Memory([labelled_text("red", "x", 1)]), k1=k1, b=b)
        assert len(await retrieve(Query("red"), 1)) == 1


async def test_a_failed_read_is_repeated() -> None:
    memory, failing = (
        Memory([labelled_text("red", "x", 1), labelled_text("blue zebra", "x", 2)]),
        [True],
    )

    def reads(example: Example) -> str:
        if failing and "zebra" in example.query.text:
            failing.clear()
            raise OSError("once")
        return example.query.text

    retrieve = BM25Retriever(memory, reads=reads)
    with pytest.raises(OSError, match="once"):
        await retrieve(Query("zebra"), 5)
    assert [c.example.id for c in await retrieve(Query("zebra"), 5)] == ["entry-0002", "entry-0001"]


@pytest.mark.parametrize("k", [0, -1])
async def test_k_must_be_at_least_1(k: int) -> None:
    with pytest.raises(SettingError) as raised:
        await BM25Retriever(Memory([labelled_text("red", "x", 1)]))(Query("red"), k)
    assert raised.value.hint


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_nan_settings_are_rejected(wrong: float) -> None:
    with pytest.raises(SettingError):
        BM25Retriever(Memory(), k1=wrong)
    with pytest.raises(SettingError):
        BM25Retriever(Memory(), b=wrong)
