from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bottega.errors import GenerationError, SettingError
from bottega.generation import ScriptedGenerator
from bottega.parsing import LabelParser, decided_agreement
from bottega.pipeline import FixedRouter, Pipeline
from bottega.prompting import InterleavedPrompter
from bottega.protocols import Tier
from bottega.reranking import GatedReranker, TopKReranker
from bottega.routing import (
    AgreementEscalation,
    AgreementPolicy,
    AgreementRouter,
    BenefitGate,
    ShadowSampler,
)
from bottega.shadowing import AgreementRecorder, ShadowRecorder
from bottega.types import Candidate, Prompt, Query, Trace, Usage
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


class AgreementSetup:
    """Pipeline with an `AgreementRouter` whose apprentice repeats the nearest demonstration, and
    whose master answers 7, at one dollar per call."""

    def __init__(self, replies: Sequence[str] = ("7",) * 999) -> None:
        self.small = ScriptedGenerator(follows, name="small")
        self.large = ScriptedGenerator(list(replies))
        tiers = Tier("apprentice", self.small, shots=1), Tier("master", self.large)
        self.policy = AgreementPolicy()
        self.remembered: list[Trace] = []

        async def retrieve(query: Query, k: int, /) -> list[Candidate]:
            return list(candidates("7")[:k])

        async def remember(trace: Trace, /) -> None:
            self.remembered.append(trace)

        pipeline = Pipeline(
            route=AgreementRouter(tiers, retrieve, self.policy),
            retrieve=retrieve,
            rerank=TopKReranker(),
            prompt=InterleavedPrompter(),
            parse=LabelParser(),
            tiers=tiers,
        )
        record = AgreementRecorder(pipeline, self.policy, decided_agreement, remember=remember)
        self.pipeline = replace(pipeline, record=record)

    async def answer(self, n: int) -> list[str]:
        return [(await self.pipeline.trace(Query(f"question {i}"))).tier for i in range(n)]


async def test_the_apprentice_answers_once_its_agreement_is_certified() -> None:
    setup = AgreementSetup()
    tiers = await setup.answer(600)
    assert set(tiers[:250]) == {"master"}
    served = tiers.count("apprentice")
    assert served > 200
    # Both answered until then, and the master some of the apprentice's questions afterwards.
    assert len(setup.small.calls) == 600
    assert len(setup.large.calls) == 600 - served + len(setup.remembered)
    assert 0 < len(setup.remembered) < served
    assert {trace.answer.text for trace in setup.remembered} == {"7"}
    assert {trace.tier for trace in setup.remembered} == {"master"}
    demonstrated = [call.prompt for call in setup.small.calls]
    assert all(any(m.role == "assistant" for m in prompt.messages) for prompt in demonstrated)


async def test_undecided_and_failed_comparisons_count_as_different() -> None:
    # No rule can compare these sentences with the apprentice's "7".
    sentences = [f"It may be a large or a small one, case {i}." for i in range(300)]
    setup = AgreementSetup(sentences)
    await setup.answer(201)
    assert setup.policy.score is not None
    assert all(not agrees for _, agrees in setup.policy._samples)

    failing = AgreementSetup()

    async def fail(*_: object) -> None:
        raise GenerationError("no answer", hint="try again")

    failing.small.generate = fail  # type: ignore[assignment,method-assign]
    assert await failing.answer(5) == ["master"] * 5
    assert [agrees for _, agrees in failing.policy._samples] == [False] * 5


async def test_the_answers_of_an_escalation_are_compared() -> None:
    setup = AgreementSetup()
    small, large = setup.pipeline.tiers

    async def retrieve(query: Query, k: int, /) -> list[Candidate]:
        return list(candidates("7")[:k])

    pipeline = replace(
        setup.pipeline,
        route=FixedRouter(small),
        escalate=AgreementEscalation((small, large), retrieve, setup.policy),
    )
    tiers = [(await pipeline.trace(Query(f"question {i}"))).tier for i in range(600)]
    assert set(tiers[:250]) == {"master"}
    assert tiers.count("apprentice") > 200
    assert len(setup.small.calls) == 600  # no call besides the answer
