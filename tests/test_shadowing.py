from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bottega.errors import SettingError
from bottega.generation import ScriptedGenerator
from bottega.parsing import LabelParser, decided_agreement
from bottega.pipeline import FixedRouter, Pipeline
from bottega.prompting import InterleavedPrompter
from bottega.protocols import Tier
from bottega.reranking import GatedReranker, TopKReranker
from bottega.routing import BenefitGate, ShadowSampler
from bottega.shadowing import ShadowRecorder
from bottega.types import Candidate, Prompt, Query, Usage
from tests.builders import candidates


def follows(prompt: Prompt) -> str:
    """Return the last demonstrated answer, or a guess without demonstrations."""
    shown = [message for message in prompt.messages if message.role == "assistant"]
    return str(shown[-1].parts[0]) if shown else "3"


class ShadowSetup:
    """Pipeline that compares its first tier with its last, at one dollar per call."""

    def __init__(self, route: int = 0, found: Sequence[Candidate] = candidates("7")) -> None:
        self.small, self.large = (
            ScriptedGenerator(follows, name="small"),
            ScriptedGenerator(["7"] * 99),
        )
        tiers = Tier("apprentice", self.small, shots=1), Tier("master", self.large)
        self.shadow = ShadowSampler(
            BenefitGate(min_samples=5), decided_agreement, rate=1.0, at_once=1
        )
        self.charged: list[float] = []

        async def retrieve(query: Query, k: int, /) -> list[Candidate]:
            return list(found[:k])

        def price(model: str, usage: Usage, /) -> float:
            return 1.0

        self.pipeline = Pipeline(
            route=FixedRouter(tiers[route]),
            retrieve=retrieve,
            rerank=GatedReranker(TopKReranker(), self.shadow.gate.shows),
            prompt=InterleavedPrompter(),
            parse=LabelParser(),
            price=price,
            tiers=tiers,
        )
        record = ShadowRecorder(self.pipeline, self.shadow, charge=self.charged.append)
        self.pipeline = replace(self.pipeline, record=record)


async def test_the_gate_opens_if_demonstrations_improve_samples() -> None:
    setup = ShadowSetup()
    answers = [(await setup.pipeline.answer(Query("?"))).text for _ in range(10)]
    assert answers == ["3"] * 5 + ["7"] * 5
    quality = setup.shadow.summary()
    assert (quality.n, quality.with_demonstrations.least, quality.without.most) == (10, 1, 0)
    # The answer itself is reused.
    assert (len(setup.small.calls), len(setup.large.calls)) == (20, 10)
    assert setup.charged == [1.0] * 20


async def test_the_masters_answers_are_not_measured() -> None:
    setup = ShadowSetup(route=1)
    await setup.pipeline.answer(Query("?"))
    assert (setup.shadow.summary().n, len(setup.large.calls)) == (0, 1)


async def test_queries_without_candidates_are_not_measured() -> None:
    setup = ShadowSetup(found=())
    for _ in range(3):  # each query releases its slot
        await setup.pipeline.answer(Query("?"))
    assert len(setup.large.calls) == 0
    assert setup.shadow.begins()


def test_one_tier_cannot_be_compared() -> None:
    setup = ShadowSetup()
    with pytest.raises(SettingError):
        ShadowRecorder(replace(setup.pipeline, tiers=()), setup.shadow)
