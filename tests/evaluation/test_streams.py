"""Streams: asked one by one, and what their figures say."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from bottega.evaluation.benchmark import labelled_benchmark
from bottega.evaluation.outcomes import ScoredAnswer, pipeline_method
from bottega.evaluation.streams import StreamResult, gain, growth, mean_over, stream
from bottega.generation import ScriptedGenerator
from bottega.knowledge import KnowledgeBase
from bottega.protocols import Tier
from bottega.recipes import cache_of_thought
from bottega.types import Answer, Prompt, Query
from tests.builders import example
from tests.knowledge.doubles import SeededEmbedder


def told(scores: str, tiers: str | None = None) -> StreamResult:
    """One character an item: 1 or 0, and the tier's letter."""
    items = zip(scores, tiers or "a" * len(scores), strict=True)
    return StreamResult(
        tuple(
            ScoredAnswer(place, example("x", place), Answer("x"), (float(score),), tier)
            for place, (score, tier) in enumerate(items)
        ),
        len(scores),
    )


async def test_items_retrieve_earlier_answers() -> None:
    """The apprentice repeats what it is shown: the first item finds an empty cache."""

    def shown(prompt: Prompt) -> str:
        said = [m.parts[0] for m in prompt.messages if m.role == "assistant"]
        return str(said[0]) if said else "unknown"

    apprentice = ScriptedGenerator(shown)
    turn = iter("ama" * 2)

    def in_turn(tiers: Sequence[Tier]):  # type: ignore[no-untyped-def]
        async def route(query: Query, /) -> Tier:
            return tiers["am".index(next(turn))]

        return route

    data = labelled_benchmark("d", [example("b", 90)], [example("b", shade) for shade in range(6)])
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as cache:
        pipeline = cache_of_thought(
            cache,
            master=ScriptedGenerator(lambda prompt: "b"),
            apprentice=apprentice,
            route=in_turn,
            reasoning=False,
            labels=data.labels,
        )
        streamed = await stream(data, pipeline_method("cached", pipeline, 1))
    assert [one.score for one in streamed.scored] == [0, 1, 1, 1, 1, 1]
    assert streamed.share("master") == pytest.approx(1 / 3)
    assert streamed.scores("apprentice") == {0: 0.0, 2: 1.0, 3: 1.0, 5: 1.0}


def test_parts_have_equal_length() -> None:
    streamed = told("0101010")
    assert [list(streamed.scores(part=part)) for part in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]


def test_mean_over_streams_is_inside_its_interval() -> None:
    estimate = mean_over([told("1111"), told("00000000")])
    assert estimate.value == 0.5
    assert (estimate.low, estimate.high) == (0.0, 1.0)  # two streams tell little
    alike = mean_over([told("1100" * 20)] * 5)
    assert alike.low < alike.value == 0.5 < alike.high
    assert alike.high - alike.low < 0.15


def test_growth_is_last_part_minus_first() -> None:
    rising = growth([told("000" + "010" + "111")] * 3, "a")
    assert rising.value == 1.0
    flat = growth([told("10" * 30), told("01" * 30)], "a")
    assert flat.low < 0 < flat.high
    assert math.isnan(growth([told("111", "bbb")], "a").value)


def test_gain_compares_the_same_items() -> None:
    ours, theirs = told("1101", "aamm"), told("1000")
    assert gain([ours], [theirs]).value == 0.5
    assert gain([ours], [theirs], tier="a").value == 0.5
    assert gain([ours], [theirs], tier="a", part=0, parts=4).value == 0.0
    missing = StreamResult(theirs.scored[1:], 4)
    assert gain([ours], [missing]).value == pytest.approx(2 / 3)
