"""Recipes follow their papers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bottega.errors import EmptyKnowledgeBaseError, SettingError
from bottega.generation import ScriptedGenerator
from bottega.knowledge import KnowledgeBase
from bottega.pipeline import FixedRouter
from bottega.protocols import Tier
from bottega.recipes import cache_of_thought, visual_rag
from bottega.recording import PriceTable, TokenPrice
from bottega.routing import ColdStartRouter, RandomRouter
from bottega.types import Answer, Prompt, Query, Trace
from tests.builders import solid_image
from tests.knowledge.doubles import SeededEmbedder, image_example, text_example


class TurnsOnlyGenerator(ScriptedGenerator):
    turns_only = True


def large(prompt: Prompt) -> str:
    return "it has whiskers\nAnswer: cat"


def model(name: str, reply: str = "dog") -> ScriptedGenerator:
    return ScriptedGenerator(lambda prompt: reply, name=name)


@pytest.fixture
def cache() -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as opened:
        yield opened


def turns(generator: ScriptedGenerator, call: int = -1) -> list[str]:
    """Return the texts of one prompt by turn."""
    messages = generator.calls[call].prompt.messages
    return [" ".join(part for part in m.parts if isinstance(part, str)) for m in messages]


async def test_a_masters_answer_is_shown_to_the_apprentice(cache: KnowledgeBase) -> None:
    master, apprentice = ScriptedGenerator(large, name="gpt"), model("tiny")
    first = ColdStartRouter(
        1, Tier("master", master), then=FixedRouter(Tier("apprentice", apprentice, 1))
    )
    pipeline = cache_of_thought(cache, master=master, apprentice=apprentice, route=first)
    assert await pipeline.answer(image_example(1).query) == Answer(
        "cat", labels=("cat",), rationale="it has whiskers"
    )
    assert (await pipeline.trace(image_example(2).query)).tier == "apprentice"
    assert turns(apprentice) == ["What?", "it has whiskers\nAnswer: cat", "What?"]
    assert [(example.answer, example.source) for example in cache] == [("cat", "master:gpt")]


async def test_the_master_is_prompted_to_reason_if_it_can(cache: KnowledgeBase) -> None:
    apprentice = model("tiny")
    for master, reasoning, received in (
        (ScriptedGenerator(large), None, True),
        (ScriptedGenerator(large), False, False),
        (TurnsOnlyGenerator(large), None, False),
        (TurnsOnlyGenerator(large), True, True),
    ):
        pipeline = cache_of_thought(
            cache,
            master=master,
            apprentice=apprentice,
            route=lambda tiers: RandomRouter(tiers, 1.0),
            reasoning=reasoning,
            labels=("cat", "dog"),
        )
        await pipeline.answer(image_example(1).query)
        assert ("step by step" in turns(master)[-1]) == received


async def test_an_empty_cache_gives_no_demonstrations(cache: KnowledgeBase) -> None:
    apprentice = model("tiny")
    pipeline = cache_of_thought(
        cache,
        master=model("gpt"),
        apprentice=apprentice,
        shots=3,
        route=lambda tiers: RandomRouter(tiers, 0.0),
    )
    assert (await pipeline.answer(image_example(1).query)).text == "dog"
    assert len(cache) == 0
    cache.add([image_example(2, "cat")])
    assert len((await pipeline.trace(image_example(1).query)).candidates) == 1


async def test_a_static_cache_does_not_change(cache: KnowledgeBase) -> None:
    pipeline = cache_of_thought(
        cache,
        master=model("gpt"),
        apprentice=model("tiny"),
        route=lambda tiers: RandomRouter(tiers, 1.0),
        remember=False,
    )
    await pipeline.answer(image_example(1).query)
    assert len(cache) == 0


async def test_only_the_last_tiers_answers_are_stored(cache: KnowledgeBase) -> None:
    tiers = [Tier(name, model(name, name), shots=1) for name in ("small", "middle", "large")]

    class SequentialRouter:
        """Router that returns each tier in turn and records its observations."""

        def __init__(self, tiers: Sequence[Tier]) -> None:
            self.rest = iter(tiers)
            self.received: list[str] = []

        async def __call__(self, query: Query, /) -> Tier:
            return next(self.rest)

        async def observe(self, trace: Trace, /) -> None:
            self.received.append(trace.tier)

    made: list[SequentialRouter] = []

    def in_turn(tiers: Sequence[Tier]) -> SequentialRouter:
        made.append(SequentialRouter(tiers))
        return made[0]

    pipeline = cache_of_thought(cache, tiers=tiers, route=in_turn)
    for number in range(3):
        await pipeline.answer(image_example(number).query)
    assert [tier.name for tier in pipeline.tiers] == ["small", "middle", "large"]
    assert [example.answer for example in cache] == ["large"]
    assert made[0].received == ["small", "middle", "large"]


async def test_an_insufficient_answer_escalates(cache: KnowledgeBase) -> None:
    class Always:
        def __init__(self, tiers: Sequence[Tier]) -> None:
            self.master = tiers[-1]

        async def __call__(self, query: Query, tier: Tier, answer: Answer, /) -> Tier | None:
            return self.master if tier != self.master else None

    pipeline = cache_of_thought(
        cache,
        master=model("gpt", "cat"),
        apprentice=model("tiny"),
        route=lambda tiers: RandomRouter(tiers, 0.0),
        escalate=Always,
    )
    trace = await pipeline.trace(image_example(1).query)
    assert (trace.tier, trace.answer.text, len(trace.dismissed)) == ("master", "cat", 1)
    assert len(cache) == 1


async def test_shown_demonstrations_count_as_used(cache: KnowledgeBase) -> None:
    cache.add([image_example(1, "cat")])
    tiers = (Tier("apprentice", model("tiny"), 1), Tier("master", model("gpt", "cat")))
    pipeline = cache_of_thought(
        cache,
        tiers=tiers,
        route=ColdStartRouter(1, tiers[1], then=FixedRouter(tiers[0])),
        price=PriceTable({"gpt": TokenPrice(0, 1e6), "tiny": TokenPrice(0, 0)}),
        remember=False,
    )
    for shade in (2, 3):
        await pipeline.answer(image_example(shade).query)
    metadata = cache.metadata(cache.ids()[0])
    assert metadata.uses == 1
    assert metadata.saved_usd == pytest.approx(1.0)


def test_missing_or_duplicate_models_are_rejected(cache: KnowledgeBase) -> None:
    one = model("a")
    route = FixedRouter(Tier("a", one))
    with pytest.raises(SettingError, match="models are incomplete or redundant"):
        cache_of_thought(cache, master=one, route=route)
    with pytest.raises(SettingError, match="models are incomplete or redundant"):
        cache_of_thought(cache, tiers=[Tier("a", one)], master=one, route=route)
    with pytest.raises(SettingError, match="tiers must be one or more"):
        cache_of_thought(cache, tiers=[Tier("a", one), Tier("a", one)], route=route)
    with pytest.raises(SettingError, match="tiers must be one or more"):
        cache_of_thought(cache, tiers=[], route=route)


async def test_answers_to_text_questions_are_stored(cache: KnowledgeBase) -> None:
    pipeline = cache_of_thought(
        cache,
        master=model("gpt"),
        apprentice=model("tiny"),
        route=lambda tiers: RandomRouter(tiers, 1.0),
    )
    await pipeline.answer(text_example("Capital of France?").query)
    assert [example.query.text for example in cache] == ["Capital of France?"]


async def test_another_question_about_an_image_is_a_demonstration(
    cache: KnowledgeBase,
) -> None:
    apprentice = model("tiny")
    routes = ColdStartRouter(
        1, Tier("master", ScriptedGenerator(large)), then=FixedRouter(Tier("a", apprentice, 4))
    )
    pipeline = cache_of_thought(
        cache, master=ScriptedGenerator(large), apprentice=apprentice, route=routes
    )
    first = image_example(1).query
    await pipeline.answer(first)
    await pipeline.answer(image_example(1, question="Which?").query)
    assert turns(apprentice) == ["What?", "it has whiskers\nAnswer: cat", "Which?"]
    await pipeline.answer(first)
    assert turns(apprentice) == ["What?"]


async def test_equal_texts_with_different_choices_are_stored_separately(
    cache: KnowledgeBase,
) -> None:
    master = Tier("master", ScriptedGenerator(large))
    pipeline = cache_of_thought(
        cache, master=master.generator, apprentice=model("tiny"), route=FixedRouter(master)
    )
    both = [replace(image_example(1).query, choices=("cat", other)) for other in ("dog", "cow")]
    for query in (*both, *both):
        await pipeline.answer(query)
    assert [example.query.choices for example in cache] == [query.choices for query in both]


async def test_visual_rag_takes_its_labels_from_the_knowledge_base(cache: KnowledgeBase) -> None:
    with pytest.raises(EmptyKnowledgeBaseError, match="no labels") as caught:
        visual_rag(cache, model("small"))
    assert "bottega add" in caught.value.hint
    cache.add([image_example(1, "dog"), image_example(2, "cat")])
    pipeline = visual_rag(cache, model("small"))
    assert sorted(pipeline.choices) == ["cat", "dog"]
    assert (await pipeline.answer(image_example(3).query.images[0])).labels == ("dog",)
    assert visual_rag(cache, model("small"), labels=()).choices == ()


def test_wrong_types_are_rejected_where_they_are_passed(tmp_path: Path) -> None:
    embed: Any = "bundled"
    with pytest.raises(SettingError, match="embed must be an Embedder, got 'bundled'"):
        KnowledgeBase.open(tmp_path / "k.db", embed)
    wrong: Any = "pets.db"
    generator = ScriptedGenerator(["pug"])
    with pytest.raises(SettingError, match=r"knowledge must be a KnowledgeBase, got 'pets.db'"):
        visual_rag(wrong, generator)
    image: Any = solid_image(1)
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as pets:
        with pytest.raises(SettingError, match="images must be a tuple of Image"):
            visual_rag(pets, generator, labels=["pug"]).answer_sync(Query("What?", image))
        with pytest.raises(SettingError, match="generator must be a Generator"):
            visual_rag(pets, wrong, labels=["pug"])
        with pytest.raises(SettingError, match="order is unknown"):
            visual_rag(pets, generator, labels=["pug"], order=wrong)
        with pytest.raises(SettingError, match="shots must be at least 1, got 0"):
            visual_rag(pets, generator, labels=["pug"], shots=0)
