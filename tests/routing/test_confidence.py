from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.generation import ScriptedGenerator
from bottega.parsing import LabelParser, most_frequent
from bottega.pipeline import FixedRouter, Pipeline
from bottega.prompting import InterleavedPrompter
from bottega.protocols import Tier
from bottega.routing import ConfidenceEscalation
from bottega.types import Answer, Query, Sampling
from tests.routing.builders import QUERY, TIERS

ANSWERS = st.builds(
    Answer, st.just("a"), st.booleans(), confidence=st.none() | st.floats(0, 1), labels=st.just(())
)


@given(answer=ANSWERS, min_confidence=st.floats(0, 1), place=st.integers(0, 2))
async def test_invalid_or_uncertain_answers_escalate_by_one_tier(
    answer: Answer, min_confidence: float, place: int
) -> None:
    better = await ConfidenceEscalation(TIERS, min_confidence)(QUERY, TIERS[place], answer)
    unsure = not answer.valid or (
        answer.confidence is not None and answer.confidence < min_confidence
    )
    if unsure and place < 2:
        assert better == TIERS[place + 1]
    else:
        assert better is None


async def test_a_tier_outside_the_cascade_is_not_escalated() -> None:
    requested = Tier("other", ScriptedGenerator([]))
    assert await ConfidenceEscalation(TIERS)(QUERY, requested, Answer("", valid=False)) is None


async def test_answers_without_confidence_are_kept_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unsure = ConfidenceEscalation(TIERS)
    with caplog.at_level(logging.WARNING):
        for tier in (*TIERS, *TIERS):
            assert await unsure(QUERY, tier, Answer("a")) is None
    assert [record.getMessage().split()[2] for record in caplog.records] == ["'small'", "'middle'"]


@pytest.mark.parametrize("min_confidence", [-0.1, 1.1, float("nan")])
def test_a_threshold_must_be_a_probability(min_confidence: float) -> None:
    with pytest.raises(SettingError):
        ConfidenceEscalation(TIERS, min_confidence)


def test_tiers_need_two_or_more_different_names() -> None:
    for tiers in (TIERS[:1], (TIERS[0], TIERS[0])):
        with pytest.raises(SettingError) as caught:
            ConfidenceEscalation(tiers)
        assert "different names" in caught.value.hint


async def test_disagreeing_samples_escalate_through_the_cascade() -> None:
    said = {"small": ["a", "b", "c"], "middle": ["a", "b", "b"], "large": ["b", "b", "b"]}
    tiers = [Tier(name, ScriptedGenerator(words, name=name)) for name, words in said.items()]
    pipeline = Pipeline(
        route=FixedRouter(tiers[0]),
        prompt=InterleavedPrompter(),
        parse=LabelParser(),
        sampling=Sampling(n=3, temperature=1.0),
        choose=most_frequent,
        escalate=ConfidenceEscalation(tiers, min_confidence=0.7),
    )
    trace = await pipeline.trace(Query("?", choices=("a", "b", "c")))
    assert (trace.tier, trace.answer.text, trace.answer.confidence) == ("large", "b", 1.0)
    assert [reply.model for reply in trace.dismissed] == ["small", "middle"]
