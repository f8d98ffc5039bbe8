"""What a tree search has to beat: as many answers, judged by the same reward, without a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bottega.errors import SettingError
from bottega.protocols import Generator, Parser, Prompter
from bottega.reranking.asking import Asker, affordable, check_budget
from bottega.reranking.lots import lots_for
from bottega.reranking.rewards import Reward, Worth, check_at_least_one
from bottega.types import (
    Answer,
    Candidate,
    Completion,
    Found,
    Node,
    Prompt,
    Query,
    Reply,
    Sampling,
    SearchTree,
)

Sequences = Literal["random", "nearest"]


@dataclass(frozen=True)
class Branch:
    shown: tuple[Candidate, ...]
    prompt: Prompt
    reply: Reply
    completion: Completion
    answer: Answer


class FlatSearch:
    """Best of `branches` answers by `reward`, all of them asked at once; the first of equals.

    `sequences="nearest"` shows the k nearest candidates, the nearest last, and samples all answers
    in one request: best of n. `"random"` shows each answer's own k candidates in an order by the
    seed, one answer each by `sampling`. A `Searcher`, with a budget as `TreeSearch` has one.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        prompt: Prompter,
        parse: Parser,
        reward: Reward,
        sequences: Sequences,
        branches: int = 10,
        sampling: Sampling | None = None,
        seed: int = 0,
        most_calls: int | None = None,
        most_tokens: int | None = None,
    ) -> None:
        check_at_least_one("branches", branches)
        check_budget(most_calls, most_tokens)
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

    async def search(self, query: Query, candidates: Sequence[Candidate], k: int, /) -> Found:
        """Raises `SettingError` if the budget does not allow one answer."""
        ask = Asker(
            self._generator,
            seed=self._seed,
            most_calls=self._most_calls,
            most_tokens=self._most_tokens,
        )
        branches = await self._branched(query, candidates, k, ask)
        if not branches:
            raise SettingError("the budget allows not one answer", hint="raise most_calls")
        judged = await affordable(
            self._reward(query, branch.answer, candidates, ask) for branch in branches
        )
        worths = [worth or Worth() for worth in judged]
        best = max(range(len(branches)), key=lambda i: worths[i].value)
        root = Node(children=tuple(map(_chain, branches, worths)), visits=len(branches))
        chosen = branches[best]
        tree = SearchTree(
            root,
            (best, *(0 for _ in chosen.shown[1:])),
            "budget" if None in judged or len(branches) < self._branches else "rollouts",
            ask.requests,
            ask.calls,
            ask.usage,
        )
        reply = replace(chosen.reply, completions=(chosen.completion,))
        return Found(chosen.shown, chosen.prompt, reply, chosen.answer, tree)

    async def _branched(
        self, query: Query, candidates: Sequence[Candidate], k: int, ask: Asker
    ) -> list[Branch]:
        if not self._random:
            sampling = replace(self._sampling, n=self._branches)
            asked = [(tuple(reversed(candidates[:k])), sampling)]
        else:
            lots = lots_for(query, self._seed)
            count = min(k, len(candidates))
            drawn = (tuple(lots.sample(candidates, count)) for _ in range(self._branches))
            asked = [(shown, self._sampling) for shown in drawn]
        answered = await affordable(self._ask(query, *one, ask) for one in asked)
        return [branch for some in answered if some is not None for branch in some]

    async def _ask(
        self, query: Query, shown: tuple[Candidate, ...], sampling: Sampling, ask: Asker
    ) -> list[Branch]:
        prompt = self._prompt(query, shown)
        reply = await ask.ask(prompt, sampling)
        said = [(one, self._parse(query, one)) for one in reply.completions]
        return [Branch(shown, prompt, reply, one, answer) for one, answer in said]


def _chain(branch: Branch, worth: Worth) -> Node:
    """One node below the other; the answer is the last one's."""
    last, *above = reversed(branch.shown or (None,))
    node = Node(last, worth.value, 1, (), branch.answer, worth.parts)
    for candidate in above:
        node = Node(candidate, worth.value, 1, (node,))
    return node
