from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.generation import ScriptedGenerator
from bottega.reranking import BudgetedGenerator, EnsembleReward, MutualReward, RewardValue
from bottega.types import Answer, Candidate, Prompt, Query, Reply, Sampling
from tests.reranking.tiny_search import (
    PARSE,
    PROMPT,
    QUERY,
    REWARD,
    SHORT,
    candidates,
    leaf_at,
    leaves,
    names,
    opinion,
    rcts,
    reminded,
    repeated,
)

ENSEMBLE = EnsembleReward(PROMPT, PARSE, shots=3, n=16)


@given(
    max_calls=st.none() | st.integers(13, 130),
    max_tokens=st.none() | st.integers(1_000, 30_000),
    parallel=st.integers(1, 5),
    count=st.integers(0, 8),
    k=st.integers(0, 4),
)
@settings(max_examples=40)
async def test_no_budget_is_ever_exceeded(
    max_calls: int | None, max_tokens: int | None, parallel: int, count: int, k: int
) -> None:
    model = ScriptedGenerator(opinion)
    search = rcts(model, parallel=parallel, max_calls=max_calls, max_tokens=max_tokens)
    found = await search.search(QUERY, candidates(count), k)
    tree = found.tree
    assert tree is not None
    calls = sum(call.sampling.n for call in model.calls)
    assert (tree.requests, tree.calls) == (len(model.calls), calls)
    assert calls <= (max_calls or calls)
    tokens = tree.usage.prompt_tokens + tree.usage.completion_tokens
    assert tokens <= (max_tokens or tokens)
    limited = max_calls is not None or max_tokens is not None
    assert tree.ended != "budget" or limited
    assert leaf_at(found)[-1].answer == found.answer
    for leaf in leaves(tree.root):
        assert leaf.answer is not None
        assert leaf.visits == (1 if leaf.rewards else 0)
    assert tree.root.visits == sum(leaf.visits for leaf in leaves(tree.root))


@pytest.mark.parametrize("parallel", [1, 4])
@pytest.mark.parametrize(
    ("max_calls", "judged"),
    # The first three answers and 10 probes; the root's answer and 11 completions a branch.
    [(3 + 10, 1), (3 + 10 + 9, 1), (1 + 5 * 11, 5), (1 + 6 * 11 + 10, 6)],
)
async def test_a_budget_is_spent_on_complete_branches(
    parallel: int, max_calls: int, judged: int
) -> None:
    search = rcts(ScriptedGenerator(opinion), parallel=parallel, max_calls=max_calls)
    found = await search.search(QUERY, candidates(20), 3)
    assert found.tree is not None
    assert found.tree.ended == "budget"
    assert found.tree.root.visits == judged


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        # Three answers and 10 probes of up to 16 tokens; with one rollout there are two answers.
        ({"max_calls": 12}, "13 completions"),
        ({"max_calls": 1, "rollouts": 1}, "12 completions"),
        ({"max_tokens": 13 * 16 - 1}, "208 tokens"),
        ({"max_calls": 18, "reward": ENSEMBLE}, "19 completions"),
        ({"max_calls": 27, "reward": MutualReward(PROMPT, PARSE, variant="released")}, "28 "),
    ],
)
def test_a_budget_smaller_than_one_rollout_is_refused(settings: dict[str, Any], least: str) -> None:
    with pytest.raises(SettingError, match=f"smaller than one rollout.* needs {least}"):
        rcts(ScriptedGenerator([]), **settings)


async def test_no_request_is_sent_if_the_prompts_exceed_the_budget() -> None:
    """Prompts are unknown at construction: there the tokens of 13 completions suffice."""
    model = ScriptedGenerator(opinion)
    search = rcts(model, max_tokens=13 * 16)
    with pytest.raises(SettingError, match="max_tokens is a budget smaller than one rollout"):
        await search.search(QUERY, candidates(3), 2)
    assert model.calls == []


