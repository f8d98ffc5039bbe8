"""Searches without a tree: the best of several answers, and the joint choice of RAVQA-v2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from math import ceil, inf
from typing import Literal, get_args

from bottega._util.identity import query_rng
from bottega.errors import SettingError, check_count, check_scores
from bottega.protocols import Candidates, Generator, Parser, Prompter
from bottega.reranking.rewards import RewardFunction, RewardValue, checked_reward, max_cost
from bottega.reranking.search_budget import (
    BudgetedGenerator,
    ReservedCost,
    check_budget,
    check_rollout,
    gather_affordable,
    gather_all,
)
from bottega.reranking.selection import (
    DemonstrationOrder,
    check_depth,
    order_demonstrations,
    sample_by_score,
)
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
)

Sequences = Literal["random", "similar", "nearest"]
Shown = tuple[Candidate, ...]
ROUNDING = 1e-3  # tolerated excess of a log probability over 0
RETRIEVED, ANSWERED = "log retrieval", "log answer"


@dataclass(frozen=True)
class BranchAnswer:
    shown: Shown
    prompt: Prompt
    reply: Reply
    completion: Completion
    answer: Answer


RewardedAnswer = tuple[BranchAnswer, RewardValue | None]


@dataclass(frozen=True)
class FlatSearch:
    """Searcher that takes the best of `branches` concurrent answers by `reward`; the first of
    equals.

    `generator` answers `prompt` with the settings `sampling` and `seed`, and `parse` reads its
    answers. `max_calls` completions and `max_tokens` tokens limit the search.

    `sequences="nearest"` shows the k nearest candidates in `order`, and samples all answers in one
    request: best of n. The other two request one answer for each sequence. `"random"` shows k
    random candidates in random order, seeded by the query. `"similar"` has the branches of
    `TreeSearch` without its tree: the k nearest candidates, the nearest first, then sequences drawn
    by score (eq. 6). The budget works as in `TreeSearch`: the first answer is scored before others
    are requested, to learn how many fit.
    """

    generator: Generator
    _: KW_ONLY
    prompt: Prompter
    parse: Parser
    reward: RewardFunction
    sequences: Sequences
    branches: int = 10
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    max_calls: int | None = None
    max_tokens: int | None = None
    order: DemonstrationOrder = "nearest-last"

    def __post_init__(self) -> None:
        check_count("branches", self.branches)
        check_budget(self.max_calls, self.max_tokens)
        needed = ReservedCost(1, self.sampling.max_tokens) + max_cost(self.reward)
        check_rollout(self.max_calls, self.max_tokens, needed)
        if self.sequences not in get_args(Sequences):
            raise SettingError(
                f"unknown sequences, got {self.sequences!r}",
                hint='use "random", "similar" or "nearest"',
            )

    async def __call__(self, query: Query, candidates: Candidates, k: int, /) -> list[Candidate]:
        return list((await self.search(query, candidates, k)).shown)

    async def search(self, query: Query, candidates: Candidates, k: int, /) -> SearchResult:
        """Return the best answer. Raises `SettingError` if the budget does not allow one."""
        check_depth(k)
        budgeted = BudgetedGenerator(
            self.generator,
            seed=self.seed,
            max_calls=self.max_calls,
            max_tokens=self.max_tokens,
        )
        scored = await self._scored_answers(query, candidates, k, budgeted)
        if not scored:
            raise SettingError(
                "the budget of the search does not allow a single answer",
                hint="raise max_calls or max_tokens, or lower sampling.max_tokens",
            )
        # An answer without a reward ranks last.
        values = [-inf if reward is None else reward.value for _, reward in scored]
        best = values.index(max(values))
        chains = tuple(_chain(branch, reward or RewardValue()) for branch, reward in scored)
        chosen = scored[best][0]
        whole = len(scored) == self.branches and all(reward for _, reward in scored)
        root = SearchNode(children=chains, visits=len(chains))
        path = best, *(0 for _ in chosen.shown[1:])
        tree = budgeted.tree(root, path, "rollouts" if whole else "budget")
        reply = replace(chosen.reply, completions=(chosen.completion,))
        return SearchResult(chosen.shown, chosen.prompt, reply, chosen.answer, tree)

    async def _scored_answers(
        self, query: Query, candidates: Candidates, k: int, budgeted: BudgetedGenerator
    ) -> list[RewardedAnswer]:
        """Return as many scored answers as the budget allows.

        The cost of a branch in one wave sets the size of the next wave.
        """
        sequences = self._sequences(query, candidates, k)
        found: list[RewardedAnswer] = []
        size = 1 if budgeted.is_limited else self.branches
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
            size = int(min(max(1, budgeted.room(price)), self.branches - len(found)))
        return found

    def _sequences(self, query: Query, candidates: Candidates, k: int) -> list[tuple[int, Shown]]:
        if self.sequences == "nearest":
            shown = order_demonstrations(candidates[:k], self.order, query, self.seed)
            return list(enumerate([tuple(shown)] * self.branches))
        rng, count = query_rng(query, self.seed), min(k, len(candidates))
        if self.sequences == "random":
            drawn = [rng.sample(candidates, count) for _ in range(self.branches)]
        else:
            more = [sample_by_score(candidates, k, rng) for _ in range(self.branches - 1)]
            drawn = [list(candidates[:k]), *more]
        return [(i, tuple(sequence)) for i, sequence in enumerate(drawn)]

    async def _wave(
        self,
        query: Query,
        candidates: Candidates,
        wave: Sequence[tuple[int, Shown]],
        budgeted: BudgetedGenerator,
    ) -> list[RewardedAnswer]:
        requests = [(shown, self.sampling) for _, shown in wave]
        if self.sequences == "nearest":
            first, shown = wave[0]
            seed = self.sampling.seed
            # Shift the seed per wave: an equal seed would repeat the answers of the previous wave.
            seed = None if seed is None else seed + first
            requests = [(shown, replace(self.sampling, n=len(wave), seed=seed))]
        answered = await gather_affordable(self._ask(query, *one, budgeted) for one in requests)
        branches = [branch for some in answered if some is not None for branch in some]
        rewards = await gather_affordable(
            checked_reward(self.reward, query, branch.answer, candidates, budgeted)
            for branch in branches
        )
        return list(zip(branches, rewards, strict=True))

    async def _ask(
        self, query: Query, shown: Shown, sampling: Sampling, budgeted: BudgetedGenerator
    ) -> list[BranchAnswer]:
        prompt = self.prompt(query, shown)
        reply = await budgeted.generate(prompt, sampling)
        parsed = [(one, self.parse(query, one)) for one in reply.completions]
        return [BranchAnswer(shown, prompt, reply, one, answer) for one, answer in parsed]


def _chain(branch: BranchAnswer, reward: RewardValue) -> SearchNode:
    """Return a chain of nodes, one per demonstration; the last node has the answer."""
    last, *above = reversed(branch.shown or (None,))
    node = SearchNode(last, reward.value, 1, (), branch.answer, reward.parts)
    for candidate in above:
        node = SearchNode(candidate, reward.value, 1, (node,))
    return node


@dataclass(frozen=True)
class CandidateAnswer:
    """Answer of the model with one candidate. All scores are log probabilities."""

    candidate: Candidate
    retrieved: float
    prompt: Prompt
    reply: Reply
    completion: Completion
    answer: Answer

    @property
    def answered(self) -> float:
        """Log probability of the answer, or nan."""
        logprob = self.completion.logprob
        return math.nan if logprob is None else logprob

    @property
    def is_complete(self) -> bool:
        return self.completion.finish_reason == "stop" and bool(self.completion.text.strip())

    @property
    def joint(self) -> float:
        return self.retrieved + self.answered

    @property
    def node(self) -> SearchNode:
        parts = {RETRIEVED: self.retrieved, ANSWERED: self.answered}
        return SearchNode(self.candidate, self.joint, 1, (), self.answer, parts)


@dataclass(frozen=True)
class JointChoiceSearch:
    """Searcher that answers with each of K candidates separately (RAVQA-v2, Lin et al. 2023, after
    RAG).

    It returns the answer with the highest log_softmax(retrieval score) + log probability, and of
    equals that of the nearest candidate. The K requests are concurrent.

    The softmax is over the K candidates. The paper's retriever was trained for it; scores of other
    retrievers are first divided by `temperature`. Cosines differ too little to matter at 1; sums
    over tokens (late interaction) differ by several nats.

    A reply that is empty, refused or truncated is used only if no reply is complete, because its
    probability omits the missing text.

    The tree of the trace holds each candidate with its answer and both log probabilities. Raises
    `SettingError` for scores that are not finite, and if the model returns no valid log
    probabilities. Answers without one, such as refusals, and answers with one above 0 are ignored.
    """

    generator: Generator
    _: KW_ONLY
    prompt: Prompter
    parse: Parser
    sampling: Sampling = field(default_factory=Sampling)
    temperature: float = 1.0

    def __post_init__(self) -> None:
        temperature: object = self.temperature
        number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
        if not (number and math.isfinite(self.temperature) and self.temperature > 0):
            raise SettingError(
                f"temperature must be a finite number above 0, got {temperature!r}",
                hint="set temperature to 1 for unscaled scores",
            )

    async def search(self, query: Query, candidates: Candidates, k: int, /) -> SearchResult:
        check_depth(k)
        shown = tuple(candidates[:k])
        if not shown:
            prompt = self.prompt(query, ())
            reply = await self.generator.generate(prompt, replace(self.sampling, n=1))
            return SearchResult((), prompt, reply, self.parse(query, reply.completions[0]))
        weights = self._weights([one.score for one in shown])
        budgeted = BudgetedGenerator(self.generator)
        pairs = zip(shown, weights, strict=True)
        reads = await gather_all(self._read(query, *pair, budgeted) for pair in pairs)
        best = self._best(reads)
        root = SearchNode(children=tuple(read.node for read in reads), visits=len(reads))
        tree = budgeted.tree(root, (best,), "exhausted")
        chosen = reads[best]
        return SearchResult((chosen.candidate,), chosen.prompt, chosen.reply, chosen.answer, tree)

    def _weights(self, scores: Sequence[float]) -> list[float]:
        check_scores(scores)
        weights = log_softmax([score / self.temperature for score in scores])
        if not all(map(math.isfinite, weights)):
            raise SettingError(
                f"scores from {min(scores)} to {max(scores)} are too large for a temperature of"
                f" {self.temperature}",
                hint="set temperature to about the typical difference of the scores",
            )
        return weights

    async def _read(
        self, query: Query, candidate: Candidate, retrieved: float, budgeted: BudgetedGenerator
    ) -> CandidateAnswer:
        prompt = self.prompt(query, (candidate,))
        reply = await budgeted.generate(prompt, replace(self.sampling, n=1))
        first = reply.completions[0]
        return CandidateAnswer(candidate, retrieved, prompt, reply, first, self.parse(query, first))

    def _best(self, reads: Sequence[CandidateAnswer]) -> int:
        usable = [i for i, one in enumerate(reads) if -math.inf < one.answered <= ROUNDING]
        if not usable:
            given = [one.answered for one in reads if not math.isnan(one.answered)]
            raise SettingError(
                f"{self.generator.name} must return log probabilities, got"
                f" {given[0] if given else 'none'}",
                hint="request them with OpenAIGenerator(..., extra_body={'logprobs': True}), or"
                " use a model that returns them",
            )
        complete = [i for i in usable if reads[i].is_complete]
        return max(complete or usable, key=lambda i: reads[i].joint)


def log_softmax(scores: Sequence[float]) -> list[float]:
    """Return the log softmax of at least one score."""
    highest = max(scores)
    total = highest + math.log(sum(math.exp(score - highest) for score in scores))
    return [score - total for score in scores]
