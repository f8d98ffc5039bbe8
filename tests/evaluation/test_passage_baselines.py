from __future__ import annotations

import orjson
import pytest
from aiohttp import web

from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.planning import check_benchmark_fit, needs_search, plan
from bottega.evaluation.outcomes import Method
from bottega.evaluation.runs.runner import evaluate
from bottega.generation import OpenAIGenerator, bundled
from bottega.knowledge import KnowledgeBase
from bottega.protocols import Generator
from bottega.recipes import Classifier
from bottega.types import Sampling
from tests.server import Server, reply


@pytest.fixture(scope="module")
def facts() -> Benchmark:
    return load_benchmark("facts", seed=0, limit=5)


def planned_method(name: str, data: Benchmark, generator: Generator) -> Method:
    settings = Classifier(generator, (), sampling=Sampling(max_tokens=16))
    with KnowledgeBase.open(":memory:", embed=None) as empty:
        return plan(RunConfig(methods=[name], shots=(5,)), data, empty, settings)[0]


@pytest.mark.slow
async def test_bundled_model_answers_from_single_passages(facts: Benchmark) -> None:
    result, scored = await evaluate(
        facts, planned_method("candidates", facts, bundled()), RunConfig()
    )

    assert (result.value or 0) >= 0.5
    assert [answer.calls for answer in scored] == [5] * 8
    assert (
        min(answer.prompt_tokens for answer in scored) > 5 * 16
    )  # each call includes the question


@pytest.mark.slow
async def test_reused_passages_match_concat(facts: Benchmark) -> None:
    """The bundled model's passages barely attend to each other."""
    runs = [planned_method(name, facts, bundled()) for name in ("concat", "kv-reuse")]
    shown, reused = [await method.answer(facts.items[0].query) for method in runs]
    result, scored = await evaluate(facts, runs[1])

    assert shown.trace is not None and reused.trace is not None
    assert shown.trace.candidates == reused.trace.candidates
    assert len(reused.trace.prompt.messages) == 1  # no passage is read again
    assert (result.value or 0) >= 0.7
    assert max(answer.prompt_tokens for answer in scored) < shown.trace.usage.prompt_tokens / 3


async def test_kv_reuse_over_http_is_rejected_before_any_request(
    facts: Benchmark, endpoint: Server
) -> None:
    with pytest.raises(SettingError, match="cannot be sent over HTTP") as raised:
        planned_method("kv-reuse", facts, OpenAIGenerator("m", base_url=endpoint.url))
    assert "TransformersGenerator" in raised.value.hint and not endpoint.bodies


async def test_log_probabilities_are_requested(facts: Benchmark, endpoint: Server) -> None:
    async def last_word(request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        first = body["messages"][0]["content"][0]["text"]  # the passage
        message = {"role": "assistant", "content": first.split()[-1]}
        logprobs = {"content": [{"token": "a", "logprob": -1.0}]} if body.get("logprobs") else None
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": logprobs}
        return await reply({"choices": [choice], "usage": {"prompt_tokens": 9}})(request)

    endpoint.answers = [last_word]
    model = OpenAIGenerator("m", base_url=endpoint.url)
    outcome = await planned_method("candidates", facts, model).answer(facts.items[0].query)
    await model.aclose()

    assert all(body["logprobs"] is True for body in endpoint.bodies)
    assert outcome.trace is not None and outcome.trace.tree is not None
    nodes = outcome.trace.tree.root.children
    scores = [node.candidate.score for node in nodes if node.candidate]
    best = outcome.trace.candidates[0]
    assert len(nodes) == 5 and best.score == max(scores)  # all answers are equally likely


def test_passage_baselines_need_passages_but_no_search(facts: Benchmark) -> None:
    digits = load_benchmark("digits", seed=0, limit=5)

    assert not needs_search(("candidates", "kv-reuse"), facts)
    with pytest.raises(SettingError, match="candidates, kv-reuse need passages"):
        check_benchmark_fit(RunConfig(methods=("candidates", "kv-reuse")), digits)
