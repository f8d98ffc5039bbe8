from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import pytest

from bottega.errors import SettingError
from bottega.generation import ScriptedGenerator
from bottega.parsing import LabelParser
from bottega.pipeline import FixedRouter, Pipeline
from bottega.prompting import InterleavedPrompter
from bottega.protocols import Generator, Tier
from bottega.recording.stored_traces import stored_tree
from bottega.reranking import JointChoiceSearch
from bottega.reranking.flat_search import log_softmax
from bottega.types import (
    Candidate,
    Completion,
    Example,
    Prompt,
    Query,
    Reply,
    Sampling,
    SearchNode,
    SearchTree,
    Usage,
)

QUERY = Query("What is its home?")


class LogprobGenerator:
    """Says the last word of the passage that it is shown, as surely as `logprobs` has it."""

    name = "sure"

    def __init__(
        self, logprobs: Mapping[str, float | None], spoilt: Mapping[str, Completion] | None = None
    ) -> None:
        self.logprobs, self.seen = logprobs, list[tuple[Prompt, Sampling]]()
        self.spoilt = spoilt or {}
        self.most_at_once = self._at_once = 0

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        self.seen.append((prompt, sampling))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(0)
        self._at_once -= 1
        *shown, _ = [str(message.parts[0]) for message in prompt.messages]
        answer = shown[-1].split()[-1] if shown else "unknown"
        given = self.spoilt.get(answer) or Completion(answer, logprob=self.logprobs.get(answer))
        return Reply(self.name, (given,) * sampling.n, Usage(10, 2))

    async def aclose(self) -> None: ...


def passages(*scored: tuple[str, float]) -> list[Candidate]:
    return [Candidate(Example(Query(text), "", id=text), score) for text, score in scored]


def choosing(generator: Generator, temperature: float = 1.0) -> JointChoiceSearch:
    return JointChoiceSearch(
        generator, prompt=InterleavedPrompter(), parse=LabelParser(), temperature=temperature
    )


FOUND = passages(("it is red", 2.0), ("it is blue", 1.0), ("it is green", 0.0))
# Of 1, 1/e and 1/e^2.
SHARES = [-math.log(1 + math.exp(-1) + math.exp(-2)) - i for i in range(3)]


def children(tree: SearchTree | None) -> tuple[SearchNode, ...]:
    assert tree is not None
    return tree.root.children


async def test_joint_probability_is_a_product() -> None:
    model = LogprobGenerator({"red": -3.0, "blue": -1.5, "green": -0.25})

    found = await choosing(model).search(QUERY, FOUND, 3)

    joint = [share + answer for share, answer in zip(SHARES, (-3.0, -1.5, -0.25), strict=True)]
    assert [node.value for node in children(found.tree)] == pytest.approx(joint)
    assert found.answer.text == "green"  # -2.25 less the sum, and -3 and -2.5
    assert [one.example.id for one in found.shown] == ["it is green"]
    assert found.reply.completions[0].text == "green"
    assert len(found.prompt.messages) == 2


async def test_the_tree_holds_every_candidate_with_its_answer() -> None:
    found = await choosing(LogprobGenerator({"red": -3.0, "blue": -1.5, "green": -0.25})).search(
        QUERY, FOUND, 3
    )

    nodes, tree = children(found.tree), found.tree
    assert tree is not None
    assert [node.candidate for node in nodes] == FOUND
    assert [node.answer.text for node in nodes if node.answer] == ["red", "blue", "green"]
    assert nodes[1].rewards == pytest.approx({"log retrieval": SHARES[1], "log answer": -1.5})
    assert (tree.path, tree.ended) == ((2,), "exhausted")
    assert (tree.requests, tree.calls, tree.usage) == (3, 3, Usage(30, 6))


async def test_a_trace_counts_all_candidates() -> None:
    model = LogprobGenerator({"red": -3.0, "blue": -1.5, "green": -0.25})

    async def retrieve(query: Query, k: int, /) -> list[Candidate]:
        return FOUND[:k]

    pipeline = Pipeline(
        FixedRouter(Tier("sure", model, 2)),
        InterleavedPrompter(),
        LabelParser(),
        retrieve,
        search=choosing(model),
        price=lambda name, usage: usage.prompt_tokens / 10,
    )

    trace = await pipeline.trace(QUERY)

    assert (trace.calls, trace.usage, trace.cost_usd) == (2, Usage(20, 4), 2.0)
    assert trace.tree is not None and len(stored_tree(trace.tree).demonstrations) == 2


async def test_candidates_are_requested_concurrently() -> None:
    model = LogprobGenerator({"red": -1.0, "blue": -1.0, "green": -1.0})
    several = JointChoiceSearch(
        model,
        prompt=InterleavedPrompter(),
        parse=LabelParser(),
        sampling=Sampling(n=4, max_tokens=7),
    )

    await several.search(QUERY, FOUND, 3)

    assert model.most_at_once == 3
    assert [sampling for _, sampling in model.seen] == [Sampling(max_tokens=7)] * 3


