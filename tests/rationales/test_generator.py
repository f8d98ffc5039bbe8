from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from bottega.errors import RejectedError, SettingError
from bottega.generation import ScriptedGenerator
from bottega.prompting import ConclusionPrompter, ExplanationPrompter
from bottega.rationales import RationaleGenerator, RationaleResult
from bottega.types import Answer, Completion, Example, Prompt, Query, Reply, Sampling, Usage
from tests.builders import solid_image

LABELLED = Example(Query("Which?", (solid_image(1),), ("left", "right")), "right", id="k")
ALL = ["B"] * 4


class RationaleModel:
    """Model with given rationales and predictions; an exception is raised. The rationale `cut` ends
    for `reason`."""

    name = "thinker"

    def __init__(
        self, said: Mapping[str, list[str] | Exception], cut: str = "", reason: str = "length"
    ) -> None:
        self.said, self.cut, self.reason = said, cut, reason
        self.predicted: list[str] = []
        self.samplings: list[Sampling] = []
        self.now = self.most_at_once = 0

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        self.samplings.append(sampling)
        if prompt == ExplanationPrompter()(LABELLED):
            texts = list(self.said)
        else:
            texts = await self._predict(prompt)
        ends = [self.reason if text == self.cut else "stop" for text in texts]
        return Reply(self.name, tuple(map(Completion, texts, ends)), Usage(10, 5, 1))

    async def _predict(self, prompt: Prompt) -> list[str]:
        (rationale,) = (
            one for one in self.said if prompt == ConclusionPrompter()(LABELLED.query, one)
        )
        self.predicted.append(rationale)
        self.now += 1
        self.most_at_once = max(self.most_at_once, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        found = self.said[rationale]
        if isinstance(found, Exception):
            raise found
        return found

    async def aclose(self) -> None:
        pass


def dollar(model: str, usage: Usage, /) -> float:
    return 1.0


async def made(thinker: RationaleModel, **settings: object) -> RationaleResult:
    options = {"candidates": len(thinker.said), "predictions": 4, "price": dollar} | settings
    return await RationaleGenerator(thinker, **options).make(LABELLED)  # type: ignore[arg-type]


async def test_the_first_candidate_with_the_best_score_wins() -> None:
    thinker = RationaleModel(
        {
            "a": ["B", "A", "A", "?"],
            "b": ["right", "(B)", "left", "So the answer is B."],
            "c": ["B", "B", "B", "A"],
            "d": ["A"] * 4,
        }
    )
    found = await made(thinker)
    assert (found.rationale, found.score, found.verified) == ("b", 0.75, 4)
    assert (found.requests, found.calls, found.cost_usd) == (5, 20, 5.0)
    assert found.usage == Usage(50, 25, 5)
    assert {(one.temperature, one.n) for one in thinker.samplings} == {(0.7, 4)}


async def test_candidates_and_predictions_take_one_request_each() -> None:
    thinker = RationaleModel({"a": ["A"] * 5, "b": ["B"] * 5, "c": ["A"] * 5})
    await made(thinker, candidates=3, predictions=5)
    assert [one.n for one in thinker.samplings] == [3, 5, 5, 5]


async def test_verification_stops_at_a_perfect_candidate() -> None:
    """Waves of 1, 2, 4: the other requests of a wave had started."""
    said = {name: ["A"] * 4 for name in "abcdefg"} | {"c": ALL}
    thinker = RationaleModel(said)
    found = await made(thinker)
    assert (found.rationale, found.verified) == ("c", 3)
    assert (thinker.predicted, thinker.most_at_once) == (["a", "b", "c"], 2)


async def test_without_stop_early_all_candidates_are_verified() -> None:
    thinker = RationaleModel(dict.fromkeys("abcde", ALL))
    found = await made(thinker, stop_early=False)
    assert (found.rationale, found.verified, thinker.most_at_once) == ("a", 5, 5)


async def test_candidates_without_correct_predictions_are_rejected() -> None:
    found = await made(RationaleModel({"a": ["A"] * 4, "b": ["?"] * 4}))
    assert (found.rationale, found.score, found.verified, found.error) == (None, 0.0, 2, None)


async def test_thinking_is_stripped_and_duplicates_are_verified_once() -> None:
    thinker = RationaleModel(
        {"<think>so": ALL, "": ALL, "cut": ALL, "a\0": ALL, "a": ["A"] * 4}, cut="cut"
    )
    found = await made(thinker)
    assert (thinker.predicted, found.verified) == (["a"], 1)
    twice = ScriptedGenerator(["x", " x ", "B"])
    one = await RationaleGenerator(twice, candidates=2, predictions=1).make(LABELLED)
    assert (one.rationale, one.verified) == ("x", 1)


async def test_no_complete_candidate_raises_with_the_option() -> None:
    found = await made(RationaleModel({"cut": ALL}, cut="cut"))
    assert found.rationale is None
    assert found.error is not None
    assert found.error.retryable
    assert "--max-tokens" in found.error.hint
    assert found.cost_usd == 1.0


@pytest.mark.parametrize("reason", ["content_filter", "refusal", "tool_calls"])
async def test_incomplete_candidates_are_dropped(reason: str) -> None:
    thinker = RationaleModel({"cut": ALL, "a": ALL}, cut="cut", reason=reason)
    assert (await made(thinker)).rationale == "a"
    assert thinker.predicted == ["a"]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (("cat", "dog"), "Answer: dog, cat."),
        (("cat", "dog"), "(A) and (B)"),
        (("cat", "dog"), "A, B"),
        (("cat", "dog"), "Answer: B, A"),
        ((), "Answer: None"),
    ],
)
async def test_several_labels_must_all_match(labels: tuple[str, ...], said: str) -> None:
    query = Query("What is shown?", choices=("cat", "dog", "bird"))
    labelled = Example(query, ", ".join(labels) or "none", labels=labels)
    for replies, score in (([said] * 2, 1.0), ([said, "Answer: bird"], 0.5), (["(A)", "cat"], 0)):
        model = ScriptedGenerator(["Look.", *replies])
        found = await RationaleGenerator(model, candidates=1, predictions=2).make(labelled)
        assert found.score == score
        assert "letters of all right choices" in str(model.calls[1].prompt.messages[-1].parts)