async def test_nearest_answer_wins_without_rewards() -> None:
    """The cost of a reward without the attribute `cost` is unknown."""

    async def reward(
        query: Query,
        answer: Answer,
        candidates: Sequence[Candidate],
        budgeted: BudgetedGenerator,
        /,
    ) -> RewardValue:
        return await REWARD(query, answer, candidates, budgeted)

    search = rcts(ScriptedGenerator(opinion), reward=reward, max_calls=3)
    found = await search.search(QUERY, candidates(20), 3)
    assert names(found.shown) == ["0", "1", "2"]
    assert found.tree is not None
    assert (found.tree.ended, found.tree.requests) == ("budget", 3)


async def test_low_cost_branch_does_not_lower_the_expected_cost() -> None:
    """A branch starts only if the budget covers the most expensive one so far."""
    costs = iter([4, 1, 4, 4, 4])

    async def reward(
        query: Query,
        answer: Answer,
        candidates: Sequence[Candidate],
        budgeted: BudgetedGenerator,
        /,
    ) -> RewardValue:
        for number in range(next(costs)):
            await budgeted.generate(reminded(query, f"{answer.text} {number}"), SHORT)
        return RewardValue(0.5, {"paid": 0.5})

    # Three answers, rewards of 4 and 1, and 6 calls left: for one more branch of 5, not for two.
    search = rcts(ScriptedGenerator(repeated), reward=reward, parallel=2, max_calls=3 + 4 + 1 + 6)
    found = await search.search(QUERY, candidates(20), 2)
    assert found.tree is not None
    assert (found.tree.ended, found.tree.root.visits) == ("budget", 3)


async def test_branches_run_concurrently_as_far_as_the_budget_allows() -> None:
    running, peak = 0, 0

    async def reward(
        query: Query,
        answer: Answer,
        candidates: Sequence[Candidate],
        budgeted: BudgetedGenerator,
        /,
    ) -> RewardValue:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        for number in range(4):
            await budgeted.generate(reminded(query, f"{answer.text} {number}"), SHORT)
        running -= 1
        return RewardValue(0.5, {"paid": 0.5})

    # Three answers, two rewards of 4 calls, and two concurrent branches of 5.
    model = ScriptedGenerator(repeated, latency=0.001)
    search = rcts(model, reward=reward, parallel=2, max_calls=3 + 2 * 4 + 2 * 5)
    found = await search.search(QUERY, candidates(20), 2)
    assert found.tree is not None
    assert (found.tree.root.visits, peak) == (4, 2)


async def test_batch_without_full_rewards_ends_search() -> None:
    four = replace(SHORT, n=4, temperature=0.8)

    async def reward(
        query: Query,
        answer: Answer,
        candidates: Sequence[Candidate],
        budgeted: BudgetedGenerator,
        /,
    ) -> RewardValue:
        await budgeted.generate(reminded(query, answer.text), four)
        return RewardValue(0.5, {"paid": 0.5})

    # Three answers and one reward of 4: the 3 calls left do not pay for the other one.
    search = rcts(ScriptedGenerator(repeated), reward=reward, parallel=2, max_calls=3 + 4 + 3)
    tree = (await search.search(QUERY, candidates(20), 2)).tree
    assert tree is not None
    assert (tree.ended, tree.root.visits, tree.calls) == ("budget", 1, 7)


class DelayedGenerator(ScriptedGenerator):
    """Generator with a delay before each reply."""

    def __init__(self, latency: Callable[[], float] | None) -> None:
        super().__init__(opinion)
        self._wait = latency

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        if self._wait is not None:
            await asyncio.sleep(self._wait())
        return await super().generate(prompt, sampling)


@pytest.mark.parametrize("parallel", [1, 4])
@pytest.mark.parametrize("limit", range(1500, 9000, 500))
async def test_token_budget_does_not_depend_on_reply_order(limit: int, parallel: int) -> None:
    rng = random.Random(limit)
    waits = (None, lambda: 0.001, lambda: rng.random() / 500)
    trees = []
    for wait in waits:
        search = rcts(DelayedGenerator(wait), rollouts=6, parallel=parallel, max_tokens=limit)
        trees.append((await search.search(QUERY, candidates(6), 2)).tree)
    assert trees[0] == trees[1] == trees[2]
