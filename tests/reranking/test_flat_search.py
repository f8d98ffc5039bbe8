from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bottega.errors import GenerationError, SettingError
from bottega.generation import ScriptedGenerator
from bottega.parsing import LabelParser
from bottega.prompting import InterleavedPrompter
from bottega.reranking import BudgetedGenerator, FlatSearch, RewardValue
from bottega.reranking.flat_search import Sequences
from bottega.types import Answer, Candidate, Prompt, Query, Sampling, SearchNode, SearchResult
from tests.builders import candidates

QUERY = Query("q", choices=("cat", "dog", "cow"))
CANDIDATES = candidates("cat", "dog", "cow", "cat", "dog")
REWARDS = {"cat": 0.2, "dog": 0.8, "cow": 0.5}


class NameReward:
    """Rewards an answer by its text, and asks one question for it."""

    async def __call__(
        self,
        query: Query,
        answer: Answer,
        candidates: Sequence[Candidate],
        ask: BudgetedGenerator,
        /,
    ) -> RewardValue:
        await ask.generate(InterleavedPrompter()(Query(f"is it {answer.text}?"), []), Sampling())
        return RewardValue(REWARDS[answer.text], {"mutual": REWARDS[answer.text]})


def search(model: ScriptedGenerator, sequences: Sequences, **settings: object) -> FlatSearch:
    fields: dict[str, Any] = {"reward": NameReward()}
    return FlatSearch(
        model,
        prompt=InterleavedPrompter(),
        parse=LabelParser(),
        sequences=sequences,
        **(fields | settings),
    )


def last_shown(prompt: Prompt) -> str:
    """Answers with the last demonstration's answer; a probe with "yes"."""
    answer = [message.parts[0] for message in prompt.messages if message.role == "assistant"]
    return str(answer[-1]) if answer else "yes"


def path_of(found: SearchResult) -> list[SearchNode]:
    assert found.tree is not None
    nodes, node = list[SearchNode](), found.tree.root
    for place in found.tree.path:
        node = node.children[place]
        nodes.append(node)
    return nodes


async def test_best_of_n_samples_all_answers_in_one_request() -> None:
    model = ScriptedGenerator(["cat", "cow", "dog", "cow", "yes", "yes", "yes"])
    found = await search(model, "nearest", branches=4).search(QUERY, CANDIDATES, 2)
    assert [one.example.answer for one in found.shown] == ["dog", "cat"]  # the nearest last
    assert (found.answer.text, found.reply.completions[0].text) == ("dog", "dog")
    assert model.calls[0].sampling.n == 4
    assert found.tree is not None
    assert (found.tree.requests, found.tree.calls, found.tree.ended) == (4, 7, "rollouts")
    assert found.tree.path[0] == 2
    assert [node.candidate for node in path_of(found)] == list(found.shown)
    assert path_of(found)[-1].rewards == {"mutual": 0.8}


async def test_best_of_n_shows_the_requested_order() -> None:
    model = ScriptedGenerator(["cat", "cow", "yes", "yes", "yes"])
    first = replace(search(model, "nearest", branches=2), order="nearest-first")
    shown = await first(QUERY, CANDIDATES, 2)
    assert [one.example.answer for one in shown] == ["cat", "dog"]


async def test_as_a_reranker_it_returns_the_demonstrations_of_the_search() -> None:
    model = ScriptedGenerator(["cat", "cow", "dog", "cow", "yes", "yes", "yes"])
    shown = await search(model, "nearest", branches=4)(QUERY, CANDIDATES, 2)
    assert [one.example.answer for one in shown] == ["dog", "cat"]


