"""What an answer is worth where nobody knows whether it is right: the rewards of RCTS."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal, Protocol, get_args

from bottega._util.rng import query_rng
from bottega.errors import SettingError
from bottega.protocols import Parser, Prompter
from bottega.reranking.search_budget import BudgetedGenerator, together
from bottega.reranking.selection import scaled
from bottega.types import Answer, Candidate, Example, Prompt, Query, Sampling

AgreementFunction = Callable[[Answer, Answer, Query], float]
Variant = Literal["paper", "released"]

SAMPLED = Sampling(temperature=0.8)


def exact_agreement(one: Answer, other: Answer, query: Query, /) -> float:
    """1 if the labels are the same, or the texts up to case and spacing; else 0."""
    if one.labels and other.labels:
        return float(set(one.labels) == set(other.labels))
    return float(_plain(one.text) == _plain(other.text))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


@dataclass(frozen=True)
class RewardValue:
    """`value` from 0 to 1. `parts` are what it was put together from, by name, for the trace.
    Where a reward could not be asked for, `asked` is False, and the value counts for nothing."""

    value: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    asked: bool = True


UNAVAILABLE = RewardValue(asked=False)


class RewardFunction(Protocol):
    """What an answer that was given to a query is worth. `known` are the candidates of the query,
    nearest first. Raises what `ask` raises: a request that failed is worth nothing, not even 0."""

    async def __call__(
        self, query: Query, said: Answer, known: Sequence[Candidate], ask: BudgetedGenerator, /
    ) -> RewardValue: ...


class SelfConsistencyReward:
    """Equation 7: the query is asked again, with the rationale of the answer and without
    demonstrations; the reward is the share of `n` samples, drawn in one request, that agree.

    `prompt(query, rationale)` shows the rationale. Without one there is nothing to ask: the reward
    is not asked then, whereas `variant="released"` makes it 0 (eq. 7 says nothing about it).
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
        self, query: Query, said: Answer, known: Sequence[Candidate], ask: BudgetedGenerator, /
    ) -> RewardValue:
        if not said.valid:
            return RewardValue(0.0, {"self": 0.0})
        if not said.rationale:
            return RewardValue(0.0, {"self": 0.0}) if self._variant == "released" else UNAVAILABLE
        reply = await ask.ask(self._prompt(query, said.rationale), self._sampling)
        answers = [self._parse(query, one) for one in reply.completions]
        agreeing = share(answers, said, query, self._agree)
        return RewardValue(agreeing, {"self": agreeing})


