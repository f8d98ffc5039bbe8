from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bottega.errors import BatchError, ImageError, SettingError
from bottega.generation import ScriptedGenerator
from bottega.parsing import LabelParser
from bottega.pipeline import FixedRouter, Pipeline, QueryInput
from bottega.prompting import InterleavedPrompter
from bottega.protocols import Tier
from bottega.reranking import TopKReranker
from bottega.types import (
    IMAGE_QUESTION,
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
from tests.builders import QUESTION, candidates, solid_image

QUERY = Query(QUESTION, (solid_image(500),))


class Steps:
    """Pipeline parts that record the order of their calls."""

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


async def test_choices_of_the_query_take_precedence() -> None:
    trace = await Steps().pipeline().trace(Query("?", choices=("x", "y")))
    assert trace.query.choices == ("x", "y")
    assert not trace.answer.valid


async def test_without_shots_nothing_is_retrieved() -> None:
    steps = Steps()
    single = Pipeline(
        route=FixedRouter(Tier("single", steps.model)),
        retrieve=steps.retrieve,
        prompt=InterleavedPrompter(),
        parse=LabelParser(),
    )
    trace = await single.trace(QUERY)
    assert (steps.taken, trace.candidates, trace.cost_usd) == ([], (), None)


async def test_without_a_reranker_the_nearest_are_shown() -> None:
    steps = Steps()
    plain = Pipeline(
        route=FixedRouter(Tier("small", steps.model, shots=3)),
        retrieve=steps.retrieve,
        prompt=InterleavedPrompter(),
        parse=LabelParser(),
    )
    assert [c.example.answer for c in (await plain.trace(QUERY)).candidates] == list("abc")


async def test_without_a_reranker_no_more_than_the_shots_are_shown() -> None:
    steps = Steps()
    plain = Pipeline(
        route=FixedRouter(Tier("small", steps.model, shots=2)),
        retrieve=steps.retrieve,
        prompt=InterleavedPrompter(),
        parse=LabelParser(),
        fetch=5,
    )
    trace = await plain.trace(QUERY)
    assert steps.taken == ["retrieve 5"]
    assert [c.example.answer for c in trace.candidates] == ["a", "b"]
    assert len(trace.prompt.messages) == 5  # two messages a demonstration, and the query


def test_answer_sync_works_repeatedly() -> None:
    pipeline = Steps().pipeline()
    assert [pipeline.answer_sync(QUERY).text for _ in range(3)] == ["b", "b", "b"]


async def test_sync_methods_work_inside_a_running_loop() -> None:
    steps = Steps()
    pipeline = steps.pipeline()
    assert pipeline.answer_sync(QUERY).text == "b"
    assert [pipeline.trace_sync(QUERY)] == steps.traces[1:]
    assert [answer.text for answer in pipeline.answer_batch_sync([QUERY, QUERY])] == ["b", "b"]


def test_sync_methods_work_from_several_threads() -> None:
    pipeline = echo_pipeline()
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda i: pipeline.answer_sync(Query(f"word{i}")), range(40)))
    assert [answer.text for answer in answers] == [f"word{i}" for i in range(40)]


def test_a_sync_method_inside_a_part_of_the_pipeline_is_an_error() -> None:
    inner = Steps().pipeline()

    async def route(query: Query, /) -> Tier:
        inner.answer_sync(query)
        return Tier("unreachable", inner_model)

    inner_model = ScriptedGenerator(["a"])
    with pytest.raises(SettingError, match="inside its own event loop"):
        replace(inner, route=route).answer_sync(QUERY)


def echo_pipeline(latency: float = 0.001) -> Pipeline:
    model = ScriptedGenerator(lambda prompt: str(prompt.messages[-1].parts[-1]), latency=latency)
    return Pipeline(
        route=FixedRouter(Tier("echo", model)), prompt=InterleavedPrompter(), parse=LabelParser()
    )


@pytest.mark.parametrize("form", ["path", "text", "image", "pil"])
async def test_an_image_is_a_query_with_the_default_question(form: str, tmp_path: Path) -> None:
    image = solid_image(500)
    path = tmp_path / "photo.png"
    path.write_bytes(image.data)
    forms: dict[str, QueryInput] = {
        "path": path,
        "text": str(path),
        "image": image,
        "pil": image.decode(),
    }
    trace = await Steps().pipeline().trace(forms[form])
    assert trace.query == Query(IMAGE_QUESTION, (image,), choices=("a", "b"))


async def test_the_pipelines_question_is_used_for_an_image() -> None:
    pipeline = replace(Steps().pipeline(), question="Which letter is it?")
    assert (await pipeline.trace(solid_image(500))).query.text == "Which letter is it?"


@pytest.mark.parametrize("text", ["Which pet?", "missing.jpg", "", "a\0b", "x" * 5000, "."])
async def test_a_text_that_is_no_image_file_is_an_error(text: str) -> None:
    with pytest.raises(SettingError, match="must be the path of an image file") as caught:
        await Steps().pipeline().answer(text)
    assert "Query(" in caught.value.hint
    assert ("does not exist" in str(caught.value)) == (text != ".")


@pytest.mark.parametrize("given", [b"bytes", None, 3, ["a"]])
async def test_another_type_is_an_error(given: Any) -> None:
    with pytest.raises(SettingError, match=f"got {type(given).__name__}"):
        await Steps().pipeline().answer(given)


