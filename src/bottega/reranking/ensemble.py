"""What an answer is worth to a model that gives no reasons."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from bottega.protocols import Parser, Prompter
from bottega.reranking.rewards import (
    NOT_ASKED,
    Agree,
    RewardValue,
    check_at_least_one,
    says_the_same,
    share,
)
from bottega.reranking.search_budget import BudgetedGenerator, rng_for, together
from bottega.reranking.tree import scaled
from bottega.types import Answer, Candidate, Query, Sampling


class Ensemble:
    """The share of `n` other draws of `shots` candidates after which the model says the same.

    Not the paper's: the self reward (eq. 7) starts from a rationale, and where a model copies what
    it is shown the mutual reward (eq. 8) only counts labels. Candidates are drawn as branches are
    (eq. 6). All answers to a query are compared with the same draws, which are asked once.
    """

    def __init__(
        self,
        prompt: Prompter,
        parse: Parser,
        *,
        shots: int,
        n: int = 15,
        sampling: Sampling | None = None,
        agree: Agree = says_the_same,
        seed: int = 0,
    ) -> None:
        check_at_least_one("shots", shots)
        check_at_least_one("n", n)
        self._prompt = prompt
        self._parse = parse
        self._shots = shots
        self._n = n
        self._sampling = sampling or Sampling()
        self._agree = agree
        self._seed = seed

    async def __call__(
        self, query: Query, said: Answer, known: Sequence[Candidate], ask: BudgetedGenerator, /
    ) -> RewardValue:
        if not said.valid:
            return RewardValue(0.0, {"ensemble": 0.0})
        if not known:
            return NOT_ASKED
        prompts = [self._prompt(query, shown) for shown in self._draws(query, known)]
        replies = await together(ask.ask(prompt, self._sampling) for prompt in prompts)
        answers = [self._parse(query, reply.completions[0]) for reply in replies]
        agreeing = share(answers, said, query, self._agree)
        return RewardValue(agreeing, {"ensemble": agreeing})

    def _draws(self, query: Query, known: Sequence[Candidate]) -> list[list[Candidate]]:
        rng = rng_for(query, f"ensemble:{self._seed}")  # not those of the branches
        return [self._draw(known, rng) for _ in range(self._n)]

    def _draw(self, known: Sequence[Candidate], rng: Random) -> list[Candidate]:
        left, weights = list(known), scaled([one.score for one in known])
        drawn: list[Candidate] = []
        while left and len(drawn) < self._shots:
            place = rng.choices(range(len(left)), weights)[0]
            drawn.append(left.pop(place))
            weights.pop(place)
        return drawn