class MutualReward:
    """Equation 8: the query with its answer becomes the demonstration for the first `n` candidates
    whose answers are known; the reward is the share of them that is answered right.

    Each is sampled once, as eq. 8 has it; `variant="released"` samples each 5 times, in one
    request. `samples` is any other number. Nothing is asked where no answer is known.
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
        self, query: Query, said: Answer, known: Sequence[Candidate], ask: BudgetedGenerator, /
    ) -> RewardValue:
        if not said.valid:
            return RewardValue(0.0, {"mutual": 0.0})
        answered = [one.example for one in known if one.example.answer][: self._n]
        if not answered:
            return UNAVAILABLE
        shown = Example(query, said.text, rationale=said.rationale)
        shares = await together(self._right(shown, example, ask) for example in answered)
        right = sum(shares) / len(shares)
        return RewardValue(right, {"mutual": right})

    async def _right(self, shown: Example, example: Example, ask: BudgetedGenerator) -> float:
        query = _with_choices(example, shown.query)
        prompt = self._prompt(query, [Candidate(shown, 1.0)])
        reply = await ask.ask(prompt, self._sampling)
        option = (example.answer,) if example.answer in query.choices else ()
        gold = Answer(example.answer, labels=example.labels or option)
        answers = [self._parse(query, one) for one in reply.completions]
        return share(answers, gold, query, self._agree)


class WeightedReward:
    """Equation 9: alpha * self + (1 - alpha) * mutual. Where one of them could not be asked for,
    the other alone: answers without a rationale are worth what is mutual (as the paper does for
    VizWiz and VSR, whose answers have none). Both are asked at once."""

    def __init__(self, own: RewardFunction, mutual: RewardFunction, alpha: float = 0.2) -> None:
        if not 0 <= alpha <= 1:
            raise SettingError(f"alpha is {alpha}", hint="set it between 0 and 1")
        self._own = own
        self._mutual = mutual
        self._alpha = alpha

    async def __call__(
        self, query: Query, said: Answer, known: Sequence[Candidate], ask: BudgetedGenerator, /
    ) -> RewardValue:
        rewards = (self._own, self._mutual)
        own, mutual = await together(
            checked_reward(reward, query, said, known, ask) for reward in rewards
        )
        parts = {**own.parts, **mutual.parts}
        if not own.asked or not mutual.asked:
            return replace(own if own.asked else mutual, parts=parts)
        return RewardValue(self._alpha * own.value + (1 - self._alpha) * mutual.value, parts)


async def checked_reward(
    reward: RewardFunction,
    query: Query,
    said: Answer,
    known: Sequence[Candidate],
    ask: BudgetedGenerator,
) -> RewardValue:
    """What the reward says, unless nobody could compare it with another."""
    worth: object = await reward(query, said, known, ask)
    if not isinstance(worth, RewardValue):
        raise SettingError(
            f"a reward gave {worth!r}", hint="return bottega.Worth(value), the value from 0 to 1"
        )
    if not 0 <= worth.value <= 1:
        raise SettingError(
            f"a reward gave a value of {worth.value}", hint="scale its values to 0..1"
        )
    return worth


def check_at_least_one(name: str, count: int) -> None:
    if not isinstance(count, int) or count < 1:
        raise SettingError(f"{name} is {count}", hint=f"set {name} to a whole number of 1 or more")


def check_variant(variant: str) -> None:
    if variant not in get_args(Variant):
        raise SettingError(f"there is no variant {variant!r}", hint='use "paper" or "released"')


def share(
    answers: Sequence[Answer], right: Answer, query: Query, agree: AgreementFunction
) -> float:
    """Over all answers: an invalid one agrees with nothing."""
    return sum(agree(one, right, query) for one in answers if one.valid) / len(answers)


def _with_choices(example: Example, query: Query) -> Query:
    """Examples of a classification seldom bring the choices that all of them share."""
    asked, labels = example.query, example.labels or (example.answer,)
    if asked.choices or not set(labels) <= set(query.choices):
        return asked
    return replace(asked, choices=query.choices)


class EnsembleReward:
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
        self, query: Query, said: Answer, known: Sequence[Candidate], ask: BudgetedGenerator, /
    ) -> RewardValue:
        if not said.valid:
            return RewardValue(0.0, {"ensemble": 0.0})
        if not known:
            return UNAVAILABLE
        prompts = [self._prompt(query, shown) for shown in self._draws(query, known)]
        replies = await together(ask.ask(prompt, self._sampling) for prompt in prompts)
        answers = [self._parse(query, reply.completions[0]) for reply in replies]
        agreeing = share(answers, said, query, self._agree)
        return RewardValue(agreeing, {"ensemble": agreeing})

    def _draws(self, query: Query, known: Sequence[Candidate]) -> list[list[Candidate]]:
        rng = query_rng(query, f"ensemble:{self._seed}")  # not those of the branches
        return [self._draw(known, rng) for _ in range(self._n)]

    def _draw(self, known: Sequence[Candidate], rng: Random) -> list[Candidate]:
        left, weights = list(known), scaled([one.score for one in known])
        drawn: list[Candidate] = []
        while left and len(drawn) < self._shots:
            place = rng.choices(range(len(left)), weights)[0]
            drawn.append(left.pop(place))
            weights.pop(place)
        return drawn