async def test_random_sequences_differ_and_follow_the_seed() -> None:
    model = ScriptedGenerator(last_shown)
    shuffled = search(model, "random", branches=8, seed=3)
    found = await shuffled.search(QUERY, CANDIDATES, 3)
    assert found.tree is not None and len(found.tree.root.children) == 8
    sequences = {tuple(prompt_of(call.prompt)) for call in model.calls if prompt_of(call.prompt)}
    assert len(sequences) > 4
    assert all(len(one) == 3 for one in sequences)
    again = await search(ScriptedGenerator(last_shown), "random", branches=8, seed=3).search(
        QUERY, CANDIDATES, 3
    )
    assert again.tree == found.tree
    other = await search(ScriptedGenerator(last_shown), "random", branches=8, seed=4).search(
        QUERY, CANDIDATES, 3
    )
    assert other.tree != found.tree
    leaves = [leaf(child) for child in found.tree.root.children]
    best = max(one.value for one in leaves)
    assert found.answer == next(one.answer for one in leaves if one.value == best)


async def test_similar_sequences_begin_with_the_nearest_and_follow_the_scores() -> None:
    examples = candidates("cat", "dog", "cow", "cat", "dog")
    likely = [replace(one, score=1.0 if i < 3 else -1e3) for i, one in enumerate(examples)]
    model = ScriptedGenerator(last_shown)
    found = await search(model, "similar", branches=9).search(QUERY, likely, 2)
    assert found.tree is not None
    shown = [[node.candidate, node.children[0].candidate] for node in found.tree.root.children]
    assert shown[0] == likely[:2]
    assert all(one in likely[:3] for sequence in shown for one in sequence)
    assert len({tuple(map(id, sequence)) for sequence in shown}) > 3


def prompt_of(prompt: Prompt) -> list[str]:
    return [str(one.parts[-1]) for one in prompt.messages if one.role == "assistant"]


def leaf(node: SearchNode) -> SearchNode:
    return leaf(node.children[0]) if node.children else node


@pytest.mark.parametrize("most", range(1, 12))
async def test_a_budget_is_never_exceeded(most: int) -> None:
    model = ScriptedGenerator(last_shown)
    found = await search(model, "random", branches=6, max_calls=most).search(QUERY, CANDIDATES, 2)
    free = await search(ScriptedGenerator(last_shown), "random", branches=6).search(
        QUERY, CANDIDATES, 2
    )
    assert found.tree is not None and free.tree is not None
    assert len(model.calls) == found.tree.calls <= most
    assert found.tree.ended == ("budget" if most < free.tree.calls else "rollouts")


async def test_a_budget_for_no_answer_is_an_error_and_failures_are_not_rewards() -> None:
    with pytest.raises(SettingError, match=r"smaller than one rollout.* needs 256 tokens"):
        search(ScriptedGenerator([]), "nearest", branches=4, max_tokens=255)
    with pytest.raises(SettingError, match="not allow a single answer"):
        await search(ScriptedGenerator([]), "nearest", branches=4, max_tokens=256).search(
            QUERY, CANDIDATES, 2
        )

    def fails(prompt: Prompt) -> str:
        if not prompt_of(prompt):
            raise GenerationError("down", hint="wait")
        return "cat"

    with pytest.raises(GenerationError):
        await search(ScriptedGenerator(fails), "random", branches=2).search(QUERY, CANDIDATES, 2)


async def test_without_candidates_the_answer_is_the_zero_shot_one() -> None:
    found = await search(ScriptedGenerator(["cow", "yes"]), "random", branches=1).search(
        QUERY, [], 3
    )
    assert (found.shown, found.answer.text) == ((), "cow")


class TwoCallReward(NameReward):
    async def __call__(
        self,
        query: Query,
        answer: Answer,
        candidates: Sequence[Candidate],
        ask: BudgetedGenerator,
        /,
    ) -> RewardValue:
        sampling = Sampling(temperature=1, n=2, seed=int(answer.text[1:]))
        await ask.generate(InterleavedPrompter()(query, []), sampling)
        return RewardValue(0.5, {"mutual": 0.5})