@pytest.mark.parametrize(("temperature", "answer"), [(1.0, "red"), (10.0, "green")])
async def test_scores_of_another_scale_are_brought_to_one(temperature: float, answer: str) -> None:
    """Sums of late interaction lie some nats apart though the passages are nearly as good."""
    found = passages(("it is red", 24.0), ("it is green", 20.0))

    chosen = await choosing(LogprobGenerator({"red": -2.0, "green": -0.5}), temperature).search(
        QUERY, found, 2
    )

    assert chosen.answer.text == answer


def test_huge_and_tiny_scores_have_a_softmax() -> None:
    assert log_softmax([1e6, 1e6 - 1]) == pytest.approx([-0.3132617, -1.3132617])
    assert log_softmax([-1e6]) == [0.0]
    assert sum(map(math.exp, log_softmax([0.1, 0.2, -700.0, 55.0]))) == pytest.approx(1)


async def test_the_nearest_of_equals_is_taken() -> None:
    found = passages(("it is red", 1.0), ("it is green", 1.0), ("it is blue", 1.0))

    chosen = await choosing(LogprobGenerator({"red": -2.0, "green": -1.0, "blue": -1.0})).search(
        QUERY, found, 3
    )

    assert chosen.answer.text == "green"


async def test_single_candidate_wins_with_any_probability() -> None:
    found = await choosing(LogprobGenerator({"red": -50.0})).search(QUERY, FOUND, 1)

    assert found.answer.text == "red"
    assert [node.value for node in children(found.tree)] == [-50.0]


async def test_without_candidates_the_model_has_no_prefix() -> None:
    found = await choosing(LogprobGenerator({})).search(QUERY, [], 5)

    assert (found.answer.text, found.shown, found.tree) == ("unknown", (), None)


async def test_a_model_without_log_probabilities_is_refused_with_a_hint() -> None:
    with pytest.raises(SettingError, match="must return log probabilities, got none") as refused:
        await choosing(ScriptedGenerator(lambda prompt: "red")).search(QUERY, FOUND, 3)
    assert "logprobs" in refused.value.hint


async def test_answer_without_log_probability_is_recorded_but_ignored() -> None:
    found = await choosing(LogprobGenerator({"red": None, "blue": -9.0})).search(QUERY, FOUND, 2)

    assert found.answer.text == "blue"
    first = children(found.tree)[0]
    assert math.isnan(first.value) and first.answer is not None and first.answer.text == "red"


@pytest.mark.parametrize("score", [math.nan, math.inf])
async def test_scores_without_a_scale_are_refused(score: float) -> None:
    with pytest.raises(SettingError, match="not a finite number"):
        await choosing(LogprobGenerator({})).search(QUERY, passages(("it is red", score)), 1)


@pytest.mark.parametrize(
    "spoilt",
    [
        Completion("red and", "length", -0.01),
        Completion("", "stop", 0.0),
        Completion("", "content_filter", 0.0),
        Completion("I must not say", "refusal", -0.01),
        Completion("red", "stop", math.inf),
        Completion("red", "stop", 3.0),
        Completion("red", "stop", -math.inf),
    ],
)
async def test_complete_answer_precedes_incomplete_ones(spoilt: Completion) -> None:
    model = LogprobGenerator({"blue": -2.0}, {"red": spoilt})

    assert (await choosing(model).search(QUERY, FOUND, 2)).answer.text == "blue"


async def test_likeliest_truncated_answer_wins() -> None:
    cut = {
        "red": Completion("r", "length", -3.0),
        "blue": Completion("b", "length", -0.1),
    }
    assert (await choosing(LogprobGenerator({}, cut)).search(QUERY, FOUND, 2)).answer.text == "b"


async def test_rounding_above_zero_is_certainty() -> None:
    found = await choosing(LogprobGenerator({"red": 1e-5, "blue": -3.0})).search(QUERY, FOUND, 2)

    assert found.answer.text == "red"


async def test_log_probability_above_0_is_an_error() -> None:
    with pytest.raises(SettingError, match=r"must return log probabilities, got 3\.0"):
        await choosing(LogprobGenerator({"red": 3.0})).search(QUERY, FOUND, 1)


@pytest.mark.parametrize(("least", "temperature"), [(0.0, 1e-5), (-1e308, 1.0)])
async def test_scores_that_overflow_are_refused(least: float, temperature: float) -> None:
    found = passages(("it is red", 1e308), ("it is blue", least))
    with pytest.raises(SettingError, match="too large for a temperature of"):
        await choosing(LogprobGenerator({"red": -1.0, "blue": -1.0}), temperature).search(
            QUERY, found, 2
        )


@pytest.mark.parametrize("temperature", ["x", None, True])
def test_non_numeric_temperature_is_an_error(temperature: Any) -> None:
    with pytest.raises(SettingError, match="temperature must be a finite number above 0, got"):
        choosing(ScriptedGenerator([]), temperature)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_zero_temperature_is_an_error(temperature: float) -> None:
    with pytest.raises(SettingError, match="temperature"):
        choosing(ScriptedGenerator([]), temperature)
