"""Rewards of answers without gold labels: those of RCTS (eq. 7 to 9) and an ensemble."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal, Protocol, get_args

from bottega._util.identity import query_rng
from bottega.errors import SettingError
from bottega.protocols import Parser, Prompter
from bottega.reranking.search_budget import BudgetedGenerator, gather_all
from bottega.reranking.selection import scaled
from bottega.types import Answer, Candidate, Example, Prompt, Query, Sampling

AgreementFunction = Callable[[Answer, Answer, Query], float]
Variant = Literal["paper", "released"]

SAMPLED = Sampling(temperature=0.8)


def exact_agreement(one: Answer, other: Answer, query: Query, /) -> float:
    """Return 1 for equal labels, or texts equal up to case and spacing; else 0."""
    if one.labels and other.labels:
        return float(set(one.labels) == set(other.labels))
    return float(_plain(one.text) == _plain(other.text))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


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
    failed request yields no reward, not a reward of 0.
    """

    async def __call__(
        self,
        query: Query,
        answer: Answer,
        candidates: Sequence[Candidate],
        generator: BudgetedGenerator,
        /,
    ) -> RewardValue: ...


class SelfConsistencyReward:
    """Self-consistency reward (eq. 7).

    The model answers the query again from the answer's rationale, without demonstrations. The
    reward is the share of `n` samples of one request that agree. `prompt(query, rationale)` builds
    the prompt. For an answer without a rationale, which eq. 7 leaves open, the reward is
    unavailable; `variant="released"` makes it 0.
    """

    def __init__(
        self,
        prompt: Callable[[Query, str], Prompt],
        parse: Parser,
        *,
        n: int = 5,
        sampling: Sampling = SAMPLED,
        agree: AgreementFunction = exact_agreement,
        variant: Variant = "paper",
    ) -> None:
        check_at_least_one("n", n)
        check_variant(variant)
        self._prompt = prompt
        self._parse = parse
        self._sampling = replace(sampling, n=n)
        self._agree = agree
        self._variant = variant

    async def __call__(
        self,
        query: Query,
        answer: Answer,
        candidates: Sequence[Candidate],
        generator: BudgetedGenerator,
        /,
    ) -> RewardValue:
        if not answer.valid:
            return RewardValue(0.0, {"self": 0.0})
        if not answer.rationale:
            return RewardValue(0.0, {"self": 0.0}) if self._variant == "released" else UNAVAILABLE
        reply = await generator.generate(self._prompt(query, answer.rationale), self._sampling)
        answers = [self._parse(query, one) for one in reply.completions]
        agreeing = share(answers, answer, query, self._agree)
        return RewardValue(agreeing, {"self": agreeing})


class MutualReward:
    """Mutual reward (eq. 8).

    The query with its answer is the demonstration for the first `n` labelled candidates. The reward
    is the share of correct answers to them. Each candidate is sampled once (eq. 8), with
    `variant="released"` 5 times in one request, or `samples` times. Without labelled candidates the
    reward is unavailable.
    """

    def __init__(
        self,
        prompt: Prompter,
        parse: Parser,
        *,
        n: int = 5,
        samples: int | None = None,
        sampling: Sampling = SAMPLED,
        agree: AgreementFunction = exact_agreement,
        variant: Variant = "paper",
    ) -> None:
        if samples is None:
            samples = 5 if variant == "released" else 1
        check_at_least_one("n", n)
        check_at_least_one("samples", samples)
        check_variant(variant)
        self._prompt = prompt
        self._parse = parse
        self._n = n
        self._sampling = replace(sampling, n=samples)
        self._agree = agree

    async def __call__(
        self,
        query: Query,
        answer: Answer,
        candidates: Sequence[Candidate],
        generator: BudgetedGenerator,
        /,
    ) -> RewardValue:
        if not answer.valid:
            return RewardValue(0.0, {"mutual": 0.0})
        labelled = [one.example for one in candidates if one.example.answer][: self._n]
        if not labelled:
            return UNAVAILABLE
        shown = Example(query, answer.text, rationale=answer.rationale)
        shares = await gather_all(self._right(shown, example, generator) for example in labelled)
        right = sum(shares) / len(shares)
        return RewardValue(right, {"mutual": right})

    async def _right(self, shown: Example, example: Example, generator: BudgetedGenerator) -> float:
        query = _with_choices(example, shown.query)
        prompt = self._prompt(query, [Candidate(shown, 1.0)])
        reply = await generator.generate(prompt, self._sampling)
        option = (example.answer,) if example.answer in query.choices else ()
        gold = Answer(example.answer, labels=example.labels or option)
        answers = [self._parse(query, one) for one in reply.completions]
        return share(answers, gold, query, self._agree)