@pytest.mark.parametrize("sequences", ["random", "nearest"])
async def test_budget_limits_answers_to_those_with_rewards(sequences: Sequences) -> None:
    answer = iter(range(1000))
    model = ScriptedGenerator(lambda prompt: f"x{next(answer)}")
    plain = Query("q")
    flat = search(model, sequences, branches=9, max_calls=13, reward=TwoCallReward())
    tree = (await flat.search(plain, CANDIDATES, 4)).tree
    assert tree is not None and tree.ended == "budget"
    leaves = [leaf(child) for child in tree.root.children]
    assert [bool(one.rewards) for one in leaves[:4]] == [True] * 4
    assert len(leaves) <= 5 and tree.calls <= 13


async def test_explicit_seed_samples_other_answers_per_wave() -> None:
    model = ScriptedGenerator(lambda prompt: "cat")
    flat = search(model, "nearest", branches=3, max_calls=9, sampling=Sampling(1.0, seed=7))
    await flat.search(QUERY, CANDIDATES, 1)
    assert [call.sampling.seed for call in model.calls if call.sampling.seed is not None] == [7, 8]


async def test_invalid_arguments_are_errors() -> None:
    with pytest.raises(SettingError, match="unknown sequences, got"):
        search(ScriptedGenerator([]), "nearest-ish")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="at least 0, got -1"):
        await search(ScriptedGenerator([]), "nearest").search(QUERY, CANDIDATES, -1)


async def test_scored_answer_precedes_one_without_reward() -> None:
    """The budget pays for a second answer and not for its reward."""
    flat = search(ScriptedGenerator(["cat", "yes", "dog"]), "random", branches=2, max_calls=3)
    found = await flat.search(QUERY, CANDIDATES, 2)
    assert found.tree is not None and len(found.tree.root.children) == 2
    assert (found.answer.text, found.tree.ended) == ("cat", "budget")


async def test_each_node_of_a_chain_was_visited_once_and_has_the_value_of_its_answer() -> None:
    found = await search(ScriptedGenerator(last_shown), "random", branches=4).search(
        QUERY, CANDIDATES, 3
    )
    assert found.tree is not None
    assert (found.tree.root.visits, len(found.tree.root.children)) == (4, 4)
    for chain in found.tree.root.children:
        last = leaf(chain)
        assert last.answer is not None
        while chain.children:
            assert (chain.visits, chain.value) == (1, last.value)
            [chain] = chain.children
        assert (last.visits, last.value) == (1, REWARDS[last.answer.text])


async def test_at_least_one_branch_is_required() -> None:
    found = await search(ScriptedGenerator(["cow", "yes"]), "nearest", branches=1).search(
        QUERY, CANDIDATES, 1
    )
    assert found.tree is not None and found.tree.ended == "rollouts"
    with pytest.raises(SettingError, match="branches"):
        search(ScriptedGenerator([]), "nearest", branches=0)


async def test_answer_without_affordable_reward_ends_search() -> None:
    """An answer and its reward cost three calls; the fifth call pays only for an answer."""
    answer = iter(range(1000))
    model = ScriptedGenerator(lambda prompt: f"x{next(answer)}")
    flat = search(model, "random", branches=4, max_calls=5, reward=TwoCallReward())
    found = await flat.search(Query("q"), CANDIDATES, 2)
    assert found.tree is not None
    assert (len(found.tree.root.children), found.tree.calls) == (2, 4)


async def test_unused_reserved_tokens_pay_for_more_answers() -> None:
    """The image reserves 4,096 tokens for each answer, and the replies use a few."""
    flat = search(ScriptedGenerator(last_shown), "random", branches=6, max_tokens=6000)
    found = await flat.search(QUERY, CANDIDATES, 1)
    assert found.tree is not None
    assert (len(found.tree.root.children), found.tree.ended) == (6, "rollouts")


@pytest.mark.parametrize("setting", ["max_calls", "max_tokens"])
def test_a_budget_is_checked_before_the_first_query(setting: str) -> None:
    with pytest.raises(SettingError, match=f"{setting} must be at least 1, got 0"):
        search(ScriptedGenerator([]), "nearest", **{setting: 0})
