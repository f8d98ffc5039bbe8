"""Baseline of tree search: as many answers with the same reward, without a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Literal, get_args

from bottega._util.identity import query_rng
from bottega.errors import SettingError
from bottega.protocols import Generator, Parser, Prompter
from bottega.reranking.rewards import (
    RewardFunction,
    RewardValue,
    check_at_least_one,
    checked_reward,
)
from bottega.reranking.search_budget import (
    BudgetedGenerator,
    ReservedCost,
    check_budget,
    gather_affordable,
)
from bottega.reranking.selection import check_depth
from bottega.types import (
    Answer,
    Candidate,
    Completion,
    Prompt,
    Query,
    Reply,
    Sampling,
    SearchNode,
    SearchResult,
    SearchTree,
)

Sequences = Literal["random", "nearest"]
Shown = tuple[Candidate, ...]


@dataclass(frozen=True)
class BranchAnswer:
    shown: Shown
    prompt: Prompt
    reply: Reply
    completion: Completion
    answer: Answer


ScoredAnswer = tuple[BranchAnswer, RewardValue | None]


class FlatSearch:
    """Searcher that takes the best of `branches` concurrent answers by `reward`; the first of
    equals.

    `sequences="nearest"` shows the k nearest candidates, the nearest last, and samples all answers
    in one request: best of n. `"random"` shows k random candidates per answer, ordered by the seed,
    and samples one answer for each. The budget works as in `TreeSearch`: the first answer is scored
    before others are requested, to learn how many fit.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        prompt: Prompter,
        parse: Parser,
        reward: RewardFunction,
        sequences: Sequences,
        branches: int = 10,
        sampling: Sampling | None = None,
        seed: int = 0,
        most_calls: int | None = None,
        most_tokens: int | None = None,
    ) -> None:
        check_at_least_one("branches", branches)
        check_budget(most_calls, most_tokens)
        if sequences not in get_args(Sequences):
            raise SettingError(
                f"unknown sequences, got {sequences!r}", hint='use "random" or "nearest"'
            )
        self._generator = generator
        self._prompt = prompt
        self._parse = parse
        self._reward = reward
        self._random = sequences == "random"
        self._branches = branches
        self._sampling = sampling or Sampling()
        self._seed = seed
        self._most_calls, self._most_tokens = most_calls, most_tokens

    async def __call__(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> list[Candidate]:
        return list((await self.search(query, candidates, k)).shown)

    async def search(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> SearchResult:
        """Return the best answer. Raises `SettingError` if the budget does not allow one."""
        check_depth(k)
        budgeted = BudgetedGenerator(
            self._generator,
            seed=self._seed,
            most_calls=self._most_calls,
            most_tokens=self._most_tokens,
        )
        scored = await self._scored_answers(query, candidates, k, budgeted)
        if not scored:
            raise SettingError(
                "the budget of the search does not allow a single answer",
                hint="raise most_calls or most_tokens, or lower sampling.max_tokens",
            )
        best = max(range(len(scored)), key=lambda i: _value(scored[i][1]))
        chains = tuple(_chain(branch, reward or RewardValue()) for branch, reward in scored)
        chosen = scored[best][0]
        whole = len(scored) == self._branches and all(reward for _, reward in scored)
        tree = SearchTree(
            SearchNode(children=chains, visits=len(chains)),
            (best, *(0 for _ in chosen.shown[1:])),
            "rollouts" if whole else "budget",
            budgeted.requests,
            budgeted.calls,
            budgeted.usage,
        )
        reply = replace(chosen.reply, completions=(chosen.completion,))
        return SearchResult(chosen.shown, chosen.prompt, reply, chosen.answer, tree)

    async def _scored_answers(
        self, query: Query, candidates: Sequence[Candidate], k: int, budgeted: BudgetedGenerator
    ) -> list[ScoredAnswer]:
        """Return as many scored answers as the budget allows.

        Each wave shows the cost of a branch, which sets the size of the next wave.
        """
        sequences = self._sequences(query, candidates, k)
        found: list[ScoredAnswer] = []
        size = 1 if budgeted.is_limited else self._branches
        while size:
            before, start = budgeted.reserved, len(found)
            found += await self._wave(query, candidates, sequences[start : start + size], budgeted)
            budgeted.settle()
            if len(found) < start + size or not all(reward for _, reward in found):
                break
            price = ReservedCost(
                ceil((budgeted.reserved.calls - before.calls) / size),
                ceil((budgeted.reserved.tokens - before.tokens) / size),
            )
            size = int(min(max(1, budgeted.room(price)), self._branches - len(found)))
        return found

    def _sequences(
        self, query: Query, candidates: Sequence[Candidate], k: int
    ) -> list[tuple[int, Shown]]:
        """Return each branch's index and demonstrations."""
        if not self._random:
            return list(enumerate([tuple(reversed(candidates[:k]))] * self._branches))
        rng, count = query_rng(query, self._seed), min(k, len(candidates))
        return [(i, tuple(rng.sample(candidates, count))) for i in range(self._branches)]

    async def _wave(
        self,
        query: Query,
        candidates: Sequence[Candidate],
        wave: Sequence[tuple[int, Shown]],
        budgeted: BudgetedGenerator,
    ) -> list[ScoredAnswer]:
        requests = [(shown, self._sampling) for _, shown in wave]
        if not self._random:
            first, shown = wave[0]
            requests = [(shown, self._wave_sampling(first, len(wave)))]
        answered = await gather_affordable(self._ask(query, *one, budgeted) for one in requests)
        branches = [branch for some in answered if some is not None for branch in some]
        rewards = await gather_affordable(
            checked_reward(self._reward, query, branch.answer, candidates, budgeted)
            for branch in branches
        )
        return list(zip(branches, rewards, strict=True))

    def _wave_sampling(self, first: int, count: int) -> Sampling:
        """Shift the seed per wave: an equal seed would repeat the answers of the previous wave."""
        seed = self._sampling.seed
        return replace(self._sampling, n=count, seed=None if seed is None else seed + first)

    async def _ask(
        self, query: Query, shown: Shown, sampling: Sampling, budgeted: BudgetedGenerator
    ) -> list[BranchAnswer]:
        prompt = self._prompt(query, shown)
        reply = await budgeted.generate(prompt, sampling)
        parsed = [(one, self._parse(query, one)) for one in reply.completions]
        return [BranchAnswer(shown, prompt, reply, one, answer) for one, answer in parsed]


def _value(reward: RewardValue | None) -> float:
    """Return the reward; an answer without one ranks last."""
    return -inf if reward is None else reward.value


def _chain(branch: BranchAnswer, reward: RewardValue) -> SearchNode:
    """Return a chain of nodes, one per demonstration; the last node has the answer."""
    last, *above = reversed(branch.shown or (None,))
    node = SearchNode(last, reward.value, 1, (), branch.answer, reward.parts)
    for candidate in above:
        node = SearchNode(candidate, reward.value, 1, (node,))
    return node
