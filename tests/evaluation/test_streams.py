"""Tests of streams and their statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bottega.evaluation.benchmark import labelled_benchmark
from bottega.evaluation.outcomes import ScoredAnswer, pipeline_method
from bottega.evaluation.streams.growing_cache import (
    StreamResult,
    gain,
    growth,
    mean_over,
    scores_without,
    stream,
)
from bottega.generation import ScriptedGenerator
from bottega.knowledge import KnowledgeBase
from bottega.protocols import Tier
from bottega.recipes import cache_of_thought
from bottega.types import Answer, Example, Prompt, Query
from tests.builders import example
from tests.knowledge.doubles import SeededEmbedder


def item(number: int) -> Example:
    made = example("x", number)
    return replace(made, query=replace(made.query, id=f"i{number}"))


def stream_of(scores: str, tiers: str | None = None) -> StreamResult:
    """Return a stream with one score (0 or 1) and one tier letter per item."""
    items = zip(scores, tiers or "a" * len(scores), strict=True)
    return StreamResult(
        tuple(
            ScoredAnswer(index, item(index), Answer("x"), (float(score),), tier)
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
    assert [one.tier for one in streamed.scored].count("master") == 2
    assert streamed.scores("apprentice") == {0: 0.0, 2: 1.0, 3: 1.0, 5: 1.0}


def test_parts_have_equal_length() -> None:
    streamed = stream_of("0101010")
    assert [list(streamed.scores(part=part)) for part in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]


def test_mean_over_streams_is_inside_its_interval() -> None:
    estimate = mean_over([stream_of("1111"), stream_of("00000000")])
    assert estimate.value == 0.5
    assert (estimate.low, estimate.high) == (0.0, 1.0)  # two streams give a wide interval


def test_equal_answers_in_more_orders_give_no_narrower_interval() -> None:
    """Orders hold the same items: repeating them is no further evidence."""
    one, many = (mean_over([stream_of("1100" * 20)] * n) for n in (1, 16))
    assert (many.low, many.value, many.high) == pytest.approx((one.low, one.value, one.high))
    assert 0.15 < one.high - one.low < 0.3  # Wilson's interval of 80 items is 0.21 wide


def test_growth_is_last_part_minus_first() -> None:
    rising = growth([stream_of("000" + "010" + "111")] * 3, "a")
    assert rising.value == 1.0
    flat = growth([stream_of("10" * 30), stream_of("01" * 30)], "a")
    assert flat.low < 0 < flat.high
    assert math.isnan(growth([stream_of("111", "bbb")], "a").value)


@pytest.mark.parametrize("tiers", ["bbaaaa", "aaaabb"])
def test_growth_leaves_out_streams_without_the_tier_in_a_part(tiers: str) -> None:
    falling = stream_of("110000", tiers)
    assert growth([falling, stream_of("000111")], "a").value == 1.0
    assert math.isnan(growth([falling], "a").value)


def test_gain_compares_the_same_tier_on_the_same_items() -> None:
    """The control of another router gave items 2 and 3 to the master."""
    ours = stream_of("1101", "aamm")
    control = scores_without([stream_of("1011", "aamm"), stream_of("1000")])
    assert gain([ours], control).value == 0.0  # the master lost one of its two
    assert gain([ours], control, tier="a").value == 0.5
    assert gain([ours], control, tier="a", part=0).value == 0.5
    missing = scores_without([StreamResult(stream_of("1000").scored[1:], 4)])
    assert gain([ours], missing, tier="a").value == 1.0
