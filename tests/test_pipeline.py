from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bottega.errors import SettingError
from bottega.generation import ScriptedGenerator
from bottega.parsing import LabelParser
from bottega.pipeline import Pipeline
from bottega.prompting import InterleavedPrompter
from bottega.protocols import Tier
from bottega.reranking import TopKReranker
from bottega.routing import always
from bottega.types import (
    Answer,
    Candidate,
    Completion,
    Query,
    Reply,
    Sampling,
    SearchNode,
    SearchResult,
    SearchTree,
    Trace,
    Usage,
)
from tests.builders import QUESTION, candidates, picture

QUERY = Query(QUESTION, (picture(500),))


class Steps:
    """Parts that note when they are called, so that a test sees the order."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.traces: list[Trace] = []
        self.model = ScriptedGenerator(lambda prompt: "b", name="small")

    async def route(self, query: Query, /) -> Tier:
        self.taken.append("route")
        return Tier("apprentice", self.model, shots=2)

    async def retrieve(self, query: Query, k: int, /) -> list[Candidate]:
        self.taken.append(f"retrieve {k}")
        return candidates(*"abcdef")[:k]

    async def rerank(self, query: Query, found: Sequence[Candidate], k: int, /) -> list[Candidate]:
        self.taken.append(f"rerank {len(found)} to {k}")
        return list(found[:k])[::-1]

    async def record(self, trace: Trace, /) -> None:
        self.taken.append("record")
        self.traces.append(trace)

    def price(self, model: str, usage: Usage, /) -> float | None:
        return 0.25 if model == "small" else None

    def pipeline(self) -> Pipeline:
        return Pipeline(
            route=self.route,
            retrieve=self.retrieve,
            rerank=self.rerank,
            prompt=InterleavedPrompter(),
            parse=LabelParser(),
            record=self.record,
            price=self.price,
            sampling=Sampling(max_tokens=7),
            choices=("a", "b"),
            fetch=5,
        )


async def test_the_order_of_the_steps_and_the_trace() -> None:
    steps = Steps()
    trace = await steps.pipeline().trace(QUERY)
    assert steps.taken == ["route", "retrieve 5", "rerank 5 to 2", "record"]
    assert steps.traces == [trace]
    assert [c.example.answer for c in trace.candidates] == ["b", "a"]
    assert (trace.tier, trace.reply.model, trace.cost_usd) == ("apprentice", "small", 0.25)
    assert (trace.answer.text, trace.answer.valid) == ("b", True)
    assert trace.query.choices == ("a", "b")
    assert len(trace.prompt.messages) == 5
    assert trace.seconds > 0


async def test_a_querys_own_choices_win() -> None:
    trace = await Steps().pipeline().trace(Query("?", choices=("x", "y")))
    assert trace.query.choices == ("x", "y")
    assert not trace.answer.valid


async def test_without_shots_nothing_is_retrieved() -> None:
    steps = Steps()
    alone = Pipeline(
        route=always(Tier("alone", steps.model)),
        retrieve=steps.retrieve,
        prompt=InterleavedPrompter(),
        parse=LabelParser(),
    )
    trace = await alone.trace(QUERY)
    assert (steps.taken, trace.candidates, trace.cost_usd) == ([], (), None)


async def test_without_a_reranker_the_nearest_are_shown() -> None:
    steps = Steps()
    plain = Pipeline(
        route=always(Tier("small", steps.model, shots=3)),
        retrieve=steps.retrieve,
        prompt=InterleavedPrompter(),
        parse=LabelParser(),
    )
    assert [c.example.answer for c in (await plain.trace(QUERY)).candidates] == list("abc")


async def test_without_a_reranker_no_more_than_the_shots_are_shown() -> None:
    steps = Steps()
    plain = Pipeline(
        route=always(Tier("small", steps.model, shots=2)),
        retrieve=steps.retrieve,
        prompt=InterleavedPrompter(),
        parse=LabelParser(),
        fetch=5,
    )
    trace = await plain.trace(QUERY)
    assert steps.taken == ["retrieve 5"]
    assert [c.example.answer for c in trace.candidates] == ["a", "b"]
    assert len(trace.prompt.messages) == 5  # two messages a demonstration, and the query


def test_the_sync_facade_answers_again_and_again() -> None:
    pipeline = Steps().pipeline()
    assert [pipeline.answer_sync(QUERY).text for _ in range(3)] == ["b", "b", "b"]


async def test_the_sync_facade_inside_a_loop_says_what_to_do() -> None:
    with pytest.raises(SettingError) as caught:
        Steps().pipeline().answer_sync(QUERY)
    assert "await" in caught.value.hint


async def test_many_queries_at_once_do_not_mix() -> None:
    model = ScriptedGenerator(lambda prompt: str(prompt.messages[-1].parts[-1]), latency=0.001)
    pipeline = Pipeline(
        route=always(Tier("echo", model)),
        rerank=TopKReranker(),
        prompt=InterleavedPrompter(),
        parse=LabelParser(),
    )
    answers = await asyncio.gather(*(pipeline.answer(Query(f"word{i}")) for i in range(50)))
    assert [answer.text for answer in answers] == [f"word{i}" for i in range(50)]


async def test_an_answer_that_is_not_good_enough_goes_on_to_the_next_tier() -> None:
    small, large = ScriptedGenerator(["a"], name="small"), ScriptedGenerator(["b"], name="large")
    tiers = (Tier("apprentice", small), Tier("master", large, sampling=Sampling(max_tokens=99)))

    async def unsure(query: Query, tier: Tier, answer: Answer, /) -> Tier | None:
        return tiers[1] if answer.text == "a" else None

    steps = Steps()
    pipeline = replace(steps.pipeline(), route=always(tiers[0]), escalate=unsure)
    trace = await pipeline.trace(QUERY)
    assert (trace.tier, trace.answer.text) == ("master", "b")
    assert [reply.model for reply in trace.dismissed] == ["small"]
    assert large.calls[0].sampling.max_tokens == 99
    assert trace.cost_usd is None  # what the large one costs is not known
    free = replace(pipeline, price=lambda model, usage: 0.25, tiers=tiers)
    small, large = ScriptedGenerator(["a"]), ScriptedGenerator(["b"])
    tiers = (Tier("apprentice", small), Tier("master", large))
    assert (await replace(free, route=always(tiers[0])).trace(QUERY)).cost_usd == 0.5


async def test_a_tier_may_have_a_prompt_of_its_own() -> None:
    model = ScriptedGenerator(["a"])
    tier = Tier("master", model, prompt=InterleavedPrompter(show_choices=False))
    await replace(Steps().pipeline(), route=always(tier)).trace(QUERY)
    assert model.calls[0].prompt.messages[-1].parts[-1] == QUESTION


class Chooses:
    """A search that shows the second candidate and says what it asked."""

    def __init__(self) -> None:
        self.given: list[tuple[int, int]] = []

    async def search(self, query: Query, found: Sequence[Candidate], k: int, /) -> SearchResult:
        self.given.append((len(found), k))
        prompt = InterleavedPrompter()(query, found[1:2])
        reply = Reply("small", (Completion("b"),), Usage(10, 1))
        tree = SearchTree(SearchNode(), (0,), "rollouts", requests=3, calls=7, usage=Usage(100, 7))
        return SearchResult(tuple(found[1:2]), prompt, reply, Answer("b"), tree)


async def test_a_search_chooses_and_answers_and_all_it_asked_is_paid() -> None:
    steps, search = Steps(), Chooses()
    per_token = replace(
        steps.pipeline(), search=search, price=lambda model, usage: float(usage.prompt_tokens)
    )
    trace = await per_token.trace(QUERY)
    assert steps.taken == ["route", "retrieve 5", "record"]
    assert search.given == [(5, 2)]
    assert [c.example.answer for c in trace.candidates] == ["b"]
    assert (trace.answer.text, trace.reply.usage, trace.cost_usd) == ("b", Usage(10, 1), 100.0)
    assert trace.tree is not None and trace.tree.calls == 7
    assert steps.model.calls == []


async def test_a_tier_without_demonstrations_is_not_searched_for() -> None:
    steps, search = Steps(), Chooses()
    bare = Tier("bare", steps.model)
    trace = await replace(steps.pipeline(), route=always(bare), search=search).trace(QUERY)
    assert (search.given, trace.tree) == ([], None)
