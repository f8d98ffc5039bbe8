"""Rewards of answers without gold labels: those of RCTS (eq. 7 to 9) and an ensemble."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal, Protocol, get_args

from bottega._util.identity import query_rng
from bottega.errors import SettingError, check_count, check_fraction
from bottega.protocols import Candidates, Parser, Prompter
from bottega.reranking.search_budget import BudgetedGenerator, ReservedCost, gather_all
from bottega.reranking.selection import sample_by_score
from bottega.types import Answer, Candidate, Example, Prompt, Query, Sampling

AgreementFunction = Callable[[Answer, Answer, Query], float]
ExampleScore = Callable[[Example, Answer], float]
RewardVariant = Literal["paper", "released"]

SAMPLED = Sampling(temperature=0.8)


def exact_agreement(one: Answer, other: Answer, query: Query, /) -> float:
    """Return 1 for equal labels, or texts equal up to case and spacing; else 0."""
    if one.labels and other.labels:
        return float(set(one.labels) == set(other.labels))
    ours, theirs = (answer.text.casefold().split() for answer in (one, other))
    return float(ours == theirs)


@dataclass(frozen=True)
class RewardValue:
    """Reward of an answer: a value from 0 to 1 and, for the trace, its named parts.

    `available` is False if the reward could not be computed; the value is then ignored.
    """

    value: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    available: bool = True


UNAVAILABLE = RewardValue(available=False)


class RewardFunction(Protocol):
    """Function that rewards an answer to a query.

    `candidates` are the retrieved examples, nearest first. Errors of `generator` pass through: a
    failed request yields no reward, not a reward of 0. An optional attribute `cost` states
    its maximum cost (`max_cost`).
    """

    async def __call__(
        self, query: Query, answer: Answer, candidates: Candidates, generator: BudgetedGenerator, /
    ) -> RewardValue: ...


@dataclass(frozen=True)
class SelfConsistencyReward:
    """Self-consistency reward (eq. 7).

    The model answers the query again from the answer's rationale, without demonstrations. The
    reward is the share of `n` samples, from one request, that agree. `prompt(query, rationale)`
    builds the prompt. For an answer without a rationale, which eq. 7 leaves open, the reward is
    unavailable; `variant="released"` makes it 0.
    """

    prompt: Callable[[Query, str], Prompt]
    parse: Parser
    _: KW_ONLY
    n: int = 5
    sampling: Sampling = SAMPLED
    agree: AgreementFunction = exact_agreement
    variant: RewardVariant = "paper"

    def __post_init__(self) -> None:
        check_count("n", self.n)
        check_variant(self.variant)

    @property
    def cost(self) -> ReservedCost:
        return ReservedCost(self.n, self.n * self.sampling.max_tokens)

    async def __call__(
        self, query: Query, answer: Answer, candidates: Candidates, generator: BudgetedGenerator, /
    ) -> RewardValue:
        if not answer.valid:
            return RewardValue(0.0, {"self": 0.0})
        if not answer.rationale:
            return RewardValue(0.0, {"self": 0.0}) if self.variant == "released" else UNAVAILABLE
        prompt = self.prompt(query, answer.rationale)
        reply = await generator.generate(prompt, replace(self.sampling, n=self.n))
        answers = [self.parse(query, one) for one in reply.completions]
        agreeing = share(answers, answer, query, self.agree)
        return RewardValue(agreeing, {"self": agreeing})


@dataclass(frozen=True)
class MutualReward:
    """Mutual reward (eq. 8).

    `prompt`, the settings `sampling` and `parse` serve to ask the candidates' questions, and
    `agree` compares the answers with the candidates' own.

    The query with its answer is the demonstration for the first `n` labelled candidates. The reward
    is the share of correct answers to them, or the mean of `score(example, answer)`, such as the
    soft accuracy of a question with several annotators. Each candidate is sampled once (eq. 8),
    with `variant="released"` 5 times in one request, or `samples` times. Without labelled
    candidates the reward is unavailable.
    """

    prompt: Prompter
    parse: Parser
    _: KW_ONLY
    n: int = 5
    samples: int | None = None
    sampling: Sampling = SAMPLED
    agree: AgreementFunction = exact_agreement
    variant: RewardVariant = "paper"
    score: ExampleScore | None = None

    def __post_init__(self) -> None:
        check_count("n", self.n)
        check_count("samples", 1 if self.samples is None else self.samples)
        check_variant(self.variant)

    @property
    def cost(self) -> ReservedCost:
        calls = self.n * self._samples
        return ReservedCost(calls, calls * self.sampling.max_tokens)

    @property
    def _samples(self) -> int:
        return self.samples or (5 if self.variant == "released" else 1)

    async def __call__(
        self, query: Query, answer: Answer, candidates: Candidates, generator: BudgetedGenerator, /
    ) -> RewardValue:
        if not answer.valid:
            return RewardValue(0.0, {"mutual": 0.0})
        labelled = [one.example for one in candidates if one.example.answer][: self.n]
        if not labelled:
            return UNAVAILABLE
        shown = Example(query, answer.text, rationale=answer.rationale)
        shares = await gather_all(self._right(shown, example, generator) for example in labelled)
        right = sum(shares) / len(shares)
        return RewardValue(right, {"mutual": right})

    async def _right(self, shown: Example, example: Example, generator: BudgetedGenerator) -> float:
        query = _with_choices(example, shown.query)
        prompt = self.prompt(query, [Candidate(shown, 1.0)])
        reply = await generator.generate(prompt, replace(self.sampling, n=self._samples))
        option = (example.answer,) if example.answer in query.choices else ()
        gold = Answer(example.answer, labels=example.labels or option)
        answers = [self.parse(query, one) for one in reply.completions]
        if self.score is not None:
            return sum(self.score(example, one) for one in answers) / len(answers)
        return share(answers, gold, query, self.agree)


@dataclass(frozen=True)
class WeightedReward:
    """Weighted reward (eq. 9): alpha * self + (1 - alpha) * mutual, computed concurrently.

    If one part is unavailable, the other is the reward: answers without a rationale get the mutual
    reward, as the paper does for VizWiz and VSR.
    """

    own: RewardFunction
    mutual: RewardFunction
    alpha: float = 0.2

    def __post_init__(self) -> None:
        check_fraction("alpha", self.alpha)

    @property
    def cost(self) -> ReservedCost:
        return max_cost(self.own) + max_cost(self.mutual)

    async def __call__(
        self, query: Query, answer: Answer, candidates: Candidates, generator: BudgetedGenerator, /
    ) -> RewardValue:
        own, mutual = await gather_all(
            checked_reward(reward, query, answer, candidates, generator)
            for reward in (self.own, self.mutual)
        )
        parts = {**own.parts, **mutual.parts}
        if not own.available or not mutual.available:
            return replace(own if own.available else mutual, parts=parts)
        return RewardValue(self.alpha * own.value + (1 - self.alpha) * mutual.value, parts)


def max_cost(reward: RewardFunction) -> ReservedCost:
    """Return the maximum cost of one reward, without the tokens of its prompts: its attribute
    `cost`, or zero without one."""
    cost = getattr(reward, "cost", None)
    return cost if isinstance(cost, ReservedCost) else ReservedCost()


async def checked_reward(
    reward: RewardFunction,
    query: Query,
    answer: Answer,
    candidates: Candidates,
    generator: BudgetedGenerator,
) -> RewardValue:
    """Return the reward of an answer. Raises `SettingError` for a value outside 0..1."""
    value: object = await reward(query, answer, candidates, generator)
    if not isinstance(value, RewardValue):
        raise SettingError(
            f"a reward must be a RewardValue, got {value!r}",
            hint="return bottega.reranking.RewardValue(value), with a value from 0 to 1",
        )
    if not 0 <= value.value <= 1:
        raise SettingError(
            f"a reward must be from 0 to 1, got {value.value}", hint="scale its values to 0..1"
        )
    return value


def check_variant(variant: str) -> None:
    if variant not in get_args(RewardVariant):
        raise SettingError(f"unknown variant, got {variant!r}", hint='use "paper" or "released"')


def share(
    answers: Sequence[Answer], right: Answer, query: Query, agree: AgreementFunction
) -> float:
    """Return the share of answers that agree with `right`; an invalid answer never agrees."""
    return sum(agree(one, right, query) for one in answers if one.valid) / len(answers)


def _with_choices(example: Example, query: Query) -> Query:
    """Return the example's query with the choices of `query` if its labels are among them.

    Stored examples of a classification task rarely repeat the common choices.
    """
    own, labels = example.query, example.labels or (example.answer,)
    if own.choices or not set(labels) <= set(query.choices):
        return own
    return replace(own, choices=query.choices)


@dataclass(frozen=True)
class EnsembleReward:
    """Ensemble reward: the share of `n` other sequences of `shots` demonstrations that lead to the
    same answer.

    This reward is ours. The self-consistency reward (eq. 7) needs a rationale, and for a model that
    copies labels the mutual reward (eq. 8) only counts labels. Candidates are sampled as in eq. 6.
    All answers to a query are compared with the same samples, which are requested once.
    """

    prompt: Prompter
    parse: Parser
    _: KW_ONLY
    shots: int
    n: int = 15
    sampling: Sampling = field(default_factory=Sampling)
    agree: AgreementFunction = exact_agreement
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("shots", self.shots)
        check_count("n", self.n)

    @property
    def cost(self) -> ReservedCost:
        return ReservedCost(self.n, self.n * self.sampling.max_tokens)

    async def __call__(
        self, query: Query, answer: Answer, candidates: Candidates, generator: BudgetedGenerator, /
    ) -> RewardValue:
        if not answer.valid:
            return RewardValue(0.0, {"ensemble": 0.0})
        if not candidates:
            return UNAVAILABLE
        rng = query_rng(query, f"ensemble:{self.seed}")  # independent of the branches
        shown = [sample_by_score(candidates, self.shots, rng) for _ in range(self.n)]
        prompts = [self.prompt(query, sample) for sample in shown]
        replies = await gather_all(generator.generate(prompt, self.sampling) for prompt in prompts)
        answers = [self.parse(query, reply.completions[0]) for reply in replies]
        agreeing = share(answers, answer, query, self.agree)
        return RewardValue(agreeing, {"ensemble": agreeing})