async def test_a_failed_request_gives_no_rationale_and_its_cost_counts() -> None:
    refused = RejectedError("no", status=400)
    thinker = RationaleModel({"a": ["A", "A", "B", "B"], "b": refused, "c": ALL})
    found = await made(thinker)
    assert (found.rationale, found.error) == (None, refused)
    assert (found.requests, found.cost_usd) == (3, 3.0)  # the request for c had started


async def test_the_maximum_cost_covers_all_candidates() -> None:
    def price(model: str, usage: Usage, /) -> float:
        prices.append(0.0)
        return 1.0 if len(prices) % 4 == 1 else 3.0

    prices: list[float] = []
    thinker = RationaleModel({"a": ALL, "b": ALL, "c": ALL})
    found = await made(thinker, price=price)
    assert (found.cost_usd, found.at_most_usd) == (4.0, 1 + 3 * 3)
    assert (await made(RationaleModel({"cut": ALL}, cut="cut"))).at_most_usd == 1.0


async def test_an_unknown_price_gives_no_cost() -> None:
    assert (await made(RationaleModel({"a": ALL}), price=None)).cost_usd is None


async def test_the_comparison_is_configurable() -> None:
    def half(said: Answer, labelled: Answer, query: Query) -> float:
        assert (labelled.text, labelled.labels, query) == ("right", ("right",), LABELLED.query)
        return 0.5 if said.text == "left" else 0.0

    found = await made(RationaleModel({"a": ["A"] * 4, "b": ALL}), compare=half)
    assert (found.rationale, found.score) == ("a", 0.5)


async def test_equal_numbers_in_other_notation_are_correct() -> None:
    labelled = Example(Query("How many?"), "12")
    thinker = ScriptedGenerator(["Count them.", "12.0", "13", "twelve", "a dozen"])
    rationales = RationaleGenerator(thinker, candidates=1, predictions=4)
    assert (await rationales.make(labelled)).score == 0.5


def test_a_turns_only_model_is_refused() -> None:
    brief = ScriptedGenerator(["x"], name="bundled:apprentice")
    brief.turns_only = True  # type: ignore[attr-defined]
    with pytest.raises(SettingError, match="bundled:apprentice answers in a word") as caught:
        RationaleGenerator(brief)
    assert "openai:" in caught.value.hint


async def test_fresh_predictions_are_those_of_the_kept_rationale_with_another_seed() -> None:
    model = RationaleModel({"a": ["A"] * 4, "b": ["B", "B", "A", "A"]})
    found = await made(model, fresh=8, sampling=Sampling(temperature=0.7, seed=3))
    assert (found.rationale, found.score, found.fresh_score) == ("b", 0.5, 0.5)
    assert model.predicted == ["a", "b", "b"]
    assert [one.n for one in model.samplings] == [2, 4, 4, 8]
    *selecting, fresh = (one.seed for one in model.samplings)
    assert fresh not in selecting
    # Writing, two verifications, and fresh predictions twice as many as one verifies.
    assert (found.requests, found.at_most_usd) == (4, 1 + 2 + 2)


async def test_fresh_predictions_need_a_kept_rationale() -> None:
    found = await made(RationaleModel({"a": ["A"] * 4}), fresh=4)
    assert (found.rationale, found.fresh_score, found.requests) == (None, None, 2)
