from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from bottega.errors import EndpointTimeoutError, GarbledError, RejectedError, UnreachableError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.metrics.metric import MacroF1
from bottega.evaluation.outcomes import Method, Outcome, ScoredAnswer
from bottega.evaluation.runs.runner import evaluate
from bottega.generation import ScriptedGenerator
from bottega.pipeline import Pipeline
from bottega.recipes import Classifier
from bottega.types import Answer, Query
from tests.builders import example

ITEMS = tuple(example("ab"[i % 2], i) for i in range(10))
BENCHMARK = Benchmark("letters", ITEMS[:1], ITEMS, ("a", "b"))


async def always_a(query: Query) -> Outcome:
    return Outcome(Answer("a", labels=("a",)))


async def test_every_item_is_counted_and_scored() -> None:
    result, scored = await evaluate(BENCHMARK, Method("m", 3, always_a), RunConfig(concurrency=4))
    assert (result.n, result.value, result.invalid, result.failed) == (10, 0.5, 0, 0)
    assert [s.item for s in scored] == list(ITEMS)
    assert (result.method, result.shots, result.metric, result.calls) == ("m", 3, "accuracy", 0)


async def test_invalid_reply_is_wrong_and_counted() -> None:
    async def invalid(query: Query) -> Outcome:
        return Outcome(Answer("a", valid=False, labels=("a",)))

    result, _ = await evaluate(BENCHMARK, Method("m", 0, invalid), RunConfig(concurrency=4))
    assert (result.n, result.value, result.invalid) == (10, 0.0, 10)


async def test_failed_request_is_counted_but_not_scored() -> None:
    failing = {ITEMS[0].query, ITEMS[1].query}

    async def sometimes(query: Query) -> Outcome:
        if query in failing:
            raise EndpointTimeoutError("too slow")
        return await always_a(query)

    result, _ = await evaluate(BENCHMARK, Method("m", 0, sometimes), RunConfig(concurrency=2))
    assert (result.n, result.failed, result.value) == (8, 2, 0.5)


@pytest.mark.parametrize("error", [UnreachableError("dead"), RejectedError("bad key", status=401)])
async def test_permanent_error_stops_the_run(error: Exception) -> None:
    calls = 0

    async def failing(query: Query) -> Outcome:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0)
        raise error

    with pytest.raises(type(error)):
        await evaluate(BENCHMARK, Method("m", 0, failing), RunConfig(concurrency=1))
    assert calls < len(ITEMS)


async def test_web_pages_stop_a_run_without_answers() -> None:
    page = GarbledError("sent a web page, not JSON")
    page.retryable = False
    scripts: list[list[str | Exception]] = [[page, "a"] * 5, ["a", page] * 5]
    for script in scripts:
        model = ScriptedGenerator(script)
        pipeline = Classifier(model, ["a", "b"]).pipeline()
        method = Method("m", 0, partial(traced, pipeline))
        result, _ = await evaluate(BENCHMARK, method, RunConfig(concurrency=1))
        assert (result.n, result.failed) == (5, 5)
    model = ScriptedGenerator([page] * 10)
    method = Method("m", 0, partial(traced, Classifier(model, ["a"]).pipeline()))
    with pytest.raises(GarbledError):
        await evaluate(BENCHMARK, method, RunConfig(concurrency=3))
    assert len(model.calls) < 10


async def traced(pipeline: Pipeline, query: Query) -> Outcome:
    trace = await pipeline.trace(query)
    return Outcome(trace.answer, trace)


async def test_concurrency_is_limited_and_progress_is_reported() -> None:
    running, most, steps = 0, 0, 0

    async def slow(query: Query) -> Outcome:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return await always_a(query)

    def done(scored: ScoredAnswer | None) -> None:
        nonlocal steps
        steps += 1

    await evaluate(BENCHMARK, Method("m", 0, slow), RunConfig(concurrency=3), done=done)
    assert (most, steps) == (3, 10)


async def test_true_shows_a_bar_and_a_callback_gets_the_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers: list[ScoredAnswer | None] = []
    method, counts = Method("m", 5, always_a), list[int]()
    await evaluate(BENCHMARK, method, done=answers.append, progress=True)
    written = capsys.readouterr()
    assert (written.out, "m 5" in written.err, "10/10" in written.err) == ("", True, True)
    await evaluate(BENCHMARK, method, progress=counts.append)
    assert (len(answers), counts) == (10, [1] * 10)
    assert capsys.readouterr().err == ""


async def test_multi_label_items_are_scored_by_macro_f1() -> None:
    multi_label = replace(BENCHMARK, metrics=(MacroF1(("a", "b")),))
    result, _ = await evaluate(multi_label, Method("m", 0, always_a), RunConfig(concurrency=4))
    assert result.metric == "macro_f1"
    assert result.value == pytest.approx((2 / 3 + 0) / 2)
    assert result.low is not None and result.high is not None
    assert result.low <= 1 / 3 <= result.high


async def test_no_answers_means_no_value() -> None:
    async def failing(query: Query) -> Outcome:
        raise EndpointTimeoutError("too slow")

    result, _ = await evaluate(BENCHMARK, Method("m", 0, failing), RunConfig(concurrency=2))
    assert (result.n, result.failed, result.value, result.low) == (0, 10, None, None)


async def test_calibration_error_is_an_additional_metric() -> None:
    async def confident(query: Query) -> Outcome:
        return Outcome(Answer("a", labels=("a",), confidence=0.9))

    result, _ = await evaluate(BENCHMARK, Method("m", 0, confident))
    [error] = result.also
    assert error.metric.startswith("ece")
    assert error.value == pytest.approx(0.4)
    assert error.low <= error.value <= error.high
    unsure, _ = await evaluate(BENCHMARK, Method("m", 0, always_a))
    assert unsure.also == ()
