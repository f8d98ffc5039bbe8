from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from bottega.errors import GenerationError, SettingError
from bottega.generation import ScriptedGenerator
from bottega.parsing import LabelParser, equal_answers
from bottega.prompting import InterleavedPrompter
from bottega.reranking import (
    BudgetedGenerator,
    FlatSearch,
    MutualReward,
    RewardFunction,
    RewardValue,
    SelfConsistencyReward,
    TreeSearch,
    WeightedReward,
    exact_agreement,
)
from bottega.types import Answer, Candidate, Example, Message, Prompt, Query, Reply, Sampling
from tests.builders import candidates

QUERY = Query("q", choices=("cat", "dog"))
SAID = Answer("cat", labels=("cat",), rationale="It purrs.")
BARE = replace(SAID, rationale=None)
INVALID = Answer("?", valid=False, rationale="It purrs.")
CANDIDATES = candidates("cat", "dog", "cat", "dog")
PARSE = LabelParser()


def reminded(query: Query, rationale: str) -> Prompt:
    return Prompt((Message("user", (f"{query.text} {rationale}",)),))


def storable_text(prompt: Prompt) -> str:
    return "|".join(
        part for message in prompt.messages for part in message.parts if isinstance(part, str)
    )


def own(**settings: object) -> SelfConsistencyReward:
    return SelfConsistencyReward(reminded, PARSE, **settings)  # type: ignore[arg-type]


def mutual(**settings: object) -> MutualReward:
    return MutualReward(InterleavedPrompter(), PARSE, **settings)  # type: ignore[arg-type]


async def test_self_consistency_is_the_share_of_agreeing_samples() -> None:
    model = ScriptedGenerator(["cat", "dog", "nonsense", "Cat", "cat"])
    result = await own()(QUERY, SAID, CANDIDATES, BudgetedGenerator(model))
    assert result == RewardValue(3 / 5, {"self": 3 / 5})
    (call,) = model.calls
    assert storable_text(call.prompt) == "q It purrs."
    assert (call.sampling.n, call.sampling.temperature) == (5, 0.8)


async def test_self_consistency_is_unavailable_without_rationale() -> None:
    model = ScriptedGenerator([])
    assert await own()(QUERY, BARE, CANDIDATES, BudgetedGenerator(model)) == RewardValue(
        available=False
    )
    released = own(variant="released")
    assert await released(QUERY, BARE, CANDIDATES, BudgetedGenerator(model)) == RewardValue(
        0, {"self": 0}
    )


async def test_mutual_reward_is_the_share_of_correct_labels() -> None:
    model = ScriptedGenerator(["cat", "cat", "nonsense"])
    result = await mutual(n=3)(QUERY, SAID, CANDIDATES, BudgetedGenerator(model))
    assert result == RewardValue(1 / 3, {"mutual": 1 / 3})
    assert [call.sampling.n for call in model.calls] == [1, 1, 1]
    assert len({call.prompt for call in model.calls}) == 3
    for call, one in zip(model.calls, CANDIDATES, strict=False):
        requested = call.prompt.messages
        assert [message.role for message in requested] == ["user", "assistant", "user"]
        assert requested[0].parts == ("q",)
        assert requested[1].parts == ("It purrs.\nAnswer: cat",)
        assert requested[2].parts[0] == one.example.query.images[0]
        assert "- cat\n- dog" in str(requested[2].parts[1])


async def test_released_variant_samples_each_labelled_question_five_times() -> None:
    model = ScriptedGenerator(["cat", "cat", "cat", "dog", "dog"] + ["dog"] * 5)
    result = await mutual(n=2, variant="released")(
        QUERY, SAID, CANDIDATES, BudgetedGenerator(model)
    )
    assert result.value == pytest.approx((3 / 5 + 1) / 2)
    assert [call.sampling.n for call in model.calls] == [5, 5]
    assert (
        await mutual(n=1, samples=2)(
            QUERY, SAID, CANDIDATES, BudgetedGenerator(ScriptedGenerator(["cat"] * 2))
        )
    ).value


async def test_gold_answer_equal_to_an_option_is_a_label() -> None:
    gold: list[Answer] = []

    def agree(one: Answer, other: Answer, query: Query, /) -> float:
        gold.append(other)
        return float(one.labels == other.labels)

    result = await mutual(agree=agree)(
        QUERY, SAID, CANDIDATES, BudgetedGenerator(ScriptedGenerator(["cat"] * 4))
    )
    assert result.value == 0.5
    assert sorted(one.labels for one in gold) == [("cat",)] * 2 + [("dog",)] * 2
    gold.clear()
    bird = Candidate(Example(Query("q"), "bird"), 1.0)
    await mutual(agree=agree)(QUERY, SAID, [bird], BudgetedGenerator(ScriptedGenerator(["cat"])))
    assert [(one.text, one.labels) for one in gold] == [("bird", ())]