async def test_a_batch_keeps_the_order_of_the_queries() -> None:
    async def route(query: Query, /) -> Tier:
        await asyncio.sleep(0.02 if query.text == "word0" else 0)
        return await plain.route(query)

    plain = echo_pipeline()
    words = [f"word{i}" for i in range(20)]
    answers = await replace(plain, route=route).answer_batch(Query(word) for word in words)
    assert [answer.text for answer in answers] == words


async def test_a_batch_limits_its_concurrency() -> None:
    active = most = 0

    async def route(query: Query, /) -> Tier:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0.001)
        active -= 1
        return await plain.route(query)

    plain = echo_pipeline()
    pipeline = replace(plain, route=route)
    await pipeline.answer_batch([Query("a")] * 12, concurrency=3)
    assert most == 3


async def test_a_failed_query_of_a_batch_keeps_the_other_answers(tmp_path: Path) -> None:
    missing = tmp_path / "missing.png"
    with pytest.raises(BatchError, match="1 of 3 queries failed, the first at index 1") as caught:
        await echo_pipeline().answer_batch([Query("a"), missing, Query("c")], concurrency=1)
    texts = [answer and answer.text for answer in caught.value.answers]
    assert texts == ["a", None, "c"]
    assert [type(error) for error in caught.value.errors.values()] == [ImageError]
    assert caught.value.__cause__ is caught.value.errors[1]


async def test_a_batch_of_no_queries_has_no_answers() -> None:
    assert await echo_pipeline().answer_batch([], progress=True) == []


async def test_a_batch_rejects_a_single_path_and_no_concurrency() -> None:
    with pytest.raises(SettingError, match="queries must be a list"):
        await echo_pipeline().answer_batch("photo.jpg")
    with pytest.raises(SettingError, match="concurrency must be at least 1, got 0"):
        await echo_pipeline().answer_batch([], concurrency=0)


@pytest.mark.parametrize("shown", [True, False])
def test_progress_is_written_to_standard_error(
    shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    echo_pipeline().answer_batch_sync([Query("a"), Query("b")], progress=shown)
    written = capsys.readouterr()
    assert written.out == ""
    assert ("2/2" in written.err) == shown


def test_a_callback_receives_the_progress_of_a_batch() -> None:
    counts: list[int] = []
    echo_pipeline().answer_batch_sync([Query("a"), Query("b")], progress=counts.append)
    assert counts == [1, 1]


async def test_concurrent_queries_do_not_mix() -> None:
    model = ScriptedGenerator(lambda prompt: str(prompt.messages[-1].parts[-1]), latency=0.001)
    pipeline = Pipeline(
        route=FixedRouter(Tier("echo", model)),
        rerank=TopKReranker(),
        prompt=InterleavedPrompter(),
        parse=LabelParser(),
    )
    answers = await asyncio.gather(*(pipeline.answer(Query(f"word{i}")) for i in range(50)))
    assert [answer.text for answer in answers] == [f"word{i}" for i in range(50)]


async def test_an_insufficient_answer_escalates_to_the_next_tier() -> None:
    small, large = ScriptedGenerator(["a"], name="small"), ScriptedGenerator(["b"], name="large")
    tiers = (Tier("apprentice", small), Tier("master", large, sampling=Sampling(max_tokens=99)))

    async def unsure(query: Query, tier: Tier, answer: Answer, /) -> Tier | None:
        return tiers[1] if answer.text == "a" else None

    steps = Steps()
    pipeline = replace(steps.pipeline(), route=FixedRouter(tiers[0]), escalate=unsure)
    trace = await pipeline.trace(QUERY)
    assert (trace.tier, trace.answer.text) == ("master", "b")
    assert [reply.model for reply in trace.dismissed] == ["small"]
    assert large.calls[0].sampling.max_tokens == 99
    assert trace.cost_usd is None  # the price of the large model is unknown
    free = replace(pipeline, price=lambda model, usage: 0.25, tiers=tiers)
    small, large = ScriptedGenerator(["a"]), ScriptedGenerator(["b"])
    tiers = (Tier("apprentice", small), Tier("master", large))
    assert (await replace(free, route=FixedRouter(tiers[0])).trace(QUERY)).cost_usd == 0.5


async def test_a_tier_can_have_its_own_prompt() -> None:
    model = ScriptedGenerator(["a"])
    tier = Tier("master", model, prompt=InterleavedPrompter(show_choices=False))
    await replace(Steps().pipeline(), route=FixedRouter(tier)).trace(QUERY)
    assert model.calls[0].prompt.messages[-1].parts[-1] == QUESTION


class SecondCandidateSearch:
    """Search that shows the second candidate and records its arguments."""

    def __init__(self) -> None:
        self.given: list[tuple[int, int]] = []

    async def search(self, query: Query, found: Sequence[Candidate], k: int, /) -> SearchResult:
        self.given.append((len(found), k))
        prompt = InterleavedPrompter()(query, found[1:2])
        reply = Reply("small", (Completion("b"),), Usage(10, 1))
        tree = SearchTree(SearchNode(), (0,), "rollouts", requests=3, calls=7, usage=Usage(100, 7))
        return SearchResult(tuple(found[1:2]), prompt, reply, Answer("b"), tree)


async def test_a_search_answers_and_all_its_requests_are_priced() -> None:
    steps, search = Steps(), SecondCandidateSearch()
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


async def test_a_tier_without_demonstrations_skips_the_search() -> None:
    steps, search = Steps(), SecondCandidateSearch()
    bare = Tier("bare", steps.model)
    trace = await replace(steps.pipeline(), route=FixedRouter(bare), search=search).trace(QUERY)
    assert (search.given, trace.tree) == ([], None)
