"""What a tree search has to beat: as many answers, judged by the same reward, without a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Literal, get_args

from bottega._util.rng import query_rng
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
class Branch:
    shown: Shown
    prompt: Prompt
    reply: Reply
    completion: Completion
    answer: Answer


Judged = tuple[Branch, RewardValue | None]


class FlatSearch:
    """Best of `branches` answers by `reward`, all of them asked at once; the first of equals.

    `sequences="nearest"` shows the k nearest candidates, the nearest last, and samples all answers
    in one request: best of n. `"random"` shows each answer's own k candidates in an order by the
    seed, one answer each by `sampling`. A `Searcher`, with a budget as `TreeSearch` has one: within
    it the first answer is judged before others are asked for, as many as can be judged too.
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
                f"there are no sequences {sequences!r}", hint='use "random" or "nearest"'
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
        """Raises `SettingError` if the budget does not allow one answer."""
        check_depth(k)
        ask = BudgetedGenerator(
            self._generator,
            seed=self._seed,
            most_calls=self._most_calls,
            most_tokens=self._most_tokens,
        )
        judged = await self._judged(query, candidates, k, ask)
        if not judged:
            raise SettingError(
                "the budget of the search does not allow a single answer",
                hint="raise most_calls or most_tokens, or lower sampling.max_tokens",
            )
        best = max(range(len(judged)), key=lambda i: _value(judged[i][1]))
        chains = tuple(_chain(branch, worth or RewardValue()) for branch, worth in judged)
        chosen = judged[best][0]
        whole = len(judged) == self._branches and all(worth for _, worth in judged)
        tree = SearchTree(
            SearchNode(children=chains, visits=len(chains)),
            (best, *(0 for _ in chosen.shown[1:])),
            "rollouts" if whole else "budget",
            ask.requests,
            ask.calls,
            ask.usage,
        )
        reply = replace(chosen.reply, completions=(chosen.completion,))
        return SearchResult(chosen.shown, chosen.prompt, reply, chosen.answer, tree)

    async def _judged(
        self, query: Query, candidates: Sequence[Candidate], k: int, ask: BudgetedGenerator
    ) -> list[Judged]:
        """As many as the budget pays for, wave by wave: what a branch takes shows in the last."""
        sequences = self._sequences(query, candidates, k)
        found: list[Judged] = []
        size = 1 if ask.is_limited else self._branches
        while size:
            before, start = ask.reserved, len(found)
            found += await self._wave(query, candidates, sequences[start : start + size], ask)
            ask.settle()
            if len(found) < start + size or not all(worth for _, worth in found):
                break
            price = ReservedCost(
                ceil((ask.reserved.calls - before.calls) / size),
                ceil((ask.reserved.tokens - before.tokens) / size),
            )
            size = int(min(max(1, ask.room(price)), self._branches - len(found)))
        return found

    def _sequences(
        self, query: Query, candidates: Sequence[Candidate], k: int
    ) -> list[tuple[int, Shown]]:
        """Each branch's place and what it shows."""
        if not self._random:
            return list(enumerate([tuple(reversed(candidates[:k]))] * self._branches))
        rng, count = query_rng(query, self._seed), min(k, len(candidates))
        return [(i, tuple(rng.sample(candidates, count))) for i in range(self._branches)]

    async def _wave(
        self,
        query: Query,
        candidates: Sequence[Candidate],
        wave: Sequence[tuple[int, Shown]],
        ask: BudgetedGenerator,
    ) -> list[Judged]:
        requests = [(shown, self._sampling) for _, shown in wave]
        if not self._random:
            first, shown = wave[0]
            requests = [(shown, self._drawn(first, len(wave)))]
        answered = await gather_affordable(self._ask(query, *one, ask) for one in requests)
        branches = [branch for some in answered if some is not None for branch in some]
        worths = await gather_affordable(
            checked_reward(self._reward, query, branch.answer, candidates, ask)
            for branch in branches
        )
        return list(zip(branches, worths, strict=True))

    def _drawn(self, first: int, count: int) -> Sampling:
        """Equal seeds would draw the answers of the wave before again."""
        seed = self._sampling.seed
        return replace(self._sampling, n=count, seed=None if seed is None else seed + first)

    async def _ask(
        self, query: Query, shown: Shown, sampling: Sampling, ask: BudgetedGenerator
    ) -> list[Branch]:
        prompt = self._prompt(query, shown)
        reply = await ask.ask(prompt, sampling)
        said = [(one, self._parse(query, one)) for one in reply.completions]
        return [Branch(shown, prompt, reply, one, answer) for one, answer in said]


def _value(worth: RewardValue | None) -> float:
    """An answer that was judged goes before one that was not."""
    return -inf if worth is None else worth.value


def _chain(branch: Branch, worth: RewardValue) -> SearchNode:
    """One node below the other; the answer is the last one's."""
    last, *above = reversed(branch.shown or (None,))
    node = SearchNode(last, worth.value, 1, (), branch.answer, worth.parts)
    for candidate in above:
        node = SearchNode(candidate, worth.value, 1, (node,))
    return node
