"""Rationales for examples that have none: written by a model, kept if they lead to the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from bottega.errors import BottegaError, GenerationError, NotFoundError, SettingError
from bottega.knowledge import KnowledgeBase
from bottega.parsing import FinalAnswerParser, same_answer, strip_thinking
from bottega.prompting import ConclusionPrompter, ExplanationPrompter
from bottega.protocols import Generator, Parser, Pricer, turns_only
from bottega.types import Answer, Completion, Example, Prompt, Query, Reply, Sampling, Usage

ASK_LETTERS = "Answer with the letters of all right choices, separated by commas, or say none."

Agree = Callable[[Answer, Answer, Query], float]


@dataclass(frozen=True)
class Made:
    """What became of an example. `score` is the share of right predictions of the best candidate;
    without a `rationale` none was ever right, or there was an `error`.

    `tried` are the shares of all candidates that were tried, in order. `calls` are completions.
    `cost_usd`, of everything that came back, is None where a price is not known. `at_most_usd` is
    what it would have been had all candidates been verified, each as dear as the dearest was; it is
    what was spent where none was verified.
    """

    rationale: str | None = None
    score: float = 0.0
    tried: tuple[float, ...] = ()
    requests: int = 0
    calls: int = 0
    usage: Usage = field(default_factory=Usage)
    cost_usd: float | None = 0.0
    at_most_usd: float = 0.0
    error: BottegaError | None = None

    @property
    def verified(self) -> int:
        return len(self.tried)


class Rationales:
    """Self-consistent reasoning contexts (RCTS, section 3.2).

    For the question and its answer so many `candidates` are written in one request. With each of
    them, and without the answer, so many `predictions` are made in one request, and `agree` says
    how right they are, from 0 to 1. The best mean wins, the first of several; a candidate that is
    never right does not (the paper takes it all the same).

    The paper verifies all candidates. With `stop_early`, as in its released code, that ends at the
    first one whose predictions are all right: they are verified in waves of 1, 2, 4 and so on, each
    wave at once. Candidates that are empty, or did not end by themselves (cut, filtered, refused),
    are none.

    Raises `SettingError` for a model that answers in a word (`turns_only`, as the bundled ones).
    """

    def __init__(
        self,
        generator: Generator,
        *,
        candidates: int = 10,
        predictions: int = 10,
        stop_early: bool = True,
        sampling: Sampling | None = None,
        explain: Callable[[Example], Prompt] | None = None,
        conclude: Callable[[Query, str], Prompt] | None = None,
        parse: Parser | None = None,
        agree: Agree = same_answer,
        price: Pricer | None = None,
    ) -> None:
        if turns_only(generator):
            raise SettingError(
                f"{generator.name} answers in a word or two: it cannot write rationales",
                hint="name a model that reasons, such as openai:NAME or a Hugging Face id",
            )
        sampling = sampling or Sampling(temperature=0.7, max_tokens=512)
        self._generator = generator
        self._writing = replace(sampling, n=candidates)
        self._predicting = replace(sampling, n=predictions)
        self._stop_early = stop_early
        self._explain = explain or ExplanationPrompter()
        self._conclude = conclude or ConclusionPrompter()
        self._conclude_several = conclude or ConclusionPrompter(by_letter=ASK_LETTERS)
        self._parse = parse or FinalAnswerParser()
        self._parse_several = parse or _as_listed
        self._agree = agree
        self._price = price

    async def make(self, example: Example) -> Made:
        """Errors of the model are in what it returns, beside what was spent until then."""
        bill = _Bill(self._price, self._writing.n)
        try:
            found = await self._best(example, bill)
        except BottegaError as error:
            return bill.totalled(Made(error=error))
        return bill.totalled(found)

    async def _best(self, example: Example, bill: _Bill) -> Made:
        prompt = _asked(lambda: self._explain(example))
        reply = await self._generator.generate(prompt, self._writing)
        bill.add(reply)
        candidates = self._whole(reply)
        best = Made()
        for wave in self._waves(candidates):
            tried = [self._score(example, rationale, bill) for rationale in wave]
            # All are waited for, also beside one that failed: what they cost is to be counted.
            scores = await asyncio.gather(*tried, return_exceptions=True)
            for rationale, score in zip(wave, scores, strict=True):
                if isinstance(score, BaseException):
                    raise score
                best = replace(best, tried=(*best.tried, score))
                if score > best.score:
                    best = replace(best, rationale=rationale, score=score)
            if self._stop_early and best.score >= 1:
                break
        return best

    def _whole(self, reply: Reply) -> list[str]:
        """Equal ones are verified once."""
        ended = (one for one in reply.completions if one.finish_reason == "stop")
        texts = [strip_thinking(one.text) for one in ended]
        # No store takes a NUL.
        whole = list(dict.fromkeys(text for text in texts if text and "\0" not in text))
        if whole:
            return whole
        error = GenerationError(
            f"all {len(reply.completions)} rationales were empty, refused, filtered or cut at"
            f" {self._writing.max_tokens} tokens",
            hint="allow more tokens (--max-tokens), or ask another model",
        )
        error.retryable = True  # the next ones are other ones
        raise error

    def _waves(self, candidates: Sequence[str]) -> Iterator[Sequence[str]]:
        start, size = 0, 1 if self._stop_early else len(candidates)
        while start < len(candidates):
            yield candidates[start : start + size]
            start, size = start + size, 2 * size

    async def _score(self, example: Example, rationale: str, bill: _Bill) -> float:
        labels = (example.answer,) if example.labels is None else example.labels
        conclude = self._conclude if len(labels) == 1 else self._conclude_several
        prompt = _asked(lambda: conclude(example.query, rationale))
        reply = await self._generator.generate(prompt, self._predicting)
        bill.add(reply)
        known = Answer(example.answer, labels=labels)
        parse = self._parse if len(labels) == 1 else self._parse_several
        said = [parse(example.query, one) for one in reply.completions]
        return sum(self._agree(one, known, example.query) for one in said) / len(said)


def _as_listed(query: Query, completion: Completion) -> Answer:
    """All that was said, of which the choices would have one option taken."""
    return FinalAnswerParser()(replace(query, choices=()), completion)


def _asked(make: Callable[[], Prompt]) -> Prompt:
    """A prompt that cannot be made is the fault of this example, and of no other."""
    try:
        return make()
    except SettingError as error:
        own = GenerationError(str(error), hint=error.hint)
        own.retryable = True  # as one that concerns its own example alone
        raise own from error


@dataclass
class _Bill:
    price: Pricer | None
    candidates: int
    replies: list[Reply] = field(default_factory=list)

    def add(self, reply: Reply) -> None:
        self.replies.append(reply)

    def totalled(self, made: Made) -> Made:
        usages = [reply.usage for reply in self.replies]
        costs = [self._cost(reply) for reply in self.replies]
        known = [cost for cost in costs if cost is not None]
        return replace(
            made,
            requests=len(self.replies),
            calls=sum(len(reply.completions) for reply in self.replies),
            usage=Usage(
                sum(usage.prompt_tokens for usage in usages),
                sum(usage.completion_tokens for usage in usages),
                sum(usage.cached_tokens for usage in usages),
            ),
            cost_usd=None if None in costs else sum(known),
            at_most_usd=self._at_most(known),
        )

    def _cost(self, reply: Reply) -> float | None:
        return self.price(reply.model, reply.usage) if self.price else None

    def _at_most(self, costs: Sequence[float]) -> float:
        writing, verifying = sum(costs[:1]), max(costs[1:], default=0.0)
        return writing + self.candidates * verifying


# The tag that says how often predictions were right with the best candidate; 0 is a rejected one.
ACCURACY = "rationale_accuracy"


@dataclass(frozen=True)
class Todo:
    """The ids of examples to make rationales for, in the order of the knowledge base. Of the others
    `given` came with a rationale, `passages` have no answer; `scores` are those of the rationales
    that were made earlier, `rejected` were tried in vain."""

    ids: tuple[str, ...]
    given: int = 0
    passages: int = 0
    rejected: int = 0
    scores: tuple[float, ...] = ()


def todo(knowledge: KnowledgeBase, *, again: bool = False) -> Todo:
    """`again` also takes those that have a rationale, or were tried and rejected."""
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
    return Todo(tuple(ids), given, passages, rejected, tuple(scores))


def _accuracy(example: Example) -> float | None:
    """None where the tag is not ours."""
    try:
        return float(example.tags[ACCURACY])
    except (KeyError, ValueError):
        return None


class SpendingBudget(Protocol):
    """What a run may cost: `reserve` says whether another example can be paid for, and `settle` is
    told what it cost, and what it would have cost with all candidates."""

    def reserve(self) -> bool: ...

    def settle(self, cost_usd: float | None, at_most_usd: float) -> None: ...


class Enriching:
    """Stores each rationale, durably, when it is made. An example whose request failed stays as it
    is; one whose candidates are all rejected keeps what it had, and is tagged with a score of 0.

    `done` is told of each. An error for which `is_item_error` is false would meet every example,
    and is raised.
    """

    def __init__(
        self,
        knowledge: KnowledgeBase,
        rationales: Rationales,
        *,
        is_item_error: Callable[[BottegaError], bool],
        done: Callable[[str, Made], None],
    ) -> None:
        self._knowledge = knowledge
        self._rationales = rationales
        self._is_item_error = is_item_error
        self._done = done

    async def run(self, ids: Sequence[str], budget: SpendingBudget, concurrency: int = 8) -> None:
        """So many examples at once, until the purse is empty."""
        waiting = iter(ids)

        async def work() -> None:
            for id in waiting:
                if not budget.reserve():
                    return
                budget.settle(*await self._one(id))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(ids))):
                group.create_task(work())

    async def _one(self, id: str) -> tuple[float | None, float]:
        """What it cost, and would at most."""
        try:
            example = await asyncio.to_thread(self._knowledge.get, id)
        except NotFoundError:  # deleted by another process: nobody lacks its rationale
            return 0.0, 0.0
        made = await self._rationales.make(example)
        if made.error is None:
            with suppress(NotFoundError):
                await asyncio.to_thread(self._store, id, made)
        self._done(id, made)
        if made.error is not None and not self._is_item_error(made.error):
            raise made.error
        return made.cost_usd, made.at_most_usd

    def _store(self, id: str, made: Made) -> None:
        tags = {ACCURACY: f"{made.score:.4g}"}
        if made.rationale is None:
            self._knowledge.tag(id, tags)  # what it has may be newer than what was read
        else:
            self._knowledge.annotate(id, rationale=made.rationale, tags=tags)