async def test_mutual_reward_skips_passages() -> None:
    passage = Candidate(Example(Query("Cats purr."), ""), 2.0)
    model = ScriptedGenerator(["cat"])
    result = await mutual(n=1)(QUERY, SAID, [passage, *CANDIDATES], BudgetedGenerator(model))
    assert result.value == 1
    assert await mutual()(
        QUERY, SAID, [passage], BudgetedGenerator(ScriptedGenerator([]))
    ) == RewardValue(available=False)


async def test_questions_keep_their_own_choices_and_open_ones_stay_open() -> None:
    fruit = Query("Which fruit?", choices=("fig", "kiwi"))
    candidates = [
        Candidate(Example(fruit, "fig"), 1.0),
        Candidate(Example(Query("How many?"), "7"), 0.9),
        Candidate(Example(Query("Which?"), "dog, cat", ("dog", "cat")), 0.8),
    ]
    model = ScriptedGenerator(["fig", "7", "cat, dog"])
    parse = LabelParser(multi_label=True)
    result = await MutualReward(InterleavedPrompter(), parse)(
        QUERY, SAID, candidates, BudgetedGenerator(model)
    )
    assert result.value == 1
    requests = [storable_text(Prompt(call.prompt.messages[-1:])) for call in model.calls]
    assert ["kiwi" in one for one in requests] == [True, False, False]
    assert ["- dog" in one for one in requests] == [False, False, True]


@pytest.mark.parametrize(
    ("choices", "gold"),
    [
        (("B. subtilis", "E. coli", "A. niger"), "A. niger"),
        (("O", "A", "B", "AB"), "A"),
        (("The answer is red", "red"), "red"),
    ],
)
async def test_labels_equal_to_options_are_not_parsed_as_letters(
    choices: tuple[str, ...], gold: str
) -> None:
    query = Query("q", choices=choices)
    candidates = [Candidate(Example(query, gold), 1.0)]
    answer = Answer(choices[0], labels=choices[:1])
    for choice in choices:
        result = mutual(agree=equal_answers)(
            query, answer, candidates, BudgetedGenerator(ScriptedGenerator([choice]))
        )
        assert (await result).value == (choice == gold)


async def test_agreement_may_be_a_matter_of_degree() -> None:
    def half(one: Answer, other: Answer, query: Query) -> float:
        assert query == QUERY
        return 0.5

    model = ScriptedGenerator(["cat", "dog", "nonsense"])
    result = await own(n=3, agree=half)(QUERY, SAID, CANDIDATES, BudgetedGenerator(model))
    assert result.value == pytest.approx(1 / 3)


async def fixed_self(
    query: Query, answer: Answer, candidates: Sequence[Candidate], ask: BudgetedGenerator, /
) -> RewardValue:
    return RewardValue(1.0, {"self": 1.0})


async def fixed_mutual(
    query: Query, answer: Answer, candidates: Sequence[Candidate], ask: BudgetedGenerator, /
) -> RewardValue:
    return RewardValue(0.5, {"mutual": 0.5})


async def meaningless(
    query: Query, answer: Answer, candidates: Sequence[Candidate], ask: BudgetedGenerator, /
) -> RewardValue:
    return RewardValue(available=False)


@pytest.mark.parametrize(
    ("one", "other", "result"),
    [
        (fixed_self, fixed_mutual, RewardValue(0.6, {"self": 1.0, "mutual": 0.5})),
        (meaningless, fixed_mutual, RewardValue(0.5, {"mutual": 0.5})),
        (fixed_self, meaningless, RewardValue(1.0, {"self": 1.0})),
        (meaningless, meaningless, RewardValue(available=False)),
    ],
)
async def test_weighted(one: RewardFunction, other: RewardFunction, result: RewardValue) -> None:
    found = await WeightedReward(one, other)(
        QUERY, SAID, CANDIDATES, BudgetedGenerator(ScriptedGenerator([]))
    )
    assert found.value == pytest.approx(result.value)
    assert found.parts == result.parts


async def test_invalid_answer_has_zero_reward_without_requests() -> None:
    weighted = WeightedReward(own(), mutual())
    result = await weighted(QUERY, INVALID, CANDIDATES, BudgetedGenerator(ScriptedGenerator([])))
    assert result == RewardValue(0, {"self": 0, "mutual": 0})


class ConcurrencyCounter(ScriptedGenerator):
    """Generator that records the maximum number of concurrent requests."""

    now = most = 0

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        self.now += 1
        self.most = max(self.most, self.now)
        reply = await super().generate(prompt, sampling)
        self.now -= 1
        return reply


async def test_reward_probes_are_concurrent() -> None:
    model = ConcurrencyCounter(lambda prompt: "cat", latency=0.01)
    result = await WeightedReward(own(), mutual(n=4))(
        QUERY, SAID, CANDIDATES, BudgetedGenerator(model)
    )
    assert result.value == pytest.approx(0.2 * 1 + 0.8 * 0.5)
    assert model.most == len(model.calls) == 5


