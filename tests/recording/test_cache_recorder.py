from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from bottega.errors import BottegaError, StoreFullError
from bottega.knowledge import KnowledgeBase
from bottega.recording import CacheRecorder, is_abstention, is_unanswered
from bottega.recording.recorders import Tagger
from bottega.types import Answer, Completion, Example, Prompt, Query, Reply, Trace
from tests.knowledge.doubles import SeededEmbedder, damaged_image, image_example, text_example

ANSWERED = Answer("cat", labels=("cat",), rationale="it has whiskers")
REPLY = Reply("gpt", (Completion("it has whiskers\nAnswer: cat"),))


def trace(tier: str = "master", reply: Reply = REPLY, answer: Answer = ANSWERED) -> Trace:
    query = replace(image_example(1).query, id="item-7", choices=("cat", "dog"))
    return Trace("t", 0.0, query, tier, (), Prompt(()), reply, answer, 0.1)


@pytest.fixture
def kb() -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as opened:
        yield opened


async def test_a_masters_answer_is_kept_with_its_reasoning_and_source(kb: KnowledgeBase) -> None:
    await CacheRecorder(kb, stored_tiers={"master"})(trace())
    (kept,) = kb
    assert (kept.answer, kept.rationale, kept.source) == ("cat", "it has whiskers", "master:gpt")
    assert kept.query.choices == ("cat", "dog")
    assert kept.labels is None


async def test_several_labels_stay_several(kb: KnowledgeBase) -> None:
    both = Answer("cat, dog", labels=("cat", "dog"))
    await CacheRecorder(kb, stored_tiers={"master"})(trace(answer=both))
    assert [example.labels for example in kb] == [("cat", "dog")]


async def test_other_answers_are_not_stored(kb: KnowledgeBase) -> None:
    remember = CacheRecorder(kb, stored_tiers={"master"})
    cut = Completion("it has", finish_reason="length")
    await remember(trace(tier="apprentice"))
    await remember(trace(answer=replace(ANSWERED, valid=False)))
    await remember(trace(answer=Answer("Unknown.")))
    await remember(trace(reply=replace(REPLY, completions=(cut,))))
    await remember(trace(reply=replace(REPLY, completions=(Completion("cat"), cut))))
    await remember.learn(Query("q"), ANSWERED, "apprentice")
    await remember.learn(Query("q"), replace(ANSWERED, valid=False), "master")
    assert len(kb) == 0


async def test_learn_stores_an_answer_without_a_trace(kb: KnowledgeBase) -> None:
    await CacheRecorder(kb, stored_tiers={"master"}).learn(Query("q"), ANSWERED, "master")
    assert [example.source for example in kb] == ["master"]


async def test_keep_returns_the_id(kb: KnowledgeBase) -> None:
    remember = CacheRecorder(kb, stored_tiers=())
    first = await remember.store(image_example(1, "cat"))
    second = await remember.store(image_example(1, "dog"))
    assert kb.ids() == [second] != [first]


async def test_a_pinned_answer_stays_without_a_warning(
    kb: KnowledgeBase, caplog: pytest.LogCaptureFixture
) -> None:
    remember = CacheRecorder(kb, stored_tiers={"master"})
    await remember(trace(answer=Answer("cat")))
    kb.pin(kb.ids())
    with caplog.at_level(logging.WARNING):
        await remember(trace(answer=Answer("dog")))
        (kept,) = kb
        assert [await remember.store(replace(kept, answer="cow", id=None))] == kb.ids()
    assert [example.answer for example in kb] == ["cat"]
    assert not caplog.records


