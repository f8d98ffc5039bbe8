"""Rationales for examples that have none: written by a model, kept if they lead to the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from math import ceil
from typing import Protocol

from bottega._util.event_loops import for_each
from bottega.errors import BottegaError, GenerationError, NotFoundError, SettingError
from bottega.knowledge import KnowledgeBase
from bottega.parsing import FinalAnswerParser, equal_answers, strip_thinking
from bottega.prompting import ConclusionPrompter, ExplanationPrompter
from bottega.prompting.turns import ASK_LETTER
from bottega.protocols import Generator, Parser, Pricer, turns_only
from bottega.types import Answer, Example, Prompt, Query, Reply, Sampling, Usage

ASK_LETTERS = "Answer with the letters of all right choices, separated by commas, or say none."

FRESH_SEED = 1_000_003  # far from the seeds of the predictions that select a rationale
Compare = Callable[[Answer, Answer, Query], float]
# Tag with the share of correct predictions of the best candidate; 0 means rejected.
ACCURACY = "rationale_accuracy"


@dataclass(frozen=True)
class RationaleResult:
    """Result for one example.

    `score` is the share of correct predictions with the best candidate; because they selected it,
    it is optimistic. `fresh_score` is the share among new predictions. `rationale` is None if no
    candidate led to a correct prediction, or after an `error`. `tried` holds the scores of all
    verified candidates, in order. `calls` counts completions. `cost_usd` covers all replies and is
    None if a price is unknown. `at_most_usd` is the cost if all candidates had been verified, each
    at the highest cost so far; without a verified candidate it is the cost spent.
    """

    rationale: str | None = None
    score: float = 0.0
    fresh_score: float | None = None
    tried: tuple[float, ...] = ()
    requests: int = 0
    calls: int = 0
    usage: Usage = field(default_factory=Usage)
    cost_usd: float | None = 0.0
    at_most_usd: float = 0.0
    error: BottegaError | None = None

    @property
    def verified(self) -> int:
        """Number of verified candidates."""
        return len(self.tried)


class RationaleMaker(Protocol):
    """Source of rationales, such as a `RationaleGenerator`. The result holds an example's error."""

    async def make(self, example: Example) -> RationaleResult: ...


