"""Tests of streams and their statistics."""

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


def stream_of(scores: str, tiers: str | None = None) -> StreamResult:
    """Return a stream with one score (0 or 1) and one tier letter per item."""
    items = zip(scores, tiers or "a" * len(scores), strict=True)
    return StreamResult(
        tuple(
            ScoredAnswer(index, example("x", index), Answer("x"), (float(score),), tier)
            for index, (score, tier) in enumerate(items)
        ),
        len(scores),
    )


async def test_items_retrieve_earlier_answers() -> None:
    """The apprentice repeats the first demonstration; the cache starts empty."""

    def repeat_first_answer(prompt: Prompt) -> str:
        answers = [m.parts[0] for m in prompt.messages if m.role == "assistant"]
        return str(answers[0]) if answers else "unknown"

    apprentice = ScriptedGenerator(repeat_first_answer)
    turns = iter("ama" * 2)

    def alternating_router(tiers: Sequence[Tier]):  # type: ignore[no-untyped-def]
        async def route(query: Query, /) -> Tier:
            return tiers["am".index(next(turns))]

        return route

    data = labelled_benchmark("d", [example("b", 90)], [example("b", shade) for shade in range(6)])
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as cache:
        pipeline = cache_of_thought(
            cache,
            master=ScriptedGenerator(lambda prompt: "b"),
            apprentice=apprentice,
            route=alternating_router,
            reasoning=False,
            labels=data.labels,
        )
        streamed = await stream(data, pipeline_method("cached", pipeline, 1))
    assert [one.score for one in streamed.scored] == [0, 1, 1, 1, 1, 1]
    assert streamed.share("master") == pytest.approx(1 / 3)
    assert streamed.scores("apprentice") == {0: 0.0, 2: 1.0, 3: 1.0, 5: 1.0}


def test_parts_have_equal_length() -> None:
    streamed = stream_of("0101010")
    assert [list(streamed.scores(part=part)) for part in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]


def test_mean_over_streams_is_inside_its_interval() -> None:
    estimate = mean_over([stream_of("1111"), stream_of("00000000")])
    assert estimate.value == 0.5
    assert (estimate.low, estimate.high) == (0.0, 1.0)  # two streams give a wide interval
    stable = mean_over([stream_of("1100" * 20)] * 5)
    assert stable.low < stable.value == 0.5 < stable.high
    assert stable.high - stable.low < 0.15


def test_growth_is_last_part_minus_first() -> None:
    rising = growth([stream_of("000" + "010" + "111")] * 3, "a")
    assert rising.value == 1.0
    flat = growth([stream_of("10" * 30), stream_of("01" * 30)], "a")
    assert flat.low < 0 < flat.high
    assert math.isnan(growth([stream_of("111", "bbb")], "a").value)


def test_gain_compares_the_same_items() -> None:
    ours, theirs = stream_of("1101", "aamm"), stream_of("1000")
    assert gain([ours], [theirs]).value == 0.5
    assert gain([ours], [theirs], tier="a").value == 0.5
    assert gain([ours], [theirs], tier="a", part=0, parts=4).value == 0.0
    missing = StreamResult(theirs.scored[1:], 4)
    assert gain([ours], [missing]).value == pytest.approx(2 / 3)