class Counting:
    """A store that is slow enough for others to arrive meanwhile."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.groups: list[int] = []
        self._fails = fails

    def replace(
        self,
        examples: Sequence[Example],
        *,
        pin: bool = False,
        on_error: Callable[[BottegaError], None],
    ) -> list[str | None]:
        import time

        time.sleep(0.05)
        self.groups.append(len(examples))
        if self._fails:
            raise self._fails
        return [example.query.text for example in examples]


async def test_concurrent_answers_share_a_commit() -> None:
    store = Counting()
    remember = CacheRecorder(store, stored_tiers=())
    ids = await asyncio.gather(*(remember.store(text_example(f"q{i}")) for i in range(40)))
    assert ids == [f"q{i}" for i in range(40)]
    assert len(store.groups) <= 3


async def test_a_cancelled_caller_does_not_cancel_the_write() -> None:
    store = Counting()
    remember = CacheRecorder(store, stored_tiers=())
    leaving = asyncio.create_task(remember.store(text_example("first")))
    waiting = asyncio.create_task(remember.store(text_example("second")))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await waiting == "second"
    assert sum(store.groups) == 2


async def test_a_failed_write_fails_all_waiting_callers() -> None:
    remember = CacheRecorder(Counting(StoreFullError("full")), stored_tiers=())
    failed = await asyncio.gather(
        *(remember.store(text_example(f"q{i}")) for i in range(3)), return_exceptions=True
    )
    assert [type(one) for one in failed] == [StoreFullError] * 3


async def test_unstorable_answers_are_logged_once(
    kb: KnowledgeBase, caplog: pytest.LogCaptureFixture
) -> None:
    remember = CacheRecorder(kb, stored_tiers=(), max_characters=10)
    with caplog.at_level(logging.WARNING):
        for i in range(3):
            assert await remember.store(text_example("q", f"{i} much too long")) is None
            assert await remember.store(Example(Query("?", (damaged_image(),)), str(i))) is None
    assert len(caplog.records) == 2
    assert len(kb) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unknown", True),
        ("Unknown.", True),
        ("**unknown**", True),
        ("Answer: unknown", True),
        ("Final answer: **Unknown**.", True),
        ("The answer is unknown.", True),
        ("The final answer: unknown", True),
        ("Label: unknown", True),
        ("<answer>unknown</answer>", True),
        ("\\boxed{unknown}", True),
        ("Answer Choice: unknown\nConfidence Score: 0.1", True),
        ("unknown artist", False),
        ("Answer: unknown artist", False),
        ("The Unknown", False),
        ("unknown, confidence is low", False),
        ("an unknown dog", False),
        ("", False),
    ],
)
def test_abstentions_are_recognised(text: str, expected: bool) -> None:
    assert is_abstention(text) is expected


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't help with that.",
        "Please upload an image of the cat, dog, bird or fish",
        "Unfortunately, I can't view the photograph.",
        "I don't see any image attached.",
        "请上传猫的图片。",
        "I cannot see the image.",
    ],
)
async def test_refusals_are_not_stored(kb: KnowledgeBase, text: str) -> None:
    refused = replace(trace(), answer=Answer(text))
    await CacheRecorder(kb, stored_tiers={"master"})(refused)
    assert len(kb) == 0
    assert is_unanswered(text) and not is_abstention(text)
    assert not is_unanswered(f"It is a cat. {text}")


async def test_tags_are_stored_with_the_answer(kb: KnowledgeBase) -> None:
    async def tag(examples: Sequence[Example]) -> list[Example]:
        return [replace(one, tags={"keywords": f"{one.answer},whiskers"}) for one in examples]

    await CacheRecorder(kb, stored_tiers={"master"}, tag=tag)(trace())
    assert [(one.answer, one.tags["keywords"]) for one in kb] == [("cat", "cat,whiskers")]


async def fail(examples: Sequence[Example]) -> list[Example]:
    raise BottegaError("the keyword model is down: a cat")


async def return_none(examples: Sequence[Example]) -> list[Example]:
    return []


@pytest.mark.parametrize(("tag", "error"), [(fail, "BottegaError"), (return_none, "ValueError")])
async def test_a_failed_tagger_costs_no_answer_and_one_warning(
    kb: KnowledgeBase, caplog: pytest.LogCaptureFixture, tag: Tagger, error: str
) -> None:
    remember = CacheRecorder(kb, stored_tiers={"master"}, tag=tag)
    with caplog.at_level(logging.WARNING):
        first = await remember.store(image_example(1, "cat"))
        second = await remember.store(image_example(2, "dog"))
    assert kb.ids() == [first, second]
    assert [example.answer for example in kb] == ["cat", "dog"]
    assert [record.getMessage() for record in caplog.records] == [
        f"an answer is stored without tags: {error}"
    ]