@dataclass(frozen=True)
class RationaleGenerator:
    """Generator of self-consistent reasoning contexts (RCTS, section 3.2).

    One request writes `candidates` rationales for a question and its answer. For each candidate,
    one request without the answer makes `predictions`, and `compare` scores each prediction from 0
    to 1. The candidate with the highest mean wins, the first one on a tie. A candidate without any
    correct prediction never wins (in the paper it can).

    The paper verifies all candidates. With `stop_early`, as in its released code, verification
    stops at the first candidate with only correct predictions; candidates are verified concurrently
    in waves of 1, 2, 4 and so on. Empty candidates, and those that were cut, filtered or refused,
    are dropped. With `fresh`, one more request makes that many new predictions with the rationale
    that was kept, with another seed: `score` is optimistic, `fresh_score` is not. Raises
    `SettingError` for a model that answers in a word (`turns_only`, as the
    bundled models).
    """

    generator: Generator
    _: KW_ONLY
    candidates: int = 10
    predictions: int = 10
    stop_early: bool = True
    fresh: int = 0
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.7, max_tokens=512))
    explain: Callable[[Example], Prompt] = field(default_factory=ExplanationPrompter)
    conclude: Callable[[Query, str], Prompt] | None = None
    parse: Parser | None = None
    compare: Compare = equal_answers
    price: Pricer | None = None

    def __post_init__(self) -> None:
        if turns_only(self.generator):
            raise SettingError(
                f"{self.generator.name} answers in a word or two and cannot write rationales",
                hint="use a model that reasons, such as openai:NAME or a Hugging Face id",
            )

    async def make(self, example: Example) -> RationaleResult:
        """Generate the rationale of one example. Model errors are in the result, with the cost."""
        bill = _Bill(self.price, self.candidates + ceil(self.fresh / self.predictions))
        try:
            found = await self._best(example, bill)
            if self.fresh and found.rationale is not None:
                found = replace(
                    found, fresh_score=await self._fresh_score(example, found.rationale, bill)
                )
        except BottegaError as error:
            found = RationaleResult(error=error)
        return bill.total(found)

    async def _best(self, example: Example, bill: _Bill) -> RationaleResult:
        prompt = _build_prompt(lambda: self.explain(example))
        writing = replace(self.sampling, n=self.candidates)
        reply = await self.generator.generate(prompt, writing)
        bill.replies.append(reply)
        candidates = self._complete(reply)
        best = RationaleResult()
        for wave in self._waves(candidates):
            tried = [self._score(example, rationale, bill) for rationale in wave]
            # Wait for all, even after a failure: the cost of each reply must be counted.
            scores = await asyncio.gather(*tried, return_exceptions=True)
            for rationale, score in zip(wave, scores, strict=True):
                if isinstance(score, BaseException):
                    raise score
                best = replace(best, tried=(*best.tried, score))
                if score > best.score:
                    best = replace(best, rationale=rationale, score=score)
            if self.stop_early and best.score >= 1:
                break
        return best

    def _complete(self, reply: Reply) -> list[str]:
        """Return the distinct complete candidates. Raises `GenerationError` without any."""
        ended = (one for one in reply.completions if one.finish_reason == "stop")
        texts = [strip_thinking(one.text) for one in ended]
        # No store accepts a NUL.
        complete = list(dict.fromkeys(text for text in texts if text and "\0" not in text))
        if complete:
            return complete
        error = GenerationError(
            f"all {len(reply.completions)} rationales were empty, refused, filtered or cut at"
            f" {self.sampling.max_tokens} tokens",
            hint="raise --max-tokens, or use another model",
        )
        error.retryable = True  # a new request gives other candidates
        raise error

    def _waves(self, candidates: Sequence[str]) -> Iterator[Sequence[str]]:
        start, size = 0, 1 if self.stop_early else len(candidates)
        while start < len(candidates):
            yield candidates[start : start + size]
            start, size = start + size, 2 * size

    async def _fresh_score(self, example: Example, rationale: str, bill: _Bill) -> float:
        seed = (self.sampling.seed or 0) + FRESH_SEED
        sampling = replace(self.sampling, n=self.fresh, seed=seed)
        return await self._score(example, rationale, bill, sampling)

    async def _score(
        self, example: Example, rationale: str, bill: _Bill, sampling: Sampling | None = None
    ) -> float:
        labels = (example.answer,) if example.labels is None else example.labels
        single = len(labels) == 1
        default = ConclusionPrompter(letter_instruction=ASK_LETTER if single else ASK_LETTERS)
        conclude, parse = self.conclude or default, self.parse or FinalAnswerParser()
        prompt = _build_prompt(lambda: conclude(example.query, rationale))
        sampling = sampling or replace(self.sampling, n=self.predictions)
        reply = await self.generator.generate(prompt, sampling)
        bill.replies.append(reply)
        expected = Answer(example.answer, labels=labels)
        # Without choices, the parser keeps a list of labels unchanged.
        query = example.query if single or self.parse else replace(example.query, choices=())
        answers = [parse(query, completion) for completion in reply.completions]
        return sum(self.compare(one, expected, example.query) for one in answers) / len(answers)


def _build_prompt(build: Callable[[], Prompt]) -> Prompt:
    """Return the prompt; turn a `SettingError` into an error of this example only."""
    try:
        return build()
    except SettingError as error:
        own = GenerationError(str(error), hint=error.hint)
        own.retryable = True  # marks an error of one example
        raise own from error