class WeightedReward:
    """Weighted reward (eq. 9): alpha * self + (1 - alpha) * mutual, computed concurrently.

    If one part is unavailable, the other is the reward: answers without a rationale get the mutual
    reward, as the paper does for VizWiz and VSR.
    """

    def __init__(self, own: RewardFunction, mutual: RewardFunction, alpha: float = 0.2) -> None:
        if not 0 <= alpha <= 1:
            raise SettingError(f"alpha must be from 0 to 1, got {alpha}", hint="set alpha to 0.2")
        self._own = own
        self._mutual = mutual
        self._alpha = alpha

    async def __call__(
        self,
        query: Query,
        answer: Answer,
        candidates: Sequence[Candidate],
        generator: BudgetedGenerator,
        /,
    ) -> RewardValue:
        rewards = (self._own, self._mutual)
        own, mutual = await gather_all(
            checked_reward(reward, query, answer, candidates, generator) for reward in rewards
        )
        parts = {**own.parts, **mutual.parts}
        if not own.available or not mutual.available:
            return replace(own if own.available else mutual, parts=parts)
        return RewardValue(self._alpha * own.value + (1 - self._alpha) * mutual.value, parts)


async def checked_reward(
    reward: RewardFunction,
    query: Query,
    answer: Answer,
    candidates: Sequence[Candidate],
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


def check_at_least_one(name: str, count: int) -> None:
    if not isinstance(count, int) or count < 1:
        raise SettingError(
            f"{name} must be at least 1, got {count}", hint=f"set {name} to 1 or more"
        )


def check_variant(variant: str) -> None:
    if variant not in get_args(Variant):
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


class EnsembleReward:
    """Ensemble reward: the share of `n` other samples of `shots` demonstrations with the same
    answer.

    This reward is ours. The self-consistency reward (eq. 7) needs a rationale, and for a model that
    copies labels the mutual reward (eq. 8) only counts them. Candidates are sampled like branches
    (eq. 6). All answers to a query are compared with the same samples, which are requested once.
    """

    def __init__(
        self,
        prompt: Prompter,
        parse: Parser,
        *,
        shots: int,
        n: int = 15,
        sampling: Sampling | None = None,
        agree: AgreementFunction = exact_agreement,
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
        self,
        query: Query,
        answer: Answer,
        candidates: Sequence[Candidate],
        generator: BudgetedGenerator,
        /,
    ) -> RewardValue:
        if not answer.valid:
            return RewardValue(0.0, {"ensemble": 0.0})
        if not candidates:
            return UNAVAILABLE
        prompts = [self._prompt(query, shown) for shown in self._samples(query, candidates)]
        replies = await gather_all(generator.generate(prompt, self._sampling) for prompt in prompts)
        answers = [self._parse(query, reply.completions[0]) for reply in replies]
        agreeing = share(answers, answer, query, self._agree)
        return RewardValue(agreeing, {"ensemble": agreeing})

    def _samples(self, query: Query, candidates: Sequence[Candidate]) -> list[list[Candidate]]:
        rng = query_rng(query, f"ensemble:{self._seed}")  # independent of the branches
        return [self._sample(candidates, rng) for _ in range(self._n)]

    def _sample(self, candidates: Sequence[Candidate], rng: Random) -> list[Candidate]:
        left, weights = list(candidates), scaled([one.score for one in candidates])
        sample: list[Candidate] = []
        while left and len(sample) < self._shots:
            index = rng.choices(range(len(left)), weights)[0]
            sample.append(left.pop(index))
            weights.pop(index)
        return sample