async def test_a_failing_endpoint_is_no_reward() -> None:
    for after in range(5):
        script = ["cat"] * (4 + after) + [GenerationError("the endpoint failed")]
        with pytest.raises(GenerationError):
            await WeightedReward(own(), mutual(n=4))(
                QUERY, SAID, CANDIDATES, BudgetedGenerator(ScriptedGenerator(script))
            )


def test_exact_agreement() -> None:
    several = Answer("a, b", labels=("a", "b"))
    assert exact_agreement(several, Answer("b, a", labels=("b", "a")), QUERY) == 1
    assert exact_agreement(several, Answer("a", labels=("a",)), QUERY) == 0
    assert exact_agreement(Answer("Red  car"), Answer("red car"), QUERY) == 1
    assert exact_agreement(Answer("red car"), Answer("red"), QUERY) == 0


def test_settings_that_cannot_work_are_refused() -> None:
    for wrong in (
        lambda: own(n=0),
        lambda: mutual(n=0),
        lambda: mutual(samples=0),
        lambda: WeightedReward(own(), mutual(), alpha=1.1),
    ):
        with pytest.raises(SettingError) as raised:
            wrong()
        assert raised.value.hint


async def bare(
    query: Query, answer: Answer, candidates: Sequence[Candidate], ask: BudgetedGenerator, /
) -> RewardValue:
    return RewardValue(1.0)


async def test_a_reward_without_parts_counts_as_any_other() -> None:
    weighted = WeightedReward(bare, fixed_mutual)
    result = await weighted(QUERY, SAID, CANDIDATES, BudgetedGenerator(ScriptedGenerator([])))
    assert result.value == pytest.approx(0.6)


@pytest.mark.parametrize(
    "wrong", [RewardValue(1.5), RewardValue(-0.1), RewardValue(math.nan), 0.5, None]
)
async def test_reward_of_wrong_type_is_an_error(wrong: object) -> None:
    async def reward(*requested: object) -> RewardValue:
        return wrong  # type: ignore[return-value]

    with pytest.raises(SettingError) as raised:
        await WeightedReward(reward, bare)(
            QUERY, SAID, CANDIDATES, BudgetedGenerator(ScriptedGenerator([]))
        )
    assert raised.value.hint
    tree = TreeSearch(
        ScriptedGenerator(["a", "b", "c"]), prompt=InterleavedPrompter(), parse=PARSE, reward=reward
    )
    with pytest.raises(SettingError):
        await tree.search(QUERY, CANDIDATES, 1)
    flat = FlatSearch(
        ScriptedGenerator(["a"]),
        prompt=InterleavedPrompter(),
        parse=PARSE,
        reward=reward,
        sequences="nearest",
        branches=1,
    )
    with pytest.raises(SettingError):
        await flat.search(QUERY, CANDIDATES, 1)


@pytest.mark.parametrize("kind", [own, mutual])
def test_an_unknown_variant_is_refused(kind: Callable[..., RewardFunction]) -> None:
    with pytest.raises(SettingError, match="variant"):
        kind(variant="oops")


@pytest.mark.parametrize(("alpha", "value"), [(0, 0.5), (1, 1.0)])
async def test_one_reward_can_have_all_the_weight(alpha: float, value: float) -> None:
    weighted = WeightedReward(bare, fixed_mutual, alpha=alpha)
    assert (
        await weighted(QUERY, SAID, CANDIDATES, BudgetedGenerator(ScriptedGenerator([])))
    ).value == pytest.approx(value)
    with pytest.raises(SettingError, match="alpha"):
        WeightedReward(bare, bare, alpha=-0.1)


@pytest.mark.parametrize("value", [0.0, 1.0])
async def test_rewards_of_0_and_1_are_valid(value: float) -> None:
    async def reward(*requested: object) -> RewardValue:
        return RewardValue(value)

    result = await WeightedReward(reward, reward)(
        QUERY, SAID, CANDIDATES, BudgetedGenerator(ScriptedGenerator([]))
    )
    assert result.value == value


def test_at_least_one_sample_is_required() -> None:
    assert own(n=1) and mutual(n=1, samples=1)
    with pytest.raises(SettingError, match="samples must be at least 1, got 0"):
        mutual(samples=0)


async def test_mutual_reward_can_be_the_mean_of_soft_scores() -> None:
    scores = {"cat": 0.9, "dog": 0.3}
    reward = mutual(score=lambda example, answer: scores[answer.text])
    model = ScriptedGenerator(["cat", "cat", "dog", "dog"])
    result = await reward(QUERY, SAID, CANDIDATES, BudgetedGenerator(model))
    assert result.value == result.parts["mutual"] == pytest.approx(0.6)