@dataclass
class _Bill:
    """Replies for one example and their cost."""

    price: Pricer | None
    verifications: int  # at most, in requests of `predictions`
    replies: list[Reply] = field(default_factory=list)

    def total(self, result: RationaleResult) -> RationaleResult:
        price = self.price
        costs = [price(reply.model, reply.usage) if price else None for reply in self.replies]
        priced = [cost for cost in costs if cost is not None]
        # The cost of writing, and of verifying all candidates at the highest cost so far.
        writing, verifying = sum(priced[:1]), max(priced[1:], default=0.0)
        return replace(
            result,
            requests=len(self.replies),
            calls=sum(len(reply.completions) for reply in self.replies),
            usage=sum((reply.usage for reply in self.replies), Usage()),
            cost_usd=None if None in costs else sum(priced),
            at_most_usd=writing + self.verifications * verifying,
        )


@dataclass(frozen=True)
class PendingRationales:
    """Ids of the examples that need a rationale, in knowledge-base order, and counts of the others.

    `given` examples came with a rationale, `passages` have no answer, `rejected` were tried without
    success. `scores` are the scores of rationales made earlier.
    """

    ids: tuple[str, ...]
    given: int = 0
    passages: int = 0
    rejected: int = 0
    scores: tuple[float, ...] = ()


def find_pending(knowledge: KnowledgeBase, *, again: bool = False) -> PendingRationales:
    """Find the examples that need a rationale.

    `again` includes those that have one, or were tried and rejected.
    """
    ids: list[str] = []
    scores: list[float] = []
    given = passages = rejected = 0
    for example in knowledge:
        accuracy = _accuracy(example)
        if not example.answer:
            passages += 1
        elif again or (accuracy is None and not example.rationale):
            ids.append(str(example.id))
        elif accuracy is None:
            given += 1
        elif accuracy == 0:
            rejected += 1
        else:
            scores.append(accuracy)
    return PendingRationales(tuple(ids), given, passages, rejected, tuple(scores))


def _accuracy(example: Example) -> float | None:
    """Return the stored score, or None without a valid tag."""
    try:
        return float(example.tags[ACCURACY])
    except (KeyError, ValueError):
        return None


class CostBudget(Protocol):
    """Budget of a run: `reserve` says whether another example fits.

    `settle` records the cost of an example, and its cost if all candidates had been verified.
    """

    def reserve(self) -> bool: ...

    def settle(self, cost_usd: float | None, at_most_usd: float) -> None: ...


@dataclass(frozen=True)
class RationaleWriter:
    """Writer of rationales into a knowledge base; each is stored as soon as it is complete.

    A run can be stopped at any time and continued later. After a failed request the example stays
    unchanged. If all candidates are rejected, the example keeps its rationale and gets a score of
    0. `done` is called with each id and result. An error for which `is_item_error` is False would
    affect every example and is raised.
    """

    knowledge: KnowledgeBase
    rationales: RationaleMaker
    _: KW_ONLY
    is_item_error: Callable[[BottegaError], bool]
    done: Callable[[str, RationaleResult], None]

    async def run(self, ids: Sequence[str], budget: CostBudget, concurrency: int = 8) -> None:
        """Process `concurrency` examples at a time until the budget is used up."""

        async def work(id: str) -> None:
            budget.settle(*await self._one(id))

        await for_each(ids, work, limit=min(concurrency, len(ids)), starts=budget.reserve)

    async def _one(self, id: str) -> tuple[float | None, float]:
        """Process one example; return its cost and its maximum cost in USD."""
        try:
            example = await asyncio.to_thread(self.knowledge.get, id)
        except NotFoundError:  # deleted by another process
            return 0.0, 0.0
        made = await self.rationales.make(example)
        if made.error is None:
            with suppress(NotFoundError):
                await asyncio.to_thread(self._store, id, made)
        self.done(id, made)
        if made.error is not None and not self.is_item_error(made.error):
            raise made.error
        return made.cost_usd, made.at_most_usd

    def _store(self, id: str, made: RationaleResult) -> None:
        tags = {ACCURACY: f"{made.score:.4g}"}
        if made.rationale is None:
            self.knowledge.tag(id, tags)  # the stored rationale may be newer than the one read
        else:
            self.knowledge.annotate(id, rationale=made.rationale, tags=tags)
